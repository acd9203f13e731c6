"""What a supervisor decides, once more: of a scheduler's queue, of runs that say little, of other releases' jobs."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import RunError
from cosmati.launch import supervisor as module
from cosmati.launch.engine import AttemptPhase, AttemptRequest, AttemptStanding
from cosmati.launch.job import LaunchedJob
from cosmati.launch.queue import JobQueue
from cosmati.launch.states import LaunchState
from cosmati.launch.supervisor import Supervisor
from cosmati.records.launched import LaunchedRun
from tests.launch.test_supervisor import DONE, GONE, Scripted, outcomes, request, seen_through, training

WAITING = AttemptStanding(phase=AttemptPhase.WAITING, reason="Priority")
RUNNING = AttemptStanding(phase=AttemptPhase.RUNNING)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobQueue]:
    with JobQueue(tmp_path / "queue") as queue:
        yield queue


class Timed(Scripted):
    """Stands at each look as the next of its standings says, a while after the one before; then it's done."""

    def __init__(self, *standings: tuple[float, AttemptStanding | Callable[[AttemptRequest], AttemptStanding]]) -> None:
        super().__init__(DONE)
        self.left, self.now = list(standings), 0.0

    def poll(self, handle: str) -> AttemptStanding:
        if handle in self.asked or not self.left:
            return DONE
        seconds, standing = self.left.pop(0)
        self.now += seconds
        return standing if isinstance(standing, AttemptStanding) else standing(self.requests[int(handle)])

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def timed(jobs: JobQueue, played: Timed, **changes: Any) -> LaunchedJob:
    job = jobs.add(request(**changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.time, "sleep", played.sleep)
        with Supervisor(jobs, job.id, played, slots=4, clock=lambda: played.now) as supervisor:
            supervisor.run()
    return jobs.get(job.id)


@pytest.mark.parametrize("max_seconds", [None, 3600.0])
def test_what_waits_in_a_schedulers_queue_is_neither_silent_nor_at_work(
    jobs: JobQueue, max_seconds: float | None
) -> None:
    engine = Timed(*[(60.0, WAITING)] * 100, *[(60.0, RUNNING)] * 3)
    job = timed(jobs, engine, engine="slurm", retries=0, max_seconds=max_seconds)
    assert (job.state, outcomes(jobs, job)) == (LaunchState.COMPLETED, ["completed"])
    assert engine.asked == engine.dumped == []
    assert job.seconds == pytest.approx(180.0, abs=1.0)


def test_what_a_scheduler_has_requeued_is_not_silent_meanwhile(jobs: JobQueue, tmp_path: Path) -> None:
    trains = training(tmp_path, 50, RUNNING)
    engine = Timed(*[(30.0, trains)] * 10, *[(30.0, WAITING)] * 400, *[(30.0, trains)] * 10)
    job = timed(jobs, engine, engine="slurm", retries=0)
    assert (job.state, outcomes(jobs, job)) == (LaunchState.COMPLETED, ["completed"])
    assert job.seconds == pytest.approx(600.0, abs=1.0)


def test_what_runs_on_after_its_wait_is_watched(jobs: JobQueue) -> None:
    engine = Timed(*[(60.0, WAITING)] * 100, *[(60.0, RUNNING)] * 3, (3600.0, RUNNING), *[(60.0, RUNNING)] * 3)
    job = timed(jobs, engine, engine="slurm", max_seconds=3600.0)
    assert (job.state, engine.asked) == (LaunchState.STOPPED, ["0"])


def test_a_program_whose_run_is_complete_may_work_on(
    jobs: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exports, or evaluates, and says nothing of steps any more."""
    trains = training(tmp_path, 12, RUNNING)
    ended, dumped = (LaunchState.COMPLETED, list[str]()), (LaunchState.FAILED, ["0"])
    # One rank's run may have failed, and the others wait for it.
    for outcome, expected in (("completed", ended), ("exhausted", ended), ("failed", dumped), ("", dumped)):
        monkeypatch.setattr(module, "outcome_of", lambda _progress, outcome=outcome: outcome)
        engine = Timed((10.0, trains), *[(600.0, trains)] * 20)
        job = timed(jobs, engine, retries=0)
        assert (job.state, engine.dumped) == expected, outcome
        shutil.rmtree(tmp_path / "run")


def test_a_script_may_prepare_for_longer_than_a_first_step_may_take(jobs: JobQueue, tmp_path: Path) -> None:
    def tells(request: AttemptRequest) -> AttemptStanding:
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        request.folder.mkdir(parents=True, exist_ok=True)
        if not (request.folder / "run").exists():
            told = LaunchedRun(folder=str(run), attempt=0, num_microbatches=4, num_steps=100, tensor_parallel=1)
            (request.folder / "run").write_text(told.to_json())
        return RUNNING

    engine = Timed(*[(60.0, RUNNING)] * 40, *[(60.0, tells)] * 10)
    job = timed(jobs, engine, retries=0)
    assert (job.state, engine.dumped) == (LaunchState.COMPLETED, [])
    shutil.rmtree(tmp_path / "run")
    engine = Timed(*[(60.0, RUNNING)] * 40, *[(60.0, tells)] * 32)
    job = timed(jobs, engine, retries=0)
    assert (job.state, engine.dumped) == (LaunchState.FAILED, ["0"])
    assert "before its first step" in job.reason


def test_a_script_that_says_nothing_runs_after_half_a_minute_and_is_left_alone(jobs: JobQueue) -> None:
    states: list[LaunchState] = []

    def looked(_: AttemptRequest) -> AttemptStanding:
        states.append(jobs.get("train-1").state)
        return RUNNING

    engine = Timed((1.0, looked), (28.0, looked), (2.0, looked), (1.0, looked), *[(600.0, looked)] * 20)
    assert timed(jobs, engine).state is LaunchState.COMPLETED
    assert states[:4] == [LaunchState.STARTING] * 3 + [LaunchState.RUNNING]
    assert {*states[3:]} == {LaunchState.RUNNING}
    assert engine.dumped == []


def test_how_a_failure_is_counted_is_said(jobs: JobQueue, tmp_path: Path) -> None:
    job = seen_through(jobs, Scripted(training(tmp_path, 10, GONE)), retries=0)
    assert job.reason == "failed, and no retry is left: a rank was ended by SIGKILL"
    (tmp_path / "other").mkdir()
    further, no_further = training(tmp_path / "other", 10, GONE), training(tmp_path / "other", 10, GONE)
    job = seen_through(jobs, Scripted(further, no_further), retries=1)
    assert job.reason == "2 failures in a row; the last: a rank was ended by SIGKILL"


def test_a_folder_that_came_back_empty_is_no_run(jobs: JobQueue, tmp_path: Path) -> None:
    """As what a disk that isn't mounted leaves."""

    def loses(request: AttemptRequest) -> AttemptStanding:
        standing = training(tmp_path, 10, GONE)(request)
        if request.number == 0:
            (tmp_path / "run").rename(tmp_path / "away")
            (tmp_path / "run").mkdir()
        return standing

    engine = Timed((1.0, training(tmp_path, 10, RUNNING)), (1.0, loses))
    job = timed(jobs, engine, retries=1)
    assert (job.state, len(engine.requests)) == (LaunchState.FAILED, 1)
    assert "where step 10 was reached, isn't there" in job.reason


def test_what_isnt_text_is_written_down_all_the_same(jobs: JobQueue) -> None:
    wrong = b"caf\xe9".decode("utf-8", "surrogateescape")
    job = seen_through(jobs, Scripted(replace(GONE, reason=f"bad row: {wrong}", place=wrong)), retries=0)
    assert (job.state, outcomes(jobs, job)) == (LaunchState.FAILED, ["failed"])
    assert job.reason.endswith(r"bad row: caf\udce9")
    assert jobs.attempts(job.id)[0].place == r"caf\udce9"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE jobs SET request = json_set(request, '$.colour', 'red') WHERE id = 'train-1'",
        "UPDATE jobs SET state = 'PAUSED' WHERE id = 'train-1'",
    ],
)
def test_a_job_of_another_release_is_nobody_elses_affair(jobs: JobQueue, tmp_path: Path, change: str) -> None:
    jobs.add(request())
    with closing(sqlite3.connect(jobs.home / "queue.db")) as database, database:
        database.execute(change)
    job = seen_through(jobs, Scripted(training(tmp_path, 10, GONE), training(tmp_path, 20, GONE), DONE))
    assert (job.id, job.state, len(outcomes(jobs, job))) == ("train-2", LaunchState.COMPLETED, 3)
    assert [one.id for one in jobs.all()] == ["train-2"]
    assert jobs.of_other_releases() == ["train-1"]
    with pytest.raises(RunError, match=r"Job train-1 .*another release"):
        jobs.get("train-1")


