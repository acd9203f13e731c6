"""What a supervisor decides, with an engine whose attempts end as the test says. Real processes: test_survival.py."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import RunError
from cosmati.launch.engine import AttemptPhase, AttemptRequest, AttemptStanding, RankProgram
from cosmati.launch.job import JobAttempt, JobRequest, LaunchedJob
from cosmati.launch.queue import JobQueue, StaleHolderError
from cosmati.launch.states import LaunchState
from cosmati.launch.supervisor import Supervisor, is_supervised, ranks_for
from cosmati.records.launched import LaunchedRun

ENDED = AttemptPhase.ENDED
GONE = AttemptStanding(phase=ENDED, status=-9, reason="a rank was ended by SIGKILL")
DONE = AttemptStanding(phase=ENDED, status=0)
WRONG = AttemptStanding(phase=ENDED, status=1, reason="ValueError: no", own_fault=True)


class Scripted:
    """Ends the first attempt as the first of its standings says, and so on; the last one for all that come."""

    name = "local"
    poll_seconds = 0.001

    def __init__(self, *script: AttemptStanding | Callable[[AttemptRequest], AttemptStanding]) -> None:
        self._script = script
        self.requests: list[AttemptRequest] = []
        self.cancelled: list[str] = []
        self.asked: list[str] = []
        self.dumped: list[str] = []

    def submit(self, request: AttemptRequest) -> str:
        self.requests.append(request)
        return str(len(self.requests) - 1)

    def poll(self, handle: str) -> AttemptStanding:
        if handle in self.asked:
            return DONE
        step = self._script[min(int(handle), len(self._script) - 1)]
        return step if isinstance(step, AttemptStanding) else step(self.requests[int(handle)])

    def ask_to_stop(self, handle: str) -> None:
        self.asked.append(handle)

    def dump_stacks(self, handle: str) -> None:
        self.dumped.append(handle)

    def cancel(self, handle: str) -> None:
        self.cancelled.append(handle)

    def logs(self, handle: str) -> Sequence[Path]:
        return ()


def training(
    folder: Path, step: int, then: AttemptStanding, *, v: int = 4, t: int = 1, outcome: str = ""
) -> Callable[..., AttemptStanding]:
    """Return what an attempt does that comes to a step of a run and ends."""

    def attempt(request: AttemptRequest) -> AttemptStanding:
        run = folder / "run"
        run.mkdir(exist_ok=True)
        request.folder.mkdir(parents=True, exist_ok=True)
        if not (request.folder / "run").exists():
            told = LaunchedRun(
                folder=str(run), attempt=request.number, num_microbatches=v, num_steps=100, tensor_parallel=t
            )
            with (run / "attempts.jsonl").open("a") as file:
                begun = {"attempt": request.number, "first_step": step - 1, "started": 1e9, "first_seconds": 0.0}
                file.write(json.dumps(begun) + "\n")
            (run / "steps.jsonl").write_text(json.dumps({"step": step, "seconds": float(step)}) + "\n")
            (request.folder / "run").write_text(told.to_json())
        return then

    return attempt


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobQueue]:
    with JobQueue(tmp_path / "queue") as queue:
        yield queue


def request(**changes: Any) -> JobRequest:
    program = RankProgram(command=("train.py", "--out", "runs/{job}"), folder=Path("/tmp"), python=Path(sys.executable))
    return JobRequest(**{"name": "train", "program": program, "ranks": 4, "backoff_seconds": 0.001, **changes})


def seen_through(jobs: JobQueue, engine: Scripted, **changes: Any) -> LaunchedJob:
    job = jobs.add(request(**changes))
    with Supervisor(jobs, job.id, engine, slots=4) as supervisor:
        assert supervisor.run() is jobs.get(job.id).state
    assert not is_supervised(jobs.home, job.id)
    return jobs.get(job.id)


def outcomes(jobs: JobQueue, job: LaunchedJob) -> list[str]:
    return [one.outcome for one in jobs.attempts(job.id)]


def test_what_ends_well_is_completed(jobs: JobQueue) -> None:
    engine = Scripted(DONE)
    job = seen_through(jobs, engine)
    assert (job.state, outcomes(jobs, job)) == (LaunchState.COMPLETED, ["completed"])
    asked = engine.requests[0]
    assert (asked.ranks, asked.number, asked.bad) == (4, 0, ())
    assert asked.program.command == ("train.py", "--out", "runs/train-1")
    assert engine.cancelled == ["0"]  # nothing of it is left


def test_failures_that_get_no_further_are_counted_up_to_the_cap(jobs: JobQueue) -> None:
    job = seen_through(jobs, Scripted(GONE), retries=2)
    assert (job.state, outcomes(jobs, job)) == (LaunchState.FAILED, ["failed"] * 3)
    assert job.reason == "3 failures in a row; the last: a rank was ended by SIGKILL"


def test_a_failure_that_got_further_is_the_first_again(jobs: JobQueue, tmp_path: Path) -> None:
    further = [training(tmp_path, step, GONE) for step in (10, 20, 30, 40)]
    job = seen_through(jobs, Scripted(*further, GONE), retries=2)
    assert (job.state, len(outcomes(jobs, job)), job.best_step) == (LaunchState.FAILED, 4 + 2, 40)


def test_a_step_that_was_reached_before_is_no_further(jobs: JobQueue, tmp_path: Path) -> None:
    job = seen_through(jobs, Scripted(training(tmp_path, 10, GONE)), retries=3)
    assert (job.state, len(outcomes(jobs, job))) == (LaunchState.FAILED, 4)


def test_a_program_that_fails_before_its_first_step_is_not_tried_again(jobs: JobQueue) -> None:
    job = seen_through(jobs, Scripted(WRONG))
    assert (job.state, outcomes(jobs, job)) == (LaunchState.FAILED, ["failed"])
    assert job.reason == "ValueError: no (before a first step, so it isn't tried again)"


def test_a_program_that_has_trained_is_tried_again_after_its_own_error(jobs: JobQueue, tmp_path: Path) -> None:
    job = seen_through(jobs, Scripted(training(tmp_path, 3, WRONG), WRONG, DONE))
    assert (job.state, outcomes(jobs, job)) == (LaunchState.COMPLETED, ["failed", "failed", "completed"])


def test_a_run_that_is_refused_for_what_it_is_is_not_tried_again(jobs: JobQueue, tmp_path: Path) -> None:
    refused = replace(WRONG, is_final=True, place="n/1")
    job = seen_through(jobs, Scripted(training(tmp_path, 3, GONE), refused))
    assert (job.state, outcomes(jobs, job)) == (LaunchState.FAILED, ["failed", "failed"])
    assert (job.reason, jobs.bad_places(job.id)) == ("ValueError: no", {})


@pytest.mark.parametrize(
    ("outcome", "state", "num_attempts"),
    [("diverged", "FAILED", 1), ("stopped", "STOPPED", 1), ("failed", "FAILED", 3)],
)
def test_the_record_of_the_run_says_how_it_ended(
    jobs: JobQueue, tmp_path: Path, outcome: str, state: str, num_attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmati.launch.ending.outcome_of", lambda progress: outcome)
    end = DONE if outcome == "stopped" else GONE
    job = seen_through(jobs, Scripted(training(tmp_path, 3, end)), retries=2)
    assert (job.state, len(outcomes(jobs, job))) == (state, num_attempts)


def test_stopping_is_no_failure_and_resuming_goes_on(jobs: JobQueue, tmp_path: Path) -> None:
    job = jobs.add(request())
    runs = training(tmp_path, 3, AttemptStanding(phase=AttemptPhase.RUNNING))

    def stopped_by_somebody(given: AttemptRequest) -> AttemptStanding:
        standing = runs(given)
        if jobs.get(job.id).state is LaunchState.RUNNING:
            jobs.ask_to_stop(job.id)
        return standing

    engine = Scripted(stopped_by_somebody, DONE)
    with Supervisor(jobs, job.id, engine, slots=4) as supervisor:
        assert supervisor.run() is LaunchState.STOPPED
    assert (engine.asked, jobs.get(job.id).wish, jobs.get(job.id).failures) == (["0"], "", 0)
    assert outcomes(jobs, job) == ["stopped"]
    jobs.resume(job.id, LaunchState.STOPPED)
    engine.asked.clear()
    with Supervisor(jobs, job.id, engine, slots=4) as supervisor:
        assert supervisor.run() is LaunchState.COMPLETED
    assert outcomes(jobs, job) == ["stopped", "completed"]


def test_a_job_that_waits_is_stopped_without_an_attempt(jobs: JobQueue) -> None:
    job = jobs.add(request())
    jobs.ask_to_stop(job.id)
    with Supervisor(jobs, job.id, Scripted(DONE), slots=4) as supervisor:
        assert supervisor.run() is LaunchState.STOPPED
    assert not jobs.attempts(job.id)
    assert jobs.get(job.id).reason == "stopped before it began"


class JumpingClock:
    """Seconds that only grow, by as much as the test says at each look."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def test_a_duration_is_of_all_attempts_and_of_no_wall_clock(
    jobs: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walls = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: -1e6 * next(walls))  # it jumps back by days
    runs = training(tmp_path, 3, AttemptStanding(phase=AttemptPhase.RUNNING))
    num_looks = [0]

    def lost_at_first(given: AttemptRequest) -> AttemptStanding:
        num_looks[0] += 1
        return GONE if num_looks[0] == 10 else runs(given)

    engine = Scripted(lost_at_first, runs)
    job = jobs.add(request(max_seconds=200.0))
    with Supervisor(jobs, job.id, engine, slots=4, clock=JumpingClock(3.0)) as supervisor:
        assert supervisor.run() is LaunchState.STOPPED
    first, second = jobs.attempts(job.id)
    assert first.seconds > 50
    assert 200 <= first.seconds + second.seconds < 220
    assert engine.requests[1].max_seconds == pytest.approx(200 - first.seconds)
    assert (second.outcome, engine.asked) == ("stopped", ["1"])


