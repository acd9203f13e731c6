"""The contract over ranks: every method gives the same bits on two ranks as on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmati import methods
from tests.processes import launch_ranks
from tests.train.strategies.whole_runs import BOTH

pytestmark = pytest.mark.long

WORKER = Path(__file__).with_name("ranks_worker.py")


def _launch(out: Path, world: int) -> dict[str, Any]:
    launch_ranks([WORKER, out], world)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.timeout(300)
def test_two_ranks_give_the_bits_of_one(tmp_path: Path) -> None:
    one, two = (_launch(tmp_path / f"{world}.json", world) for world in (1, 2))
    strategies = [str(method) for method in BOTH]
    assert list(one) == [*(method.__name__ for method in methods.ALL), "ChannelsLast, clipped", *strategies]
    assert all(facts["elastic"] for facts in one.values())
    assert {name for name in one if one[name] != two[name]} == set()
    assert len({facts["root"] for facts in one.values()}) == len(one), "each method trains to bits of its own"
