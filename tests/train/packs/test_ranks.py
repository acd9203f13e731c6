"""Packs on two ranks: the same bits, the same ledger, the same promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import launch_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_two_ranks_give_the_bits_and_the_ledger_of_one(tmp_path: Path) -> None:
    facts: list[dict[str, Any]] = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        launch_ranks([WORKER, folder], world)
        facts.append(json.loads((folder / "facts.json").read_text()))
    one, two = facts
    assert one["apart"] == two["apart"]
    assert all("holds" in line for line in one["apart"]["plan"] if "no_direct_write" in line)
    assert one["masked"] == two["masked"]
    assert one["masked"]["model"] != one["apart"]["model"]
    assert one["together"]["model"] == two["together"]["model"]
    for found in facts:
        assert all("broken" in line for line in found["together"]["plan"] if "no_direct_write" in line)