def test_columns_of_a_later_release_are_passed_over(jobs: JobQueue) -> None:
    job = seen_through(jobs, Scripted(DONE))
    with closing(sqlite3.connect(jobs.home / "queue.db")) as database, database:
        database.execute("ALTER TABLE attempts ADD COLUMN colour TEXT")
        database.execute("ALTER TABLE jobs ADD COLUMN colour TEXT")
    assert outcomes(jobs, jobs.get(job.id)) == ["completed"]


def test_ranks_that_may_run_at_once_are_read_anew(jobs: JobQueue) -> None:
    first, second = jobs.add(request(ranks=2)), jobs.add(request(ranks=2))
    jobs.slots = 2
    with Supervisor(jobs, first.id, Scripted(DONE), slots=8):
        jobs.move(first.id, LaunchState.PENDING, LaunchState.QUEUED)
        jobs.move(first.id, LaunchState.QUEUED, LaunchState.STARTING)

        class Patient(Scripted):
            num_looks = 0

        engine = Patient(DONE)

        def looked(_: float) -> None:
            engine.num_looks += 1
            assert engine.num_looks < 20, "it goes by the number of before"
            if engine.num_looks == 3:
                assert jobs.get(second.id).state is LaunchState.QUEUED
                jobs.slots = 4

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.time, "sleep", looked)
            with Supervisor(jobs, second.id, engine, slots=8) as supervisor:
                assert supervisor.run() is LaunchState.COMPLETED
        assert engine.num_looks >= 3


def test_the_end_is_no_later_than_the_duration_lets_it_be(jobs: JobQueue) -> None:
    job = jobs.get(jobs.add(request(max_seconds=100.0)).id)
    job = replace(job, step=10, num_steps=110, step_seconds=2.0, seconds=40.0)
    assert job.seconds_left == 60.0
    assert replace(job, seconds=140.0).seconds_left == 0.0
    assert replace(job, request=replace(job.request, max_seconds=None)).seconds_left == 200.0
    assert replace(job, step=100).seconds_left == 20.0


def test_a_job_that_has_run_before_is_not_said_never_to_have_begun(jobs: JobQueue, tmp_path: Path) -> None:
    job = seen_through(jobs, Scripted(training(tmp_path, 10, GONE)), retries=0)
    jobs.resume(job.id, LaunchState.FAILED)
    jobs.ask_to_stop(job.id)
    with Supervisor(jobs, job.id, Scripted(DONE), slots=4) as supervisor:
        assert supervisor.run() is LaunchState.STOPPED
    assert jobs.get(job.id).reason == "asked to stop"