def test_a_program_that_a_stop_ends_is_stopped_for_the_same_reason(jobs: JobQueue) -> None:
    class Ending(Scripted):
        def poll(self, handle: str) -> AttemptStanding:
            running = AttemptStanding(phase=AttemptPhase.RUNNING)
            return AttemptStanding(phase=ENDED, status=-15, reason="SIGTERM") if self.asked else running

    job = jobs.add(request(max_seconds=9.0))
    with Supervisor(jobs, job.id, Ending(), slots=4, clock=JumpingClock(3.0)) as supervisor:
        assert supervisor.run() is LaunchState.STOPPED
    assert jobs.get(job.id).reason == "its 9 s are over; it failed while it was stopped: SIGTERM"


def test_a_job_whose_duration_is_over_begins_no_attempt(jobs: JobQueue) -> None:
    job = jobs.add(request(max_seconds=200.0))
    jobs.hold(job.id, "me")
    lost = JobAttempt(number=0, started=0.0, ranks=4, seconds=200.0, outcome="failed")
    jobs.begin_attempt(job.id, "me", lost)
    engine = Scripted(DONE)
    with Supervisor(jobs, job.id, engine, slots=4) as supervisor:
        assert supervisor.run() is LaunchState.STOPPED
    assert (jobs.get(job.id).reason, engine.requests) == ("its 200 s are over", [])
    jobs.give_seconds(job.id, LaunchState.STOPPED, 200.5)
    jobs.resume(job.id, LaunchState.STOPPED)
    with Supervisor(jobs, job.id, engine, slots=4) as supervisor:
        assert supervisor.run() is LaunchState.COMPLETED
    assert [one.max_seconds for one in engine.requests] == [0.5]


