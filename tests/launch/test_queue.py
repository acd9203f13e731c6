"""The queue against a model: no move but from the state that it was decided on, none by a stale supervisor."""

from __future__ import annotations

import sqlite3
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from cosmati.errors import RunError
from cosmati.launch.engine import RankProgram
from cosmati.launch.job import JobAttempt, JobRequest
from cosmati.launch.queue import JobQueue, StaleHolderError
from cosmati.launch.states import ACTIVE, ENDED, FOLLOWS, LaunchState

PROGRAM = RankProgram(command=("train.py",), folder=Path("/tmp"), python=Path(sys.executable))
HOLDERS = st.sampled_from(["one", "other"])
SLOTS = 4
# Written down once more, by hand: what may follow what.
MAY_FOLLOW = {
    "PENDING": "QUEUED FAILED STOPPED",
    "QUEUED": "STARTING PENDING FAILED STOPPED",
    "STARTING": "RUNNING PENDING TERMINATING COMPLETED FAILED STOPPED",
    "RUNNING": "PENDING TERMINATING COMPLETED FAILED STOPPED",
    "TERMINATING": "PENDING COMPLETED FAILED STOPPED",
    "COMPLETED": "",
    "FAILED": "PENDING",
    "STOPPED": "PENDING",
}


def request(**changes: Any) -> JobRequest:
    return JobRequest(**{"name": "Train it!", "program": PROGRAM, **changes})


def test_the_states_follow_each_other_as_the_page_draws_them() -> None:
    assert {str(state): set(map(str, after)) for state, after in FOLLOWS.items()} == {
        state: set(after.split()) for state, after in MAY_FOLLOW.items()
    }


