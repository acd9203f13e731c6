"""Runs of eight unlike kinds are killed at random events and started again: the same bits as of the one left alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE

import pytest

from cosmati.ledger.verify import verify_ledger
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, read_checkpoint
from tests.processes import PythonProcess, begin_ranks
from tests.train.killed_recipes import NAMES, STEPS

pytestmark = pytest.mark.long

SCRIPT = ["-m", "tests.train.killed_recipes"]
LAUNCHER = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "0",
]
assert NAMES[-1] == "ranks"  # with torchrun, where all is killed


def begin(name: str, folder: Path) -> Sequence[PythonProcess | subprocess.Popen[str]]:
    """Begin the run: its processes, or torchrun's, each a leader of a group; the first one tells of events."""
    if name == "torchrun":
        command = [*LAUNCHER, *SCRIPT, "ranks", str(folder)]
        return [subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)]
    command = [*SCRIPT, name, str(folder)]
    return begin_ranks(command, 2) if name == "ranks" else [PythonProcess(command, start_new_session=True)]


def start(name: str, folder: Path, event: int | None) -> tuple[bool, int]:
    """Start the run, kill all of it when it has told of so many events; return whether it ended, and its events."""
    lines = list[str]()
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(process) for process in begin(name, folder)]
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            lines.append(line.strip())
            if len(lines) == event:
                for process in processes:
                    os.killpg(process.pid, signal.SIGKILL)
                break
        errors = "\n".join(process.communicate(timeout=250)[1] for process in processes)
    assert event is not None or all(process.returncode == 0 for process in processes), errors
    return "ended" in lines, len(lines)


def last(folder: Path) -> Checkpoint:
    return read_checkpoint(list_checkpoints(folder / "checkpoints")[0])


# 200 kills, and one each of those that no other test kills.
CASES = [pytest.param(name, 25, marks=pytest.mark.slow) for name in (*NAMES[:-1], "torchrun")]
CASES += [(name, 1) for name in ("loader", "sub-steps", "tied", "ranks")]


@pytest.mark.parametrize(("name", "num_kills"), CASES)
@pytest.mark.timeout(1500)
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, name: str, num_kills: int) -> None:
    _, num_events = start(name, tmp_path / "whole", None)
    expected = last(tmp_path / "whole")
    assert expected.step == STEPS
    draw, kills, folder = random.Random(f"{name} {num_kills}"), 0, tmp_path / "0"
    while kills < num_kills:
        has_ended, _ = start(name, folder, draw.randrange(1, num_events))
        kills += not has_ended
        if has_ended:
            assert last(folder).state_digest == expected.state_digest
            folder = tmp_path / str(kills)
    start(name, folder, None)
    assert last(folder).state_digest == expected.state_digest
    assert last(folder).facts["clock"][:5] == expected.facts["clock"][:5]
    if (folder / "ledger").exists():
        report = verify_ledger(folder / "ledger")
        assert (report.num_steps, report.has_ended, report.diverged_steps) == (STEPS, True, ())
