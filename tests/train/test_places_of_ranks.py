"""Where a rank stands among replicas of T ranks each."""

from __future__ import annotations

from typing import Any

import pytest

from cosmati.errors import PlanError
from cosmati.train import ranks as module
from cosmati.train.ranks import Ranks


def joined(world: int, rank: int, degree: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[list[list[int]]]]:
    groups: list[list[list[int]]] = []
    monkeypatch.setattr(module, "_joined", lambda given: groups.append([list(one) for one in given]) or len(groups))
    made: Any = Ranks.alone()
    made.world, made.rank, made.is_parallel = world, rank, True
    made.has_met = False
    made._join(degree)
    return made, groups


@pytest.mark.parametrize(
    ("world", "degree", "within", "across"),
    [
        (4, 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (8, 4, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (4, 4, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
    ],
)
def test_replicas_are_consecutive_ranks(
    world: int, degree: int, within: list[list[int]], across: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(world):
        made, groups = joined(world, rank, degree, monkeypatch)
        assert groups == [within, across]
        assert (made.within, made.across, made.degree) == (1, 2, degree)
        assert rank in within[made.replica]
        assert made.num_replicas == len(within)
        assert made.has_replicas == (len(within) > 1)
        assert not made.can_tell, "others wait for its part"


def test_a_rank_can_tell_until_ranks_have_met() -> None:
    made: Any = Ranks.alone()
    made.has_met = False
    assert not made.can_tell
    made.is_parallel = True
    assert made.can_tell
    made.has_met = True
    assert not made.can_tell
    made.has_met, made.in_lockstep = False, True
    assert not made.can_tell


def test_ranks_that_replicas_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="6 ranks can't be replicas of tensor_parallel=4 ranks"):
        joined(6, 0, 4, monkeypatch)