class QueueMachine(RuleBasedStateMachine):
    """Two connections of two supervisors, any order of calls; a dictionary says what has to come of it."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.queues = {name: JobQueue(Path(self.folder.name) / "queue") for name in ("one", "other")}
        self.model: dict[str, dict[str, Any]] = {}
        self.num_added = 0

    def teardown(self) -> None:
        for queue in self.queues.values():
            queue.close()
        self.folder.cleanup()

    @initialize(target=jobs)
    def first(self) -> str:
        return self.add("one", 0, 1)

    @rule(target=jobs, by=HOLDERS, priority=st.integers(-1, 1), ranks=st.integers(1, 6))
    def add(self, by: str, priority: int, ranks: int) -> str:
        job = self.queues[by].add(request(priority=priority, ranks=ranks))
        assert job.id not in self.model
        told = {"state": "PENDING", "wish": "", "holder": "", "priority": priority, "ranks": ranks, "attempts": 0}
        self.model[job.id] = {**told, "order": self.num_added}
        self.num_added += 1
        return job.id

    @rule(job=jobs, by=HOLDERS)
    def hold(self, job: str, by: str) -> None:
        self.queues[by].hold(job, by)
        self.model[job]["holder"] = by

    @rule(
        job=jobs,
        by=HOLDERS,
        was=st.sampled_from(LaunchState),
        now=st.sampled_from(LaunchState),
        as_holder=st.booleans(),
    )
    def move(self, job: str, by: str, was: LaunchState, now: LaunchState, as_holder: bool) -> None:
        if str(now) not in MAY_FOLLOW[was].split():
            return
        one = self.model[job]
        holder = by if as_holder else None
        if one["state"] == was and (not as_holder or one["holder"] == by):
            self.queues[by].move(job, was, now, holder=holder, reason="so")
            one["state"] = str(now)
            if now in ENDED:
                one["wish"] = ""
        else:
            with pytest.raises(StaleHolderError):
                self.queues[by].move(job, was, now, holder=holder)

    @rule(job=jobs, by=HOLDERS, dead=st.sets(st.integers(0, 5)))
    def begin(self, job: str, by: str, dead: set[int]) -> None:
        one = self.model[job]

        def lives(other: str) -> bool:
            return self.model[other]["order"] not in dead

        def is_equal(other: dict[str, Any], one: dict[str, Any]) -> bool:
            return bool(other["priority"] == one["priority"])

        others = [value for name, value in self.model.items() if name != job and value["order"] not in dead]
        busy = sum(other["ranks"] for other in others if other["state"] in map(str, ACTIVE))
        ahead = [
            other
            for other in others
            if other["state"] == "QUEUED"
            and (other["priority"] > one["priority"] or (is_equal(other, one) and other["order"] < one["order"]))
        ]
        may = not ahead and (busy == 0 or busy + one["ranks"] <= SLOTS)
        if may and (one["state"], one["holder"]) != ("QUEUED", by):
            with pytest.raises(StaleHolderError):
                self.queues[by].begin(job, by, slots=SLOTS, lives=lives)
            return
        assert self.queues[by].begin(job, by, slots=SLOTS, lives=lives) is may
        if may:
            one["state"] = "STARTING"

    @rule(job=jobs, by=HOLDERS)
    def ask_to_stop(self, job: str, by: str) -> None:
        if self.model[job]["state"] in map(str, ENDED):
            with pytest.raises(StaleHolderError):
                self.queues[by].ask_to_stop(job)
        else:
            self.queues[by].ask_to_stop(job)
            self.model[job]["wish"] = "stop"

    @rule(job=jobs, by=HOLDERS)
    def resume(self, job: str, by: str) -> None:
        one = self.model[job]
        if one["state"] not in ("FAILED", "STOPPED"):
            with pytest.raises(StaleHolderError):
                self.queues[by].resume(job, LaunchState.STOPPED)
        else:
            self.queues[by].resume(job, LaunchState(one["state"]))
            one["state"], one["wish"] = "PENDING", ""

    @rule(job=jobs, by=HOLDERS)
    def begin_attempt(self, job: str, by: str) -> None:
        one = self.model[job]
        attempt = JobAttempt(number=one["attempts"], started=0.0, ranks=1)
        if one["holder"] != by:
            with pytest.raises(StaleHolderError):
                self.queues[by].begin_attempt(job, by, attempt)
        else:
            self.queues[by].begin_attempt(job, by, attempt)
            self.queues[by].note_attempt(job, by, one["attempts"], seconds=2.0)
            one["attempts"] += 1

    @rule(job=consumes(jobs), by=HOLDERS, target=jobs)
    def delete(self, job: str, by: str) -> Any:
        if self.model[job]["state"] in map(str, ENDED):
            self.queues[by].delete(job)
            del self.model[job]
            return multiple()
        with pytest.raises(StaleHolderError):
            self.queues[by].delete(job)
        return job

    @invariant()
    def every_connection_sees_the_model(self) -> None:
        for queue in self.queues.values():
            found = {job.id: (job.state, job.wish, len(queue.attempts(job.id)), job.seconds) for job in queue.all()}
            told = {
                name: (one["state"], one["wish"], one["attempts"], 2.0 * one["attempts"])
                for name, one in self.model.items()
            }
            assert found == told


QueueMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
test_the_queue_is_its_model = QueueMachine.TestCase


def test_of_supervisors_that_move_one_job_at_once_one_succeeds(tmp_path: Path) -> None:
    with JobQueue(tmp_path) as jobs:
        job = jobs.add(request())
        jobs.move(job.id, LaunchState.PENDING, LaunchState.QUEUED)
    moved, refused = [], []
    together = threading.Barrier(8)

    def move() -> None:
        with JobQueue(tmp_path) as own:
            together.wait()
            try:
                own.move(job.id, LaunchState.QUEUED, LaunchState.STARTING)
                moved.append(1)
            except StaleHolderError:
                refused.append(1)

    threads = [threading.Thread(target=move) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(moved), len(refused)) == (1, 7)


def test_a_duration_is_given_to_a_job_as_it_was_seen(tmp_path: Path) -> None:
    with JobQueue(tmp_path) as jobs:
        job = jobs.add(request())
        with pytest.raises(StaleHolderError, match="is PENDING by now"):
            jobs.give_seconds(job.id, LaunchState.STOPPED, 60.0)
        assert jobs.get(job.id) == job
        jobs.give_seconds(job.id, LaunchState.PENDING, 60.0)
        assert jobs.get(job.id).request == replace(job.request, max_seconds=60.0)


def test_jobs_are_named_by_what_they_run_and_a_number(tmp_path: Path) -> None:
    with JobQueue(tmp_path) as jobs:
        assert [jobs.add(request()).id, jobs.add(request(name="§")).id] == ["train-it-1", "job-2"]
        with pytest.raises(RunError, match=r"No job is called 'train'\. There are train-it-1\."):
            jobs.get("train")
        jobs.move("job-2", LaunchState.PENDING, LaunchState.STOPPED)
        jobs.delete("job-2")
        assert jobs.add(request()).id == "train-it-3"  # a number is never given twice


def test_a_disk_that_is_full_is_said_with_what_to_do(tmp_path: Path) -> None:
    with JobQueue(tmp_path) as jobs:
        jobs.add(request())
        pages = jobs._database.execute("PRAGMA page_count").fetchone()[0]
        jobs._database.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(RunError, match=r"database or disk is full. Free space or mend the folder"):
            jobs.add(request(name="x" * 10, settings={"what": "y" * 100_000}))
        assert [job.id for job in jobs.all()] == ["train-it-1"]


def test_a_queue_of_a_later_release_is_said(tmp_path: Path) -> None:
    with JobQueue(tmp_path) as jobs:
        job = jobs.add(request())
        with closing(sqlite3.connect(tmp_path / "queue.db")) as database, database:
            database.execute("UPDATE jobs SET request = json_set(request, '$.colour', 'red')")
        with pytest.raises(RunError, match=f"Job {job.id} .* was asked for with another release.*colour"):
            jobs.get(job.id)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't be used: .*--queue FOLDER"):
        JobQueue(tmp_path / "file" / "queue")


def test_a_file_that_is_no_queue_is_said(tmp_path: Path) -> None:
    (tmp_path / "queue.db").write_bytes(b"something else that is long enough to be looked at" * 100)
    with pytest.raises(RunError, match="file is not a database"):
        JobQueue(tmp_path)


def test_only_its_owner_reads_a_queue(tmp_path: Path) -> None:
    JobQueue(tmp_path / "state" / "queue").close()
    assert (tmp_path / "state" / "queue").stat().st_mode & 0o077 == 0


def test_a_supervisor_that_lost_its_job_moves_nothing(tmp_path: Path) -> None:
    with JobQueue(tmp_path) as jobs:
        job = jobs.add(request())
        jobs.hold(job.id, "another")
        with pytest.raises(StaleHolderError):
            jobs.move(job.id, LaunchState.PENDING, LaunchState.QUEUED, holder="mine")
        assert jobs.get(job.id).state is LaunchState.PENDING


@pytest.mark.parametrize(("ranks", "begins"), [(1, True), (2, False), (6, False)])
def test_a_job_begins_beside_another_where_both_have_room(tmp_path: Path, ranks: int, begins: bool) -> None:
    with JobQueue(tmp_path) as jobs:
        for asked in (3, ranks):
            job = jobs.add(request(ranks=asked))
            jobs.hold(job.id, "me")
            jobs.move(job.id, LaunchState.PENDING, LaunchState.QUEUED)
        assert jobs.begin("train-it-1", "me", slots=SLOTS, lives=lambda _: True)
        assert jobs.begin("train-it-2", "me", slots=SLOTS, lives=lambda _: True) is begins
