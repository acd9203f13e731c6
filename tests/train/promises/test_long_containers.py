"""A container's content is that of all its items: their order counts where a container has one, however long it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import pytest

from cosmati.train import values
from cosmati.train.values import content_of, read

MAX_KEPT = 10_000
"""Items that are kept as they are; of more there's a digest, part by part."""
FEW = 8
"""Likewise, where a test says so: what isn't plain is read item by item, which takes seconds."""
LENGTHS = (3, FEW, FEW + 1, 2 * FEW + 5)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a digest stand for more than a few items."""
    monkeypatch.setattr(values, "_MAX_KEPT", FEW)


def exchanged(items: list[Any], i: int, j: int) -> list[Any]:
    found = list(items)
    found[i], found[j] = found[j], found[i]
    return found


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [list, tuple, deque])
@pytest.mark.parametrize("item", [int, str, lambda i: (i, str(i)), lambda i: [i]], ids=["int", "str", "pair", "list"])
def test_the_order_of_items_counts(length: int, kind: Callable[[Any], Any], item: Callable[[int], Any]) -> None:
    items = [item(i) for i in range(length)]
    was = content_of(kind(items))
    assert was == content_of(kind(list(items)))
    assert read(kind(items))[1]
    for i, j in ((0, 1), (0, length - 1), (length - 2, length - 1)):
        assert content_of(kind(exchanged(items, i, j))) != was


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("length", LENGTHS)
def test_the_order_of_a_mapping_counts(length: int) -> None:
    pairs = [(str(i), i) for i in range(length)]
    was = content_of(dict(pairs))
    assert was == content_of(dict(pairs))
    assert content_of(dict(exchanged(pairs, 0, 1))) != was
    assert content_of(dict([*pairs[:-1], (str(length - 1), 0)])) != was
    assert content_of(dict(reversed(pairs))) != was


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("item", [lambda i: f"{i}", lambda i: frozenset({f"{i}"})], ids=["plain", "nested"])
def test_the_order_in_which_a_set_was_filled_counts_nothing(
    length: int, kind: Callable[[Collection[Any]], Any], item: Callable[[int], Any]
) -> None:
    items = [item(i) for i in range(length)]
    was = content_of(kind(items))
    assert was == content_of(kind(items[::-1]))
    assert was != content_of(kind([*items[1:], item(length)]))
    assert was != content_of(kind(items[1:]))


@pytest.mark.parametrize("length", [MAX_KEPT, MAX_KEPT + 1])
def test_two_neighbours_of_ten_thousand_that_change_places_are_another_content(length: int) -> None:
    items = list(range(length))
    assert content_of(items) == content_of(list(items))
    assert content_of(items) != content_of(exchanged(items, 4000, 4001))


def test_up_to_so_many_items_are_kept_and_of_more_a_digest() -> None:
    def told(value: object) -> Any:
        return content_of(value)[1]  # type: ignore[index]

    kept, digest = told([0] * MAX_KEPT), told([0] * (MAX_KEPT + 1))
    assert kept == (MAX_KEPT, repr([0] * MAX_KEPT))
    assert digest[0] == MAX_KEPT + 1
    assert len(digest[1]) == 32
    assert told({2, 10, 1}) == (3, "[1, 10, 2]")
    assert told([2, 10, 1]) == (3, "[2, 10, 1]")
    assert told([]) == (0, "[]")
    assert told([(1, "a"), (None,)]) == (2, "[(1, 'a'), (None,)]")


@pytest.mark.parametrize(("limit", "is_whole"), [(31, False), (32, True)])
@pytest.mark.parametrize("items", [[[], []], [0] * 32], ids=["read by themselves", "plain"])
def test_plain_items_cost_one_and_others_sixteen(
    monkeypatch: pytest.MonkeyPatch, items: list[Any], limit: int, is_whole: bool
) -> None:
    monkeypatch.setattr(values, "MAX_VALUES", limit)
    assert read(items)[1] == is_whole
