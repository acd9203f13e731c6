"""What leads on to state is found in a container by each container and function in it, and by the class of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cosmati.train import user_objects
from cosmati.train.user_objects import leads_on


class Kept:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.count = 0


def function() -> None: ...


NOTES: list[int] = []
LEADS: list[Callable[[], Any]] = [Kept, lambda: function, lambda: NOTES.append]


@pytest.mark.parametrize("make", LEADS)
def test_each_item_counts_whatever_its_neighbours_are(make: Callable[[], Any]) -> None:
    one = make()
    assert leads_on(one)
    for nest in ((one, len), (len, one), [(one, 1.0), (2.0, 1.0)], [(2.0, 1.0), (one, 1.0)], {"a": {"b": [one]}}):
        assert leads_on(nest), nest
    assert leads_on([[len], [one], [len]])


@pytest.mark.parametrize("plain", [1.0, "text", None, len, (), [], {}, [(1.0, 2.0), (3, "x")], {"a": {"b": [len]}}])
def test_plain_values_lead_nowhere(plain: object) -> None:
    assert not leads_on(plain)
    assert not leads_on([plain, plain])


def test_of_many_containers_the_first_are_asked_one_by_one_and_the_others_by_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_objects, "MAX_ITEMS", 2)
    assert leads_on([(1,), (Kept(),), (2,)])
    assert leads_on([(1,), (2,), (3,), (Kept(),)])
    assert not leads_on([(1,), (2,), (Kept(),), (3,)])
    assert leads_on([1, 2, 3, Kept(), 4])


def test_what_lies_deeper_than_is_looked_is_taken_to_lead_on() -> None:
    nest: Any = 1.0
    deep = [nest := [nest] for _ in range(8)]
    assert [leads_on(one) for one in deep] == [False] * 4 + [True] * 4
