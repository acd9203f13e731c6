"""Each family of models, with each kind of optimizer, governed and not: one rank's bits, however it's shared out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import launch_ranks

WORKER = Path(__file__).with_name("families_worker.py")


def _launch(folder: Path, world: int, sharding: str) -> dict[str, Any]:
    launch_ranks([WORKER, folder, sharding], world, timeout=900)
    return json.loads((folder / "facts.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one plain process gives."""
    facts = _launch(tmp_path_factory.mktemp("alone"), 1, "replicated")
    assert all(one["step"] == 3 and one["elastic"] for one in facts.values())
    assert len({one["model"] for one in facts.values()}) > len(facts) - 10, "cases are of different runs"
    return facts


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("sharding", ["replicated", "optimizer", "full"])
def test_every_family_has_the_bits_of_one_process(
    tmp_path: Path, alone: dict[str, Any], sharding: str, world: int
) -> None:
    found = _launch(tmp_path, world, sharding)
    assert {case for case in alone if found[case] != alone[case]} == set()
