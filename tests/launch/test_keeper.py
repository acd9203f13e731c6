"""The keeper begins a supervisor anew where it was killed or couldn't go on, and leaves a job that isn't its own."""

from __future__ import annotations

import errno
import sqlite3
import sys
from pathlib import Path

import pytest

from cosmati.launch import keeper
from cosmati.launch.engine import RankProgram
from cosmati.launch.job import JobRequest
from cosmati.launch.keeper import NOT_OURS, keep
from cosmati.launch.queue import JobQueue
from cosmati.launch.serve import main
from cosmati.launch.supervisor import Supervisor
from tests.launch.test_supervisor import DONE, Scripted


def kept(monkeypatch: pytest.MonkeyPatch, *statuses: int) -> tuple[int, list[float], int]:
    """Return how a keeper has ended, how it has paused, and how many supervisors it has begun."""
    pauses: list[float] = []
    begun: list[list[str]] = []

    def call(command: list[str]) -> int:
        begun.append(command)
        return statuses[min(len(begun), len(statuses)) - 1]

    monkeypatch.setattr(keeper.subprocess, "call", call)
    monkeypatch.setattr(keeper.time, "sleep", pauses.append)
    monkeypatch.setattr(keeper.signal, "signal", lambda *_: None)
    return keep("home", "job-1"), pauses, len(begun)


@pytest.mark.parametrize(
    ("statuses", "ends"),
    [
        ([0], (0, [], 1)),
        ([NOT_OURS], (NOT_OURS, [], 1)),
        ([-9, -15, 0], (0, [2.0, 4.0], 3)),
        ([1, -9, 1, 0], (0, [2.0, 4.0, 8.0], 4)),
    ],
)
def test_what_was_killed_or_could_not_go_on_is_begun_anew(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], ends: tuple[int, list[float], int]
) -> None:
    assert kept(monkeypatch, *statuses) == ends


def test_what_never_goes_on_is_left_after_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    status, pauses, num_begun = kept(monkeypatch, 1)
    assert (status, num_begun) == (1, len(pauses) + 1)
    assert 1500 < sum(pauses) < 2100
    assert max(pauses) == 60.0


def test_what_went_on_for_a_while_has_all_its_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_refused = keeper._MOST_REFUSED - 1
    lasting = {num_refused + 1}  # that one goes on for a quarter of an hour before it's refused
    times = iter(900.0 * (call in lasting) * end for call in range(1, 1000) for end in (0, 1))
    monkeypatch.setattr(keeper.time, "monotonic", lambda: next(times))
    status, pauses, num_begun = kept(monkeypatch, *([1] * (2 * num_refused)), 0)
    assert (status, num_begun) == (0, 2 * num_refused + 1)
    assert pauses[num_refused] == 2.0  # its pauses begin anew, too
    times = iter([0.0] * 1000)
    status, _, num_begun = kept(monkeypatch, *([1] * (2 * num_refused)), 0)
    assert (status, num_begun) == (1, num_refused + 1)


def test_what_is_killed_again_and_again_is_begun_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, num_begun = kept(monkeypatch, *([-9] * 100), 0)
    assert (status, num_begun) == (0, 101)


def test_a_log_on_a_full_disk_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    assert kept(monkeypatch, 1, 0) == (0, [2.0], 2)


def request() -> JobRequest:
    program = RankProgram(command=("train.py",), folder=Path("/tmp"), python=Path(sys.executable))
    return JobRequest(name="train", program=program)


def test_a_supervisor_says_whether_the_job_is_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmati.launch.serve._LOADED_ONCE", ())
    assert main(str(tmp_path), "train-1") == NOT_OURS
    assert "No job is called 'train-1'" in capsys.readouterr().err
    with JobQueue(tmp_path) as jobs:
        job = jobs.add(request())
        with Supervisor(jobs, job.id, Scripted(DONE), slots=1):
            assert main(str(tmp_path), job.id) == NOT_OURS
    assert "has a supervisor" in capsys.readouterr().err


def test_a_queue_that_cannot_be_used_may_be_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with JobQueue(tmp_path) as jobs:
        jobs.add(request())
    with sqlite3.connect(tmp_path / "queue.db") as database:
        database.execute("DROP TABLE attempts")
        database.execute("CREATE VIEW attempts AS SELECT 1 AS job")
    assert main(str(tmp_path), "train-1") == 1
    assert "can't be used" in capsys.readouterr().err
