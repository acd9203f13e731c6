"""Planned memory against what the kernel says a process takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.processes import run_python

WIDTH = 3000
SCRIPT = Path(__file__).with_name("resident.py")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc, for a process's size")
def test_a_process_takes_what_was_planned() -> None:
    """Within 15 %: pages, the allocator's own, and what kernels take for themselves are beyond the plan."""
    said = {}
    for width in (WIDTH, -WIDTH):
        done = run_python([SCRIPT, str(width)])
        assert done.returncode == 0, done.stderr
        said |= json.loads(done.stdout)
    assert said["planned"] > 200e6
    assert said["grew"] == pytest.approx(said["planned"], rel=0.15)
    assert sys.platform == "linux"
