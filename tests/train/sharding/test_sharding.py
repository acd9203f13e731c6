"""Sharding is a choice of cost, never of bits: weights, buffers, optimizer state, averages and metrics."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes import begin_ranks, launch_ranks
from tests.train.sharding import worker
from tests.train.sharding.worker import CASES, STEPS

pytestmark = pytest.mark.long

QUICK = ("adamw fused", "muon", "routed")


def _launch(folder: Path, world: int, sharding: str, cases: Sequence[str], *, stop: int = 0) -> dict[str, Any]:
    """Start or go on with runs in a folder on so many ranks, and return what rank 0 found."""
    folder.mkdir(exist_ok=True)
    launch_ranks([worker.__file__, folder, sharding, str(stop), *cases], world)
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The quick cases on one rank."""
    facts = _launch(tmp_path_factory.mktemp("alone"), 1, "optimizer", QUICK)
    assert all(one["elastic"] and one["step"] == STEPS for one in facts.values())
    return facts


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_optimizers_that_are_shared_out_give_the_bits_of_one_rank(
    tmp_path: Path, alone: dict[str, Any], world: int
) -> None:
    assert _launch(tmp_path, world, "optimizer", QUICK) == alone


@pytest.mark.slow
def test_ranks_and_sharding_may_change_in_mid_run(tmp_path: Path, alone: dict[str, Any]) -> None:
    ways = ((4, "optimizer", 2), (2, "replicated", 4), (2, "optimizer", 5))
    seen = []
    for world, sharding, stop in ways:
        facts = _launch(tmp_path, world, sharding, ["muon"], stop=stop)["muon"]
        assert (facts["outcome"], facts["step"]) == ("stopped", stop)
        seen += facts["seen"]
    last = _launch(tmp_path, 1, "optimizer", ["muon"])["muon"]
    assert {**last, "seen": [*seen, *last["seen"]]} == alone["muon"]


@pytest.mark.parametrize("what", ["gradients", "parameters"])
def test_a_rank_that_is_killed_in_the_exchange(tmp_path: Path, alone: dict[str, Any], what: str) -> None:
    """Nothing of the step is committed anywhere: others go on from the last checkpoint, however they share."""
    case = "adamw fused"
    ranks = begin_ranks([worker.__file__, tmp_path, "optimizer", "0", case], 2, DIES_AT=f"{what} 5")
    try:
        ranks[1].communicate(120)
        ranks[0].communicate(60)
        assert ranks[1].wait() == -signal.SIGKILL
        assert ranks[0].wait() != 0
    finally:
        for rank in ranks:
            rank.kill()
    kept = sorted(path.name for path in (tmp_path / case / "checkpoints").glob("step-*"))
    assert kept == ["step-00000002", "step-00000004"]
    found = _launch(tmp_path, 2, "replicated", [case])[case]
    assert found == {**alone[case], "seen": alone[case]["seen"][4:]}


@pytest.fixture(scope="module")
def all_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases on one rank."""
    return _launch(tmp_path_factory.mktemp("alone"), 1, "replicated", tuple(CASES))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharding", ["replicated", "optimizer"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_optimizer_and_method(tmp_path: Path, all_alone: dict[str, Any], world: int, sharding: str) -> None:
    found = _launch(tmp_path, world, sharding, tuple(CASES))
    assert {case for case in CASES if found[case] != all_alone[case]} == set()
    shutil.rmtree(tmp_path)