def test_a_run_without_a_step_is_dumped_ended_and_begun_anew(
    jobs: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmati.launch.supervisor._STACKS_SECONDS", 0.0)
    engine = Scripted(training(tmp_path, 3, AttemptStanding(phase=AttemptPhase.RUNNING)), DONE)
    job = jobs.add(request(start_seconds=50.0, min_silence_seconds=10.0))
    with Supervisor(jobs, job.id, engine, slots=4, clock=JumpingClock(1.0)) as supervisor:
        assert supervisor.run() is LaunchState.COMPLETED
    assert (engine.dumped, engine.cancelled[:1]) == (["0"], ["0"])
    stalled = jobs.attempts(job.id)[0]
    assert stalled.outcome == "stalled"
    assert stalled.reason.startswith("no step for 5")
    assert "after step 3; stacks are beside its logs" in stalled.reason


def test_a_place_that_fails_again_and_again_is_done_without(jobs: JobQueue, tmp_path: Path) -> None:
    bad = AttemptStanding(phase=ENDED, status=-6, reason="the rank at n/2 was ended by SIGABRT", place="n/2")
    engine = Scripted(training(tmp_path, 8, GONE, v=8), bad, bad, bad, DONE)
    job = seen_through(jobs, engine, ranks=6)
    assert [one.ranks for one in engine.requests] == [6, 4, 4, 4, 4]
    assert [one.idle for one in jobs.attempts(job.id)] == [0, 2, 2, 2, 1]
    assert engine.requests[-1].bad == ("n/2",)
    assert jobs.bad_places(job.id) == {"n/2": "failed 3 times in a row: the rank at n/2 was ended by SIGABRT"}


def test_a_place_is_done_without_after_three_failures_though_no_step_was_ever_trained(jobs: JobQueue) -> None:
    bad = AttemptStanding(phase=ENDED, status=-6, reason="it was ended by SIGABRT", place="n/2")
    engine = Scripted(bad, bad, bad, DONE)
    job = seen_through(jobs, engine)
    assert [one.ranks for one in engine.requests] == [4, 4, 4, 2]
    assert list(jobs.bad_places(job.id)) == ["n/2"]


def test_a_script_without_a_run_folder_is_fenced_off_from_nothing(
    jobs: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    other = jobs.add(request())
    for was, now in (("PENDING", "QUEUED"), ("QUEUED", "STARTING"), ("STARTING", "RUNNING")):
        jobs.move(other.id, LaunchState(was), LaunchState(now))
    with Supervisor(jobs, other.id, Scripted(DONE), slots=8):  # it runs, and has told of no run either
        job = jobs.add(request())
        with Supervisor(jobs, job.id, Scripted(GONE, DONE), slots=8) as supervisor:
            assert supervisor.run() is LaunchState.COMPLETED
    assert outcomes(jobs, job) == ["failed", "completed"]
    assert not list(Path().iterdir())


def test_the_furthest_step_stays_where_an_attempt_ends_before_it(jobs: JobQueue, tmp_path: Path) -> None:
    lost = [training(tmp_path, step, GONE) for step in (40, 20, 30, 40)]
    job = seen_through(jobs, Scripted(*lost, DONE), retries=3)
    assert (job.state, outcomes(jobs, job), job.best_step) == (LaunchState.FAILED, ["failed"] * 4, 40)


def test_the_last_place_is_never_done_without(jobs: JobQueue) -> None:
    bad = AttemptStanding(phase=ENDED, status=-6, reason="it ended", place="n/0")
    job = seen_through(jobs, Scripted(bad), ranks=1, retries=6)
    assert (job.state, jobs.bad_places(job.id)) == (LaunchState.FAILED, {})


@pytest.mark.parametrize(
    ("available", "v", "expected"), [(8, 8, (8, 0)), (7, 8, (4, 3)), (3, 8, (2, 1)), (1, 8, (1, 0)), (3, 4, (2, 1))]
)
def test_ranks_are_the_most_that_divide_v(available: int, v: int, expected: tuple[int, int]) -> None:
    assert ranks_for(available, v) == expected


@settings(max_examples=200)
@given(st.integers(1, 40), st.integers(0, 4), st.integers(1, 6))
def test_ranks_are_the_most_that_the_trainer_takes(available: int, depth: int, degree: int) -> None:
    v = 2**depth
    # As `Ranks` has it: one process computes everything, others are D replicas of T ranks, and D divides V.
    taken = [w for w in range(1, available + 1) if w == 1 or (w % degree == 0 and v % (w // degree) == 0)]
    assert ranks_for(available, v, degree) == (taken[-1], available - taken[-1])


@pytest.mark.long
def test_a_run_in_virtual_shards_goes_on_with_whole_replicas(jobs: JobQueue, tmp_path: Path) -> None:
    bad = AttemptStanding(phase=ENDED, status=-6, reason="the rank at n/2 was ended by SIGABRT", place="n/2")
    engine = Scripted(training(tmp_path, 8, GONE, v=8, t=3), *[bad] * 9, DONE)
    job = seen_through(jobs, engine, ranks=6, retries=10)
    # By V alone five ranks would be four, which three don't divide.
    assert [(one.ranks, one.tensor_parallel) for one in engine.requests[:2]] == [(6, 1), (6, 3)]
    assert {(one.ranks, one.tensor_parallel) for one in engine.requests[4:]} == {(3, 3)}
    assert jobs.get(job.id).tensor_parallel == 3


def test_a_queue_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    with JobQueue(tmp_path / "queue") as jobs:
        job = jobs.add(request(ranks=2))
    with closing(sqlite3.connect(tmp_path / "queue" / "queue.db")) as database:
        database.execute("ALTER TABLE jobs DROP COLUMN tensor_parallel")
    with JobQueue(tmp_path / "queue") as jobs:
        assert jobs.get(job.id) == job
        assert job.tensor_parallel == 1


def test_waits_grow_from_failure_to_failure(jobs: JobQueue) -> None:
    clock = JumpingClock(2.0)
    began: list[float] = []

    def fails(given: AttemptRequest) -> AttemptStanding:
        began.append(clock.now)
        return GONE

    job = jobs.add(request(retries=4, backoff_seconds=100.0))
    with Supervisor(jobs, job.id, Scripted(fails), slots=4, clock=clock) as supervisor:
        assert supervisor.run() is LaunchState.FAILED
    waits = [round((later - earlier) / 50) * 50 for earlier, later in pairwise(began)]
    assert waits == [100, 200, 300, 300]  # five minutes at most


def test_a_job_has_one_supervisor(jobs: JobQueue) -> None:
    job = jobs.add(request())
    with (
        Supervisor(jobs, job.id, Scripted(DONE), slots=4),
        pytest.raises(RunError, match=r"Job train-1 has a supervisor. Follow it"),
    ):
        Supervisor(jobs, job.id, Scripted(DONE), slots=4)


def test_a_supervisor_whose_job_was_taken_ends_its_attempt_and_changes_nothing(jobs: JobQueue, tmp_path: Path) -> None:
    job = jobs.add(request())
    runs = training(tmp_path, 3, AttemptStanding(phase=AttemptPhase.RUNNING))

    def taken_in_the_meantime(given: AttemptRequest) -> AttemptStanding:
        if jobs.get(job.id).state is LaunchState.RUNNING:
            jobs.hold(job.id, "another")  # which found its lock deleted
        return runs(given)

    engine = Scripted(taken_in_the_meantime)
    clock = JumpingClock(0.3)
    with Supervisor(jobs, job.id, engine, slots=4, clock=clock) as supervisor, pytest.raises(StaleHolderError):
        supervisor.run()
    assert engine.cancelled == ["0"]
    assert (jobs.get(job.id).state, outcomes(jobs, job)) == (LaunchState.RUNNING, [""])


def test_what_a_killed_supervisor_has_left_is_ended_first(jobs: JobQueue, tmp_path: Path) -> None:
    job = jobs.add(request())
    killed = Supervisor(
        jobs, job.id, Scripted(training(tmp_path, 3, AttemptStanding(phase=AttemptPhase.RUNNING))), slots=4
    )

    class KilledError(BaseException):
        pass

    def is_killed(*given: object) -> bool:
        raise KilledError

    killed._stalled = is_killed  # type: ignore[method-assign,assignment]
    with killed, pytest.raises(KilledError):
        killed.run()
    engine = Scripted(DONE)
    with Supervisor(jobs, job.id, engine, slots=4) as supervisor:
        assert supervisor.run() is LaunchState.COMPLETED
    assert engine.cancelled[0] == "0"  # before anything is begun
    assert outcomes(jobs, job) == ["lost", "completed"]
    assert jobs.get(job.id).failures == 0


def test_two_jobs_share_what_the_machine_has_room_for(jobs: JobQueue) -> None:
    """Of 4 slots: jobs of 3, 3 and 1 ranks, each with its own supervisor; the one of highest priority goes first."""
    running, most, order, waited = 0, 0, [], dict[str, set[str]]()
    change = threading.Lock()

    class Counting(Scripted):
        def submit(self, given: AttemptRequest) -> str:
            nonlocal running, most
            with change:
                running += given.ranks
                most = max(most, running)
                order.append(given.job)
                with JobQueue(jobs.home) as look:
                    waited[given.job] = {one.id for one in look.all() if one.state is LaunchState.QUEUED}
            return super().submit(given)

        def poll(self, handle: str) -> AttemptStanding:
            nonlocal running
            time.sleep(0.03)
            with change:
                running -= self.requests[int(handle)].ranks
            return DONE

    asked = [jobs.add(request(ranks=ranks, priority=priority)) for ranks, priority in ((3, 0), (3, 5), (1, 0))]
    gate = jobs.add(request(ranks=4, priority=9))
    all_wait = threading.Barrier(4)

    def see(job: LaunchedJob) -> None:
        with JobQueue(jobs.home) as own, Supervisor(own, job.id, Counting(DONE), slots=4) as supervisor:
            own.move(job.id, LaunchState.PENDING, LaunchState.QUEUED)
            all_wait.wait()
            assert supervisor.run() is LaunchState.COMPLETED

    threads = [threading.Thread(target=see, args=(job,)) for job in (*asked, gate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 4
    assert order[:2] == ["train-4", "train-2"]
    assert "train-1" not in waited["train-3"]  # it would have had room before; then both begin beside each other


def test_a_place_where_each_attempt_gets_further_stays(jobs: JobQueue, tmp_path: Path) -> None:
    lost = AttemptStanding(phase=ENDED, status=-9, reason="it ended", place="n/2")
    further = [training(tmp_path, step, lost) for step in (10, 20, 30, 40)]
    job = seen_through(jobs, Scripted(*further, DONE))
    assert (job.state, jobs.bad_places(job.id)) == (LaunchState.COMPLETED, {})


def test_a_run_whose_disk_is_lost_is_not_begun_from_its_first_step(jobs: JobQueue, tmp_path: Path) -> None:
    class Disk(Scripted):
        """Is lost with the first attempt."""

        def cancel(self, handle: str) -> None:
            super().cancel(handle)
            if (tmp_path / "run").exists():
                (tmp_path / "run").rename(tmp_path / "elsewhere")

    engine = Disk(training(tmp_path, 20, GONE))
    job = seen_through(jobs, engine, retries=2)
    assert (job.state, len(engine.requests)) == (LaunchState.FAILED, 1)
    assert f"{tmp_path / 'run'}, where step 20 was reached, isn't there" in job.reason
    assert f"cosmati clone {job.id}" in job.reason
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    jobs.resume(job.id, LaunchState.FAILED)
    back = Scripted(DONE)
    with Supervisor(jobs, job.id, back, slots=4) as supervisor:
        assert supervisor.run() is LaunchState.COMPLETED


def test_a_stopped_run_whose_disk_is_lost_is_not_begun_from_its_first_step(
    jobs: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("cosmati.launch.ending.outcome_of", lambda progress: "stopped")
        job = seen_through(jobs, Scripted(training(tmp_path, 20, DONE)))
    assert job.state is LaunchState.STOPPED
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    jobs.resume(job.id, LaunchState.STOPPED)
    engine = Scripted(DONE)
    with Supervisor(jobs, job.id, engine, slots=4) as supervisor:
        assert supervisor.run() is LaunchState.FAILED
    assert not engine.requests
    assert "where step 20 was reached, isn't there" in jobs.get(job.id).reason


def test_a_run_s_disk_that_is_full_is_a_failure_and_ends_no_supervisor(
    jobs: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, wait_seconds: float = 0.0) -> None:
        raise OSError(28, "No space left on device", str(folder / "epoch"))

    monkeypatch.setattr("cosmati.launch.supervisor.fence_off", full)
    engine = Scripted(training(tmp_path, 20, GONE))
    job = seen_through(jobs, engine, retries=2)
    assert (job.state, outcomes(jobs, job), len(engine.requests)) == (LaunchState.FAILED, ["failed"] * 3, 1)
    assert f"{tmp_path / 'run'} can't be written: No space left on device" in job.reason
    assert f"cosmati resume {job.id}" in job.reason
