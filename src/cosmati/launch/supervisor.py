"""Sees one job through: waits for its turn, begins attempts, watches them, and begins the next where one is lost.

There's one supervisor a job, and they share the queue of their machine. A job's supervisor holds the kernel's lock on
`supervisor.lock` in the job's folder, which goes with the process, and a token in the queue, without which nothing can
be changed there: one that comes back from a long sleep finds that another has taken its place, and ends.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Self

from cosmati.errors import RunError
from cosmati.launch.ending import WHOLE, EndedAttempt, end_of, outcome_of
from cosmati.launch.engine import AttemptPhase, AttemptRequest, AttemptStanding, Engine
from cosmati.launch.job import JobAttempt, LaunchedJob, attempt_folder, folder_of
from cosmati.launch.program import of_job
from cosmati.launch.queue import JobQueue, StaleHolderError
from cosmati.launch.states import ACTIVE, ENDED, LaunchState
from cosmati.launch.watch import RunProgress, RunWatch
from cosmati.records.attempts import ATTEMPTS_FILE
from cosmati.storage.fence import fence_off
from cosmati.storage.lock import FileLock, is_locked

SUPERVISOR_LOCK = "supervisor.lock"
_NOTE_SECONDS = 1.0
_MAX_BACKOFF = 300.0
_GRACE_SECONDS = 300.0
_LOCK_SECONDS = 5.0
_STACKS_SECONDS = 1.0
_LOOK_SECONDS = 0.3
_BAD_AFTER = 3
"""Failures in a row of one place, none of which got further, after which the job does without it."""


def is_supervised(home: Path, job_id: str) -> bool:
    """Return whether a job's supervisor is there."""
    return is_locked(folder_of(home, job_id) / SUPERVISOR_LOCK)


