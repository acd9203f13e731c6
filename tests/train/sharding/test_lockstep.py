"""Ranks that don't run alike: who has nothing to run keeps the others company, and what can't go on is refused by all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import launch_ranks


def launched(case: str, world: int) -> list[Any]:
    return [json.loads(said) for said in launch_ranks(["-m", "tests.train.sharding.lockstep_worker", case], world)]


@pytest.mark.parametrize("case", ["idle", "graphless"])
def test_a_rank_with_nothing_to_differentiate_keeps_the_others_company(case: str) -> None:
    alone = launched(case, 1)[0]
    assert len(alone) == 6
    assert launched(case, 2) == [alone, alone]


@pytest.mark.parametrize(("case", "why"), [("skipped", "leave blocks out"), ("late", "leave blocks out")])
def test_ranks_that_run_other_blocks_are_refused_on_all(case: str, why: str) -> None:
    first, second = launched(case, 2)
    assert why in first
    assert why in second
