"""What lies around a job breaks: disks, records, numbers beyond reason. Its supervisor stays, and says so."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cosmati.errors import RunError
from cosmati.launch.engine import AttemptPhase, AttemptRequest, AttemptStanding
from cosmati.launch.queue import JobQueue
from cosmati.launch.states import LaunchState
from cosmati.launch.supervisor import Supervisor
from cosmati.records.launched import LaunchedRun
from tests.launch.test_supervisor import (
    DONE,
    GONE,
    JumpingClock,
    Scripted,
    jobs,
    outcomes,
    request,
    seen_through,
    training,
)

__all__ = ["jobs"]
RUNS = AttemptStanding(phase=AttemptPhase.RUNNING)


def test_a_run_folder_that_is_full_for_a_while_is_a_failure_like_others(
    jobs: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = [0]

    def full(folder: Path, wait_seconds: float = 0.0) -> None:
        num_refused[0] += 1
        if num_refused[0] <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cosmati.launch.supervisor.fence_off", full)
    engine = Scripted(training(tmp_path, 3, GONE), DONE)
    job = seen_through(jobs, engine)
    assert (job.state, outcomes(jobs, job)) == (LaunchState.COMPLETED, ["failed"] * 3 + ["completed"])
    told = jobs.attempts(job.id)[1].reason
    assert told.startswith(f"{tmp_path / 'run'} can't be written: No space left on device")
    assert [one.number for one in engine.requests] == [0, 3]  # nothing began beside a writer that may be there
    assert num_refused == [4]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}', b"null"])
def test_a_record_that_is_none_says_nothing(jobs: JobQueue, tmp_path: Path, content: bytes) -> None:
    runs = training(tmp_path, 3, DONE)

    def leaves_rubbish(given: AttemptRequest) -> AttemptStanding:
        standing = runs(given)
        (tmp_path / "run" / "run.json").write_bytes(content)
        return standing

    job = seen_through(jobs, Scripted(leaves_rubbish))
    assert (job.state, outcomes(jobs, job)) == (LaunchState.COMPLETED, ["completed"])


def test_thousands_of_failures_are_counted_like_a_few(jobs: JobQueue) -> None:
    job = jobs.add(request(retries=10**6))
    jobs.hold(job.id, "me")
    jobs.note(job.id, "me", failures=5000)
    engine = Scripted(GONE, DONE)
    with Supervisor(jobs, job.id, engine, slots=4, clock=JumpingClock(50.0)) as supervisor:
        assert supervisor.run() is LaunchState.COMPLETED


def test_why_a_job_was_stopped_stays(jobs: JobQueue, tmp_path: Path) -> None:
    job = jobs.add(request(max_seconds=20.0))
    engine = Scripted(training(tmp_path, 3, RUNS))
    with Supervisor(jobs, job.id, engine, slots=4, clock=JumpingClock(3.0)) as supervisor:
        assert supervisor.run() is LaunchState.STOPPED
    assert jobs.get(job.id).reason == "its 20 s are over"


def test_what_stalls_again_and_again_is_given_more_time(
    jobs: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that takes 60 s, where the watchdog has patience for 10: it isn't ended for ever."""
    monkeypatch.setattr("cosmati.launch.supervisor._STACKS_SECONDS", 0.0)
    silent: list[float] = []
    clock = JumpingClock(1.0)
    runs = training(tmp_path, 3, RUNS)

    def evaluates(given: AttemptRequest) -> AttemptStanding:
        if len(silent) <= given.number:
            silent.append(clock.now)
        standing = runs(given)
        return DONE if clock.now - silent[given.number] > 60.0 else standing

    job = jobs.add(request(start_seconds=10.0, min_silence_seconds=10.0, retries=6, backoff_seconds=0.0))
    with Supervisor(jobs, job.id, Scripted(evaluates), slots=4, clock=clock) as supervisor:
        assert supervisor.run() is LaunchState.COMPLETED
    assert outcomes(jobs, job) == ["stalled", "stalled", "stalled", "completed"]


