"""Two ranks that see unlike things, or whose data end apart, neither hang nor train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import launch_ranks
from tests.train import rank_looks

pytestmark = pytest.mark.long


def _found(folder: Path, world: int) -> dict[str, str]:
    found: dict[str, str] = json.loads(launch_ranks([rank_looks.__file__, folder], world, PYTHONWARNINGS="")[0])
    return found


@pytest.mark.timeout(300)
def test_ranks_go_on_together_or_end_together(tmp_path: Path) -> None:
    alone, both = _found(tmp_path / "1", 1), _found(tmp_path / "2", 2)
    for stop_at in rank_looks.STOPS:
        assert both[f"{stop_at} again"] == both[f"{stop_at} whole"] == alone[f"{stop_at} whole"]
        assert both[f"{stop_at} again"].startswith("completed after 12")
    assert both["other surroundings on one rank"].startswith("completed after 12")
    short = "OutOfMemoryError: Memory is too short for step 1: out of memory It can't be taken anew"
    assert both["changed by one rank"].startswith(short)
    for kind in ("loader", "once"):
        assert both[f"{kind}, alike"] == alone[f"{kind}, alike"]
        assert both[f"{kind}, apart"].startswith("DataError: At step 5 the data of some ranks have ended")
        assert both[f"{kind}, within a batch"].startswith("DataError: At step 7 some ranks had a batch of 4 rows")
    assert alone["loader, alike"].startswith("completed after 12")
    assert alone["once, alike"].startswith("exhausted after 8")
