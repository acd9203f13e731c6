"""Ranks that don't run alike: who has nothing to run keeps company, and what can't go on is refused by all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import launch_ranks


def launched(case: str, world: int) -> list[Any]:
    return [json.loads(said) for said in launch_ranks(["-m", "tests.train.sharding.lockstep_worker", case], world)]


def test_a_rank_with_nothing_to_run_keeps_the_others_company() -> None:
    alone = launched("idle", 1)[0]
    assert len(alone) == 6
    assert launched("idle", 2) == [alone, alone]


@pytest.mark.parametrize("case", ["skipped", "graphless"])
def test_ranks_that_run_other_blocks_are_refused_on_all(case: str) -> None:
    for said in launched(case, 2):
        assert "don't: model or loss leave blocks out" in said
