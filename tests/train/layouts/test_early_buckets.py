"""Buckets leave in their order, each as soon as the last leaf has all of its gradients; a second one comes too late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.train.layout.exchange import RankSum


def waiting(indices: set[int]) -> tuple[Any, list[str], Any]:
    """A sum of two buckets, of parameters 0 and 2 and of 1 and 3, which waits for some of them."""
    sent: list[str] = []
    made: Any = object.__new__(RankSum)
    made._buckets = [SimpleNamespace(name=name, parameters=own) for name, own in (("first", (0, 2)), ("then", (1, 3)))]
    made._sent, made._awaited_with, made._ranks = sent, {}, SimpleNamespace(num_early=0)
    made._send = lambda bucket, _: sent.append(bucket.name)
    made.expect(indices)
    return made, sent, made._ranks


@pytest.mark.parametrize(
    ("order", "left_after"),
    [((0, 2, 1, 3), [0, 1, 1, 2]), ((1, 3, 0, 2), [0, 0, 0, 2]), ((3, 0, 1, 2), [0, 0, 0, 2])],
)
def test_a_bucket_leaves_with_its_last_gradient_after_those_before_it(
    order: tuple[int, ...], left_after: list[int]
) -> None:
    made, sent, ranks = waiting({0, 1, 2, 3})
    for index, num_left in zip(order, left_after, strict=True):
        assert made.arrived(index) is True
        assert (len(sent), ranks.num_early) == (num_left, num_left)
        assert made.arrived(index) is False, "its bucket may be gone"
    assert sent == ["first", "then"]


def test_what_is_not_awaited_arrives_at_any_time() -> None:
    made, sent, _ = waiting({0, 1, 2})
    assert [made.arrived(3), made.arrived(3)] == [True, True]
    assert [made.arrived(index) for index in (0, 2)] == [True, True]
    assert sent == ["first"]
    assert made.arrived(1)
    assert sent == ["first", "then"]