class Supervisor:
    """Sees one job through. A context manager.

    Args:
        queue: of this machine.
        job_id: of the job.
        engine: carries its attempts out.
        slots: ranks that may run at once on this machine, where the queue says nothing else.
        clock: seconds that only grow: a wall clock that jumps ends nothing.

    Raises:
        StaleHolderError: it has a supervisor. RunError: there's no such job.
    """

    def __init__(
        self,
        queue: JobQueue,
        job_id: str,
        engine: Engine,
        *,
        slots: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._id, self._engine, self._slots, self._clock = queue, job_id, engine, slots, clock
        queue.get(job_id)
        folder_of(queue.home, job_id).mkdir(parents=True, exist_ok=True)
        self._waited = 0.0
        self._lock = _lock_of(queue.home, job_id)
        self._holder = secrets.token_hex(8)
        queue.hold(job_id, self._holder)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Let the job go."""
        self._lock.release()

    def run(self) -> LaunchState:
        """See the job to its end, and return the state that it ended in.

        Raises:
            RunError: the queue can't be used, or another supervisor has taken the job.
        """
        self._take_over()
        while (job := self._job()).state not in ENDED:
            if why := _why_stop(job, job.seconds):
                is_new = job.wish == "stop" and not self._queue.attempts(self._id)
                self._move(job.state, LaunchState.STOPPED, "stopped before it began" if is_new else why)
            elif job.state is LaunchState.PENDING:
                self._move(LaunchState.PENDING, LaunchState.QUEUED, job.reason)
            elif self._may_begin(job):
                self._attempt()
            else:
                time.sleep(self._engine.poll_seconds)
        return job.state

    def _worked(self) -> float:
        """Return the clock without what attempts have waited in a scheduler's queue, where nothing gets on."""
        return self._clock() - self._waited

    def _job(self) -> LaunchedJob:
        return self._queue.get(self._id)

    def _move(self, was: LaunchState, now: LaunchState, reason: str = "") -> None:
        self._queue.move(self._id, was, now, holder=self._holder, reason=reason)

    def _may_begin(self, job: LaunchedJob) -> bool:
        if job.request.engine != "local":  # whose scheduler has a queue of its own
            self._move(LaunchState.QUEUED, LaunchState.STARTING)
            return True
        home = self._queue.home
        return self._queue.begin(
            self._id,
            self._holder,
            slots=self._queue.slots or self._slots,
            lives=lambda other: is_supervised(home, other),
        )

    def _take_over(self) -> None:
        """End what a killed supervisor has left running, and make the job PENDING."""
        job, attempts = self._job(), self._queue.attempts(self._id)
        if attempts and not attempts[-1].outcome:
            last = attempts[-1]
            if last.handle:
                self._engine.cancel(last.handle)
            reason = "its supervisor was killed"
            self._queue.note_attempt(self._id, self._holder, last.number, outcome="lost", reason=reason)
        if job.state in ACTIVE:
            ends = LaunchState.STOPPED if job.wish == "stop" else LaunchState.PENDING
            self._move(job.state, ends, "its supervisor was killed")

    def _attempt(self) -> None:
        job = self._job()
        number = len(self._queue.attempts(self._id))
        bad = self._queue.bad_places(self._id)
        # A scheduler finds other places; on this machine there are none.
        num_lost = len(bad) if job.request.engine == "local" else 0
        # V isn't known before a run has begun; what was asked for divides it.
        available, degree = job.request.ranks - num_lost, job.tensor_parallel
        ranks, idle = ranks_for(available, job.num_microbatches or job.request.ranks, degree)
        folder = attempt_folder(self._queue.home, self._id, number)
        attempt = JobAttempt(number=number, started=time.time(), ranks=ranks, idle=idle)
        self._queue.begin_attempt(self._id, self._holder, attempt)
        if refused := self._fence_off(job):
            self._settle(number, refused)
            return
        request = AttemptRequest(
            job=self._id,
            number=number,
            program=of_job(job.request.program, self._id),
            ranks=ranks,
            folder=folder,
            bad=tuple(bad),
            max_seconds=None if job.request.max_seconds is None else job.request.max_seconds - job.seconds,
            settings=job.request.settings,
            tensor_parallel=job.tensor_parallel,
        )
        try:
            handle = self._engine.submit(request)
        except RunError as error:
            self._settle(number, EndedAttempt("failed", str(error), own_fault=True))
            return
        try:
            self._queue.note_attempt(self._id, self._holder, number, handle=handle)
            ended = self._follow(number, handle, RunWatch(folder / "run", self._worked))
        except Exception:
            # Another's job, or a queue that can't be used: nobody would watch what runs, and this process wait for it.
            with contextlib.suppress(RunError):
                self._engine.cancel(handle)
            raise
        self._settle(number, ended)

    def _fence_off(self, job: LaunchedJob) -> EndedAttempt | None:
        """Make whoever is left of a lost attempt stale: from now on he can commit nothing. Return why not, if so."""
        before, run = self._queue.attempts(self._id)[:-1], Path(job.run_folder)
        if not before or not job.run_folder:
            return None
        # A disk that isn't mounted leaves an empty folder.
        if job.step and not (run / ATTEMPTS_FILE).exists():
            told = (
                f"{run}, where step {job.step} was reached, isn't there. Bring its disk or the folder back, and "
                f"cosmati resume {self._id}; to begin from the first step: cosmati clone {self._id}"
            )
            return EndedAttempt("failed", told)
        if before[-1].outcome in ("completed", "stopped"):
            return None
        for other in self._queue.at_work_in(job.run_folder):
            if other != self._id and is_supervised(self._queue.home, other):
                told = f"Job {other} trains in {job.run_folder}. Give one of them a run folder of its own."
                return EndedAttempt("failed", told, is_final=True)
        try:
            for path in (run, run / "ledger"):
                fence_off(path, wait_seconds=_LOCK_SECONDS)
        except OSError as error:
            reason = error.strerror or error
            told = f"{run} can't be written: {reason}. Mend that, as by making room, and cosmati resume {self._id}"
            return EndedAttempt("failed", told)
        return None

    def _follow(self, number: int, handle: str, watch: RunWatch) -> EndedAttempt:
        """Watch an attempt to its end."""
        began, noted, stopping = self._worked(), -1.0, None
        before, looked = self._job().seconds, self._clock()
        while True:
            standing = self._engine.poll(handle)
            if standing.phase is AttemptPhase.WAITING:
                self._waited += self._clock() - looked
            looked = self._clock()
            progress, now = watch.look(), self._worked()
            has_ended = standing.phase is AttemptPhase.ENDED
            if has_ended or now - noted >= _NOTE_SECONDS or (noted < 0 and progress.run is not None):
                self._note(number, progress, now - began)
                noted = now
            job = self._job()
            if job.state is LaunchState.STARTING and (
                progress.step is not None or _is_silent_script(standing, progress)
            ):
                self._move(LaunchState.STARTING, LaunchState.RUNNING)
            if has_ended:
                # Of a rank that was lost, nothing may be left.
                self._engine.cancel(handle)
                return end_of(standing, progress, asked=stopping is not None)
            if stopping is None and (why := _why_stop(job, before + now - began)):
                stopping = looked
                self._move(self._job().state, LaunchState.TERMINATING, why)
                self._engine.ask_to_stop(handle)
            elif stopping is not None and looked - stopping > _GRACE_SECONDS:
                self._engine.cancel(handle)
                return EndedAttempt("stopped", f"it was killed {_GRACE_SECONDS:.0f} s later")
            elif (
                stopping is None
                and standing.phase is AttemptPhase.RUNNING
                and (why := self._stalled(job, progress, watch))
            ):
                self._engine.dump_stacks(handle)
                time.sleep(_STACKS_SECONDS)
                self._engine.cancel(handle)
                return EndedAttempt("stalled", why)
            time.sleep(self._engine.poll_seconds)

    def _note(self, number: int, progress: RunProgress, seconds: float) -> None:
        told: dict[str, object] = {"seconds": seconds}
        if progress.first_step is not None:
            told["first_step"] = progress.first_step
        if progress.step is not None:
            told["last_step"] = progress.step
        self._queue.note_attempt(self._id, self._holder, number, **told)
        if (run := progress.run) is not None:
            step = progress.step if progress.step is not None else progress.first_step
            known: dict[str, object] = {"run_folder": run.folder, "num_microbatches": run.num_microbatches}
            known |= {"num_steps": run.num_steps, "tensor_parallel": run.tensor_parallel}
            if step is not None:
                known["step"] = step
            if progress.step_seconds is not None:
                known["step_seconds"] = progress.step_seconds
            self._queue.note(self._id, self._holder, **known)

    def _stalled(self, job: LaunchedJob, progress: RunProgress, watch: RunWatch) -> str:
        asked = job.request
        if progress.run is None and job.state is LaunchState.RUNNING:
            return ""  # a program that says nothing of its steps
        allowed = watch.silence_allowed(asked.patience, asked.min_silence_seconds, asked.start_seconds)
        if progress.silent_seconds <= allowed * self._lenience():
            return ""
        if outcome_of(progress) in WHOLE:
            return ""  # its program does something more
        where = "before its first step" if progress.step is None else f"after step {progress.step}"
        return f"no step for {progress.silent_seconds:.0f} s {where}; stacks are beside its logs (rank-R.stacks)"

    def _lenience(self) -> float:
        """Return how much more silence is let pass: twice as much for each attempt in a row that was ended for it.

        An evaluation, or a first step that compiles, may take longer than anything that was seen of the run.
        """
        before = reversed(self._queue.attempts(self._id)[:-1])
        return 2.0 ** sum(1 for _ in takewhile(lambda one: one.outcome == "stalled", before))

    def _settle(self, number: int, ended: EndedAttempt) -> None:
        """Write down how an attempt has ended, and where that leaves the job."""
        told = {"outcome": ended.outcome, "reason": ended.reason, "place": ended.place}
        self._queue.note_attempt(self._id, self._holder, number, **told)
        job = self._job()
        if ended.outcome == "completed" and job.num_steps is not None:
            self._queue.note(self._id, self._holder, step=job.num_steps)  # lines come every ten steps
        if ended.outcome in ("completed", "stopped"):
            ends = LaunchState.COMPLETED if ended.outcome == "completed" else LaunchState.STOPPED
            why = (job.reason, ended.reason) if ends is LaunchState.STOPPED else (ended.reason,)
            self._move(job.state, ends, "; ".join(filter(None, why)))
            return
        got_further = job.step is not None and job.step > job.best_step
        failures = 1 if got_further else job.failures + 1
        self._queue.note(self._id, self._holder, failures=failures, best_step=max(job.best_step, job.step or -1))
        has_trained = any(one.last_step is not None for one in self._queue.attempts(self._id))
        if ended.is_final:
            self._move(job.state, LaunchState.FAILED, ended.reason)
        elif ended.own_fault and not has_trained:
            reason = f"{ended.reason} (before a first step, so it isn't tried again)"
            self._move(job.state, LaunchState.FAILED, reason)
        elif failures > job.request.retries:
            how = f"{failures} failures in a row; the last" if failures > 1 else "failed, and no retry is left"
            self._move(job.state, LaunchState.FAILED, f"{how}: {ended.reason}")
        else:
            self._refuse_place(ended, failures)
            self._move(job.state, LaunchState.PENDING, ended.reason)
            self._back_off(job, failures)

    def _refuse_place(self, ended: EndedAttempt, failures: int) -> None:
        """Do without a place that has failed again and again, unless it's the last one."""
        last = [one.place for one in self._queue.attempts(self._id)[-_BAD_AFTER:]]
        is_last = len(self._queue.bad_places(self._id)) + 1 >= self._job().request.ranks
        if ended.place and not is_last and failures >= _BAD_AFTER and last == [ended.place] * _BAD_AFTER:
            reason = f"failed {_BAD_AFTER} times in a row: {ended.reason}"
            self._queue.add_bad_place(self._id, self._holder, ended.place, reason)

    def _back_off(self, job: LaunchedJob, failures: int) -> None:
        until = self._clock() + min(_MAX_BACKOFF, job.request.backoff_seconds * 2.0 ** min(failures - 1, 60))
        while self._clock() < until and self._job().wish != "stop":
            time.sleep(min(self._engine.poll_seconds, max(0.0, until - self._clock())))


def _why_stop(job: LaunchedJob, seconds: float) -> str:
    """Return why a job that has run so long is to stop; empty where it isn't."""
    if job.wish == "stop":
        return "asked to stop"
    limit = job.request.max_seconds
    return f"its {limit:g} s are over" if limit is not None and seconds >= limit else ""


def ranks_for(available: int, num_microbatches: int, degree: int = 1) -> tuple[int, int]:
    """Return how many of the ranks that are there train, and how many are idle.

    Most of them that make replicas of T ranks, whose number divides V; where there's no such replica, one: a process
    alone computes everything.

    Args:
        available: at least one.
        num_microbatches: V.
        degree: T.
    """
    fit = [count * degree for count in range(1, available // degree + 1) if num_microbatches % count == 0]
    ranks = max(fit, default=1)
    return ranks, available - ranks


def _lock_of(home: Path, job_id: str) -> FileLock:
    until = time.monotonic() + _LOOK_SECONDS
    while True:
        with contextlib.suppress(BlockingIOError):  # somebody may only be looking whether it's held
            return FileLock(folder_of(home, job_id) / SUPERVISOR_LOCK)
        if time.monotonic() > until:
            raise StaleHolderError(f"Job {job_id} has a supervisor. Follow it: cosmati logs {job_id} --follow")
        time.sleep(0.05)


def _is_silent_script(standing: AttemptStanding, progress: RunProgress) -> bool:
    """Whether a program runs that has told of no run, and so may be none of Cosmati's."""
    return standing.phase is AttemptPhase.RUNNING and progress.run is None and progress.silent_seconds > 30.0
