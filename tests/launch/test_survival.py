"""SIGKILL of ranks, agents and supervisors: the job goes on to the same root, no row twice, nothing of an orphan."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from cosmati.launch.job import attempt_folder
from cosmati.launch.queue import JobQueue
from cosmati.launch.states import LaunchState
from cosmati.records.attempts import read_attempts
from tests.launch.jobs import (
    alone,
    asked,
    assert_same_run,
    has_newer_checkpoint,
    is_there,
    kill_one,
    marks_of,
    recipe_in,
    serving,
    states_seen,
    until,
    with_secrets_of,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux alone"),
    pytest.mark.long,
]


def _survive(tmp_path: Path, victims: list[tuple[str, str]], num_steps: int, **changes: object) -> None:
    """Kill one after another, each after its attempt's first checkpoint, or as it begins; compare with a whole run."""
    file, whole, run = recipe_in(tmp_path, num_steps), tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    alone(file, whole)
    with_secrets_of(whole, run)
    with JobQueue(tmp_path / "queue") as jobs:
        job = jobs.add(asked(file, run, retries=len(victims), **changes))
        supervisor = serving(jobs.home, job.id)
        orphans: list[str] = []
        for number, (victim, moment) in enumerate(victims):
            until(lambda number=number: len(jobs.attempts(job.id)) > number)  # type: ignore[misc]
            until(has_newer_checkpoint(run) if moment == "later" else lambda: marks_of(jobs, job.id, "agent"))
            family = [mark for kind in ("rank", "agent") for mark in marks_of(jobs, job.id, kind)]
            if victim == "supervisor":
                supervisor.kill()
                supervisor.communicate()
                supervisor = serving(jobs.home, job.id)
            else:
                kill_one(jobs, job.id, victim)
            until(lambda family=family: not any(map(is_there, family)))  # type: ignore[misc]
            orphans += family
        said, errors = supervisor.communicate(120)
        job, attempts = jobs.get(job.id), jobs.attempts(job.id)
        assert job.state is LaunchState.COMPLETED, states_seen(job) + said + errors
        expected = ["lost" if victim == "supervisor" else "failed" for victim, _ in victims]
        assert [one.outcome for one in attempts] == [*expected, "completed"]
        assert job.step == num_steps
        assert len(orphans) >= len(victims)
    assert_same_run(whole, run, num_steps)
    begun = [one.number for one in read_attempts(run)]
    assert begun == list(range(len(begun)))
    assert sum(moment == "later" for _, moment in victims) < len(begun) <= len(victims) + 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "victims",
    [
        pytest.param([("rank", "later"), ("supervisor", "later")], id="two"),
        pytest.param(
            [("agent", "now"), ("rank", "later"), ("supervisor", "now"), ("agent", "later"), ("supervisor", "later")],
            id="five",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_job_whose_processes_are_killed_comes_to_the_same_root(
    tmp_path: Path, victims: list[tuple[str, str]]
) -> None:
    _survive(tmp_path, victims, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_kills", [10, 100])
def test_many_kills_at_any_moment_change_no_bit(tmp_path: Path, num_kills: int) -> None:
    draw = random.Random(num_kills)
    kinds = [draw.choice(("rank", "agent", "supervisor")) for _ in range(num_kills)]
    victims = [(kind, draw.choice(("now", "later"))) for kind in kinds]
    _survive(tmp_path, victims, 2 * num_kills + 10)


LOST = """
import os
import signal

if os.environ["COSMATI_PLACE"].endswith("/2"):  # as a device that is broken
    os.kill(os.getpid(), signal.SIGKILL)
"""
HANGS = """
import time
from pathlib import Path

before = Path(__file__).with_name("hung")
if not before.exists() and os.environ["RANK"] == "1":
    class Slow(Classification):
        num_calls = 0

        def __call__(self, model, data):
            Slow.num_calls += 1
            if Slow.num_calls == 24:
                before.touch()
                stuck_in_here()
            return super().__call__(model, data)

    def stuck_in_here():
        time.sleep(1000)

    globals()["Slow"] = Slow
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_is_lost_for_good_is_done_without(tmp_path: Path) -> None:
    file, whole, run = recipe_in(tmp_path, 12), tmp_path / "whole" / "run", tmp_path / "fewer" / "run"
    alone(file, whole)
    with_secrets_of(whole, run)
    file.write_text(file.read_text() + LOST)
    with JobQueue(tmp_path / "queue") as jobs:
        job = jobs.add(asked(file, run, ranks=4))
        _, errors = serving(jobs.home, job.id).communicate(120)
        job, attempts = jobs.get(job.id), jobs.attempts(job.id)
        assert job.state is LaunchState.COMPLETED, states_seen(job) + errors
        assert [(one.ranks, one.idle) for one in attempts][-2:] == [(4, 0), (2, 1)]
        assert [place.rpartition("/")[2] for place in jobs.bad_places(job.id)] == ["2"]
    assert_same_run(whole, run, 12)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_dumped_and_begun_anew(tmp_path: Path) -> None:
    file, whole, run = recipe_in(tmp_path, 24), tmp_path / "whole" / "run", tmp_path / "hanging" / "run"
    alone(file, whole)
    with_secrets_of(whole, run)
    file.write_text(file.read_text() + HANGS)
    with JobQueue(tmp_path / "queue") as jobs:
        job = jobs.add(asked(file, run, min_silence_seconds=2.0, start_seconds=60.0, patience=5.0))
        _, errors = serving(jobs.home, job.id).communicate(200)
        job, attempts = jobs.get(job.id), jobs.attempts(job.id)
        assert job.state is LaunchState.COMPLETED, states_seen(job) + errors
        assert [one.outcome for one in attempts] == ["stalled", "completed"]
        stacks = (attempt_folder(jobs.home, job.id, 0) / "rank-1.stacks").read_text()
        assert "in stuck_in_here" in stacks
    assert_same_run(whole, run, 24)
