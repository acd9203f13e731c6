"""Ranks that don't run alike: who has nothing to run keeps company, and what can't go on is refused by all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import launch_ranks

pytestmark = pytest.mark.long


def launched(case: str, world: int) -> list[Any]:
    return [json.loads(said) for said in launch_ranks(["-m", "tests.train.sharding.lockstep_worker", case], world)]


@pytest.mark.parametrize(
    "case",
    [
        "idle",
        "idle later",
        "unused",
        "routed",
        "graphless",
        "graphless later",
        "shorter",
        "longer",
        "idle, weights rounded",
    ],
)
def test_what_a_rank_has_nothing_for_changes_no_sum(case: str) -> None:
    alone = launched(case, 1)[0]
    assert len(alone) == 8
    assert launched(case, 2) == [alone, alone]


@pytest.mark.parametrize("case", ["skipped", "skipped later"])
def test_ranks_that_run_other_blocks_are_refused_on_all(case: str) -> None:
    for said in launched(case, 2):
        assert "don't: model or loss leave blocks out" in said


def test_models_whose_bits_would_be_others_are_refused_by_name() -> None:
    for said in launch_ranks(["-m", "tests.train.sharding.odd_worker"], 2):
        found = json.loads(said)
        assert found["none"] == "3 groups"  # the blocks of a list of lists, and the rest
        assert "forward pass changes stem.weight" in found["written"]
        assert "forward pass changes stem.weight" in found["written past autograd"]
        assert "block of blocks.0.0.weight reads an input several times" in found["grouped"]
        assert "weights are whole only while" in found["used outside"]
