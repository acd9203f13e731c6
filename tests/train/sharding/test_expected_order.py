"""What ranks expect of an order of exchanges, how often it may change, and where their ways part."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from cosmati.errors import PlanError
from cosmati.train.layout import lockstep
from cosmati.train.layout.lockstep import Lockstep


def alone() -> Any:
    made: Any = object.__new__(Lockstep)
    made._expected, made._changes, made._device = {}, Counter(), torch.device("cpu")
    return made


def test_what_changes_too_often_is_asked_each_time() -> None:
    made = alone()
    made._expect("loss", (1, 2))
    made._expect("loss", (1, 2))
    assert made._expected == {"loss": (1, 2)}
    for changes, way in enumerate([(1,), (1, 2)], 2):
        made._expect("loss", way)
        made._expect("other", (5,))
        assert made._changes["loss"] == changes
        assert made._expected == {"loss": way, "other": (5,)}
    assert lockstep._MOST_CHANGES == 3
    made._expect("loss", (2,))
    assert made._expected == {"other": (5,)}
    made._expect("loss", (2,))
    assert made._expected == {"other": (5,)}, "for good"


class Peers:
    """What all ranks say, this one's in its place."""

    def __init__(self, others: list[Any]) -> None:
        self.others = others

    def gather_by_rank(self, own: torch.Tensor) -> torch.Tensor:
        return torch.cat([own, torch.tensor(self.others, dtype=own.dtype).view(-1, *own.shape[1:])])


@pytest.mark.parametrize(
    ("own", "others", "found"),
    [(3, [3, 3], 3), (3, [-1, 3], 3), (-1, [4, -1], 4), (-1, [-1, -1], -1), (3, [4, -1], None), (-1, [3, 4], None)],
)
def test_all_come_to_one_exchange_or_are_refused(own: int, others: list[int], found: int | None) -> None:
    made = alone()
    made._ranks = Peers(others)
    if found is None:
        with pytest.raises(PlanError, match="every rank gathers the same blocks in the same order"):
            made._asked(own)
    else:
        assert made._asked(own) == found


@pytest.mark.parametrize(
    ("place", "own", "others", "found", "taken"),
    [
        (1, 7, [[1, 7]], 7, 0),  # both left at one place for one exchange
        (1, -1, [[1, -1]], -1, 0),  # both are through
        (1, -1, [[3, -1]], -1, 2),  # the other went further; this one keeps company, and takes what was made
        (2, 9, [[2, -1]], 9, 0),
        (1, 7, [[1, 8]], None, 0),
        (1, 7, [[2, 7]], None, 0),
        (1, 7, [[2, -1]], None, 0),  # beyond the place where one left
    ],
)
def test_ways_that_part_at_one_place_go_on_together(
    place: int, own: int, others: list[list[int]], found: int | None, taken: int
) -> None:
    made, took = alone(), list[int]()
    made._way, made._made, made._ranks = (1, 2, 3), [1, 2, 3][:place], Peers(others)
    made._accompany = lambda exchange: lambda: took.append(exchange)
    if found is None:
        with pytest.raises(PlanError, match="every rank gathers the same blocks"):
            made._leave(own)
        assert took == []
    else:
        assert made._leave(own) == found
        assert took == [1, 2, 3][place : place + taken]
        assert (made._way, made._made) == (None, [1, 2, 3][: place + taken])
