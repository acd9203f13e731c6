"""Each family on two ranks: the bits of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import launch_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_two_ranks_give_each_family_the_bits_of_one(tmp_path: Path) -> None:
    found = []
    for world in (1, 2):
        launch_ranks([WORKER, tmp_path / str(world)], world)
        found.append(json.loads((tmp_path / str(world)).read_text()))
    one, two = found
    # A bias that each microbatch moves follows from which rank runs what: the plan says so, and the bits do differ.
    biased = {name for name in one if name.startswith("biased")}
    # Steps of a loader that are regrouped aren't promised, and are the same here.
    loaded = {name for name in one if name.endswith("loaded")}
    assert loaded
    assert {name for name, (_, holds, *_) in two.items() if not holds} == biased | loaded
    assert {name for name in one if one[name][0] != two[name][0]} <= biased
    assert {name: counted for name, (_, _, *counted) in one.items()} == {
        n: counted for n, (_, _, *counted) in two.items()
    }