@pytest.mark.parametrize("other_lives", [True, False])
def test_a_job_does_not_fence_off_another_one_that_trains_its_run(
    jobs: JobQueue, tmp_path: Path, other_lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced: list[Path] = []
    monkeypatch.setattr("cosmati.launch.supervisor.fence_off", lambda path, wait_seconds: fenced.append(path))
    monkeypatch.setattr("cosmati.launch.supervisor.is_supervised", lambda home, job_id: other_lives)
    runs = training(tmp_path, 3, GONE)

    def lost_and_then_taken(given: AttemptRequest) -> AttemptStanding:
        other = jobs.add(request(name="other"))
        jobs.hold(other.id, "it")
        for was, now in (("PENDING", "QUEUED"), ("QUEUED", "STARTING")):
            jobs.move(other.id, LaunchState(was), LaunchState(now))
        jobs.note(other.id, "it", run_folder=str(tmp_path / "run"))
        return runs(given)

    job = jobs.add(request())
    with Supervisor(jobs, job.id, Scripted(lost_and_then_taken, DONE), slots=8) as supervisor:
        state = supervisor.run()
    if other_lives:
        told = f"Job other-2 trains in {tmp_path / 'run'}. Give one of them a run folder of its own."
        assert (state, fenced, jobs.get(job.id).reason) == (LaunchState.FAILED, [], told)
    else:
        assert (state, fenced) == (LaunchState.COMPLETED, [tmp_path / "run", tmp_path / "run" / "ledger"])


def test_the_step_of_a_job_stays_known_while_the_next_attempt_begins(jobs: JobQueue, tmp_path: Path) -> None:
    told = LaunchedRun(folder=str(tmp_path / "run"), attempt=1, num_microbatches=4, num_steps=100)

    def has_only_said_where_it_trains(given: AttemptRequest) -> AttemptStanding:
        given.folder.mkdir(parents=True, exist_ok=True)
        (given.folder / "run").write_text(told.to_json())
        return GONE

    engine = Scripted(training(tmp_path, 3, GONE), has_only_said_where_it_trains)
    job = seen_through(jobs, engine, retries=1)
    assert (job.state, job.step, job.num_steps) == (LaunchState.FAILED, 3, 100)


def test_a_supervisor_that_cannot_go_on_leaves_no_rank_behind(jobs: JobQueue, tmp_path: Path) -> None:
    """Its process would wait for them, while nobody watches."""

    def breaks_the_queue(given: AttemptRequest) -> AttemptStanding:
        jobs._database.execute("ALTER TABLE attempts RENAME TO hidden")
        return RUNS

    engine = Scripted(breaks_the_queue)
    job = jobs.add(request())
    with Supervisor(jobs, job.id, engine, slots=4) as supervisor, pytest.raises(RunError, match="can't be used"):
        supervisor.run()
    assert engine.cancelled == ["0"]


def test_a_program_that_is_deaf_is_asked_once_and_killed_after_five_minutes(jobs: JobQueue, tmp_path: Path) -> None:
    class Deaf(Scripted):
        def poll(self, handle: str) -> AttemptStanding:
            return self._script[0](self.requests[0])  # type: ignore[operator]

    clock = JumpingClock(5.0)
    engine = Deaf(training(tmp_path, 3, RUNS))
    job = jobs.add(request(max_seconds=20.0))
    with Supervisor(jobs, job.id, engine, slots=4, clock=clock) as supervisor:
        assert supervisor.run() is LaunchState.STOPPED
    assert (engine.asked, engine.cancelled) == (["0"], ["0"])
    assert jobs.get(job.id).reason == "its 20 s are over; it was killed 300 s later"
    assert 300.0 < clock.now < 500.0


def test_a_job_that_is_resumed_has_all_its_tries_again(jobs: JobQueue) -> None:
    job = seen_through(jobs, Scripted(GONE), retries=1)
    jobs.resume(job.id, LaunchState.FAILED)
    assert jobs.get(job.id).failures == 0
    with Supervisor(jobs, job.id, Scripted(GONE), slots=4) as supervisor:
        assert supervisor.run() is LaunchState.FAILED
    assert outcomes(jobs, job) == ["failed"] * 4
