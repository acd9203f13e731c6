"""The promise `elastic`: real processes over gloo, and the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import launch_ranks

pytestmark = pytest.mark.long

WORKER = Path(__file__).with_name("elastic_worker.py")


def _launch(folder: Path, world: int, *, stop: int = 0, control: str = "none") -> dict[str, Any]:
    """Start `world` ranks on one run folder, and return what rank 0 wrote."""
    folder.mkdir(exist_ok=True)
    name = f"world-{world}-{stop}"
    launch_ranks([WORKER, folder, name, str(stop), control], world)
    facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return facts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What W = 1 gives."""
    return _launch(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_gives_the_same_bits(tmp_path: Path, alone: dict[str, Any], world: int) -> None:
    assert all(facts["elastic"] for facts in alone.values())
    assert _launch(tmp_path, world) == alone


@pytest.mark.slow
def test_ranks_may_change_in_mid_run(tmp_path: Path, alone: dict[str, Any]) -> None:
    stopped = _launch(tmp_path, 4, stop=3)
    assert {facts["outcome"] for facts in stopped.values()} == {"stopped"}
    assert {facts["step"] for facts in stopped.values()} == {3}
    _launch(tmp_path, 2, stop=7)
    assert _launch(tmp_path, 1) == alone


@pytest.mark.parametrize(("control", "world"), [("all_reduce", 4), ("left_fold", 2)])
def test_sums_in_another_order_give_other_bits(tmp_path: Path, control: str, world: int) -> None:
    """The controls: what the tree prevents does happen without it."""
    one = _launch(tmp_path / "one", 1, control=control)
    many = _launch(tmp_path / "many", world, control=control)
    assert one["sgd"]["model"] != many["sgd"]["model"]
