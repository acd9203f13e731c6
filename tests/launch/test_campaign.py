"""Some kills of the campaign; many: `python -m tests.launch.campaign --kills 100 --seed 7`."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from cosmati.train.run import saving, session
from tests.launch.campaign import LAST, MARKS, MOMENTS, SETUPS, VICTIMS, Campaign, hunt, strikes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux alone")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "sharding"), SETUPS)
def test_kills_at_drawn_moments_change_no_bit(tmp_path: Path, ranks: int, sharding: str) -> None:
    told = Campaign()
    hunt(tmp_path / "job", 6, ranks, sharding, random.Random(ranks), told)
    assert told.fallen.total() >= 4
    assert told.num_attempts > told.fallen.total() - len(LAST)


def test_what_the_campaign_marks_is_there() -> None:
    marks = re.findall(r'marked\((dist|saving|session), "(\w+)"', MARKS)
    assert len(marks) == 5
    modules = {"dist": dist, "saving": saving, "session": session}
    assert not [name for module, name in marks if not callable(getattr(modules[module], name, None))]


def test_every_victim_and_moment_is_drawn_and_the_end_comes_last() -> None:
    drawn = list(strikes(random.Random(1), 400, 2))
    assert {victim for victim, _ in drawn} == {*VICTIMS}
    assert {moment for _, moment in drawn[:-2]} == {*MOMENTS}
    assert tuple(moment for _, moment in drawn[-2:]) == LAST
    assert "exchange" not in {moment for _, moment in strikes(random.Random(1), 100, 1)}
