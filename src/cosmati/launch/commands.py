"""What people do with jobs: launch, look, stop, resume, clone, delete. The command line says the same words.

Each takes `queue`, the folder of the queue; without it that's $COSMATI_QUEUE, or `cosmati/launch` in the folder that
XDG_STATE_HOME names (~/.local/state).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.asking import asked_for, checked
from cosmati.launch.engines import check_engine
from cosmati.launch.following import LogWords
from cosmati.launch.job import JobAttempt, JobRequest, LaunchedJob, attempt_folder, folder_of
from cosmati.launch.notes import log_of
from cosmati.launch.program import in_own_folder
from cosmati.launch.queue import JobQueue, StaleHolderError
from cosmati.launch.states import ENDED, LaunchState
from cosmati.launch.supervisor import is_supervised

_POLL_SECONDS = 0.2
_LOST_SECONDS = 90.0
"""Without a supervisor, after which one is begun: its keeper has begun it anew by then, if it's there."""
_MOST_BEGUN = 2
_KEEPER = ("-P", "-m", "cosmati.launch.keeper")
"""-P: a file of the user's in the folder where he stands mustn't stand in for the standard library's."""


def home_of(queue: Path | None = None) -> Path:
    """Return the folder of the queue."""
    if queue is not None:
        return queue
    if told := os.environ.get("COSMATI_QUEUE"):
        return Path(told)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "cosmati" / "launch"


def launch(
    file: str,
    *arguments: str,
    ranks: int = 1,
    priority: int = 0,
    max_seconds: float | None = None,
    retries: int = 5,
    settings: Sequence[str] = (),
    run_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    name: str = "",
    engine: str = "local",
    engine_settings: Mapping[str, str] | None = None,
    queue: Path | None = None,
) -> LaunchedJob:
    """Begin a job that goes on without this process, and return it.

    Args:
        file: a script, or `FILE[:FUNCTION]` that returns a Recipe.
        arguments: a script's.
        ranks: processes that train it.
        priority: higher ones start first.
        max_seconds: of training, after which it's stopped with a checkpoint.
        retries: failures in a row, none of which got further, before it's given up.
        settings: a recipe's, `NAME=VALUE`.
        run_folder: a recipe's; None is `runs/ID`.
        environment: variables besides this process's.
        name: the beginning of its id; empty for the file's.
        engine: what carries it out.
        engine_settings: the engine's own.
        queue: the queue's folder.

    Raises:
        RunError: it can't be launched as asked; the message says why.
    """
    asked = asked_for(
        file,
        *arguments,
        ranks=ranks,
        priority=priority,
        max_seconds=max_seconds,
        retries=retries,
        settings=settings,
        run_folder=run_folder,
        environment=environment,
        name=name,
        engine=engine,
        engine_settings=engine_settings,
    )
    return begin_asked(asked, queue)


def begin_asked(asked: JobRequest, queue: Path | None = None) -> LaunchedJob:
    """Begin a job that was asked for, and return it.

    Raises:
        RunError: no engine of this name carries anything out, or the queue can't be written.
    """
    check_engine(asked.engine)
    with JobQueue(home_of(queue)) as jobs:
        return begin_job(jobs, asked)


def begin_job(jobs: JobQueue, asked: JobRequest) -> LaunchedJob:
    """Put a job into the queue, and begin its supervisor.

    Raises:
        RunError: the queue can't be written.
    """
    job = jobs.add(asked)
    _begin_keeper(jobs, job.id)
    return job


def runs(queue: Path | None = None) -> list[LaunchedJob]:
    """Return all jobs that this release can read, oldest first.

    Raises:
        RunError: the queue can't be read.
    """
    with JobQueue(home_of(queue)) as jobs:
        return jobs.all()


def of_other_releases(queue: Path | None = None) -> list[str]:
    """Return the ids of the jobs that this release can't read, oldest first.

    Raises:
        RunError: the queue can't be read.
    """
    with JobQueue(home_of(queue)) as jobs:
        return jobs.of_other_releases()


def set_slots(number: int, queue: Path | None = None) -> None:
    """Let so many ranks run at once on this machine, from now on.

    Raises:
        RunError: it's fewer than one, or the queue can't be written.
    """
    if number < 1:
        raise RunError(f"{number} ranks at once is none, and nothing would ever run. Give 1 or more.")
    with JobQueue(home_of(queue)) as jobs:
        jobs.slots = number


def show(job_id: str, queue: Path | None = None) -> tuple[LaunchedJob, list[JobAttempt], dict[str, str]]:
    """Return a job, its attempts, and the places that it does without, with the reasons.

    Raises:
        RunError: there's none of this id.
    """
    with JobQueue(home_of(queue)) as jobs:
        return jobs.get(job_id), jobs.attempts(job_id), jobs.bad_places(job_id)


def logs(
    job_id: str, *, rank: int = 0, attempt: int | None = None, follow: bool = False, queue: Path | None = None
) -> Iterator[str]:
    """Yield what a rank has said, piece by piece.

    Args:
        job_id: of the job.
        rank: whose words.
        attempt: its number; None is the latest.
        follow: go on as it says more, into later attempts too, until the job has ended.
        queue: the queue's folder.

    Raises:
        RunError: there's no such job or attempt, or it has said nothing and isn't followed, or never began.
    """
    with JobQueue(home_of(queue)) as jobs:
        number = attempt if attempt is not None else max(0, len(jobs.attempts(job_id)) - 1)
        words = LogWords()
        while True:
            has_ended = jobs.get(job_id).state in ENDED
            latest = len(jobs.attempts(job_id)) - 1
            path = log_of(attempt_folder(jobs.home, job_id, number), rank)
            yield from words.more(path)
            if not words.num_bytes and (not follow or (has_ended and not path.exists())):
                wait_for_it = "" if has_ended else " Wait for it: --follow."
                raise RunError(f"Rank {rank} of {job_id} has said nothing in attempt {number}.{wait_for_it}")
            is_last = not follow or has_ended or number < latest
            if is_last and (rest := words.rest()):
                yield rest
            if follow and attempt is None and number < latest:
                number, words = number + 1, LogWords()
                yield f"--- attempt {number} ---\n"
            elif is_last:
                return
            else:
                time.sleep(_POLL_SECONDS)


def wait(
    job_id: str, tell: Callable[[LaunchedJob], None] = lambda _job: None, queue: Path | None = None
) -> LaunchedJob:
    """Return a job when it has ended; where it has lost its supervisor, it gets another one.

    Args:
        job_id: of the job.
        tell: is told of it, some times a second.
        queue: the queue's folder.

    Raises:
        RunError: there's none of this id, or no supervisor stays with it.
    """
    with JobQueue(home_of(queue)) as jobs:
        seen, num_begun = time.monotonic(), 0
        while True:
            job = jobs.get(job_id)
            tell(job)
            if job.state in ENDED:
                return job
            if is_supervised(jobs.home, job_id):
                seen = time.monotonic()
            elif time.monotonic() - seen > _LOST_SECONDS:
                if num_begun == _MOST_BEGUN:
                    log = folder_of(jobs.home, job_id) / "supervisor.log"
                    raise RunError(
                        f"No supervisor stays with {job_id}. See why in {log}, and then: cosmati resume {job_id}"
                    )
                _begin_keeper(jobs, job_id)
                seen, num_begun = time.monotonic(), num_begun + 1
            time.sleep(_POLL_SECONDS)


def stop(job_id: str, queue: Path | None = None) -> None:
    """Ask a job to end after the step in progress, with a checkpoint; `resume` goes on from there.

    Raises:
        RunError: there's none of this id, or it has ended.
    """
    with JobQueue(home_of(queue)) as jobs:
        job = jobs.get(job_id)
        if job.state in ENDED:
            raise RunError(f"Job {job_id} is {job.state} already, so there's nothing to stop.")
        jobs.ask_to_stop(job_id)
        if not is_supervised(jobs.home, job_id):
            # Its supervisor has to end what may be left of it.
            _begin_keeper(jobs, job_id)


def resume(job_id: str, queue: Path | None = None, *, max_seconds: float | None = None) -> LaunchedJob:
    """Go on with a job that was stopped, has failed, or has lost its supervisor; return it.

    Args:
        job_id: of the job.
        queue: the queue's folder.
        max_seconds: of its attempts together, those before too, from now on; None is what it was launched with.

    Raises:
        RunError: there's none of this id, it's completed, it goes on already, or its duration is over.
    """
    with JobQueue(home_of(queue)) as jobs:
        job = jobs.get(job_id)
        if job.state is LaunchState.COMPLETED:
            raise RunError(
                f"Job {job_id} is completed: nothing is left to do. Begin another like it: cosmati clone {job_id}"
            )
        if is_supervised(jobs.home, job_id):
            if job.state in ENDED:
                _wait_for_supervisor(jobs, job_id)
            else:
                raise RunError(f"Job {job_id} is {job.state}. Follow it: cosmati logs {job_id} --follow")
        _refuse_no_time(job, job.request.max_seconds if max_seconds is None else max_seconds)
        if max_seconds is not None:
            jobs.give_seconds(job_id, job.state, max_seconds)
        if job.state in ENDED:
            jobs.resume(job_id, job.state)
        else:
            jobs.ask_to_go_on(job_id, job.state)
        _begin_keeper(jobs, job_id)
        return jobs.get(job_id)


def _refuse_no_time(job: LaunchedJob, limit: float | None) -> None:
    if limit is not None and job.seconds >= limit:
        msg = (
            f"Job {job.id} has run {job.seconds:.0f} s, and its limit is {limit:g} s, of all attempts together. Give "
            f"it a longer one, or it would stop at once: cosmati resume {job.id} --max-duration 8h"
        )
        raise RunError(msg)


def resume_lost(queue: Path | None = None) -> list[LaunchedJob]:
    """Go on with all jobs that haven't ended and have no supervisor, as after the machine was started anew.

    Those that were asked to stop are ended, and aren't among what is returned.

    Raises:
        RunError: the queue can't be used.
    """
    with JobQueue(home_of(queue)) as jobs:
        lost = [job for job in jobs.all() if job.state not in ENDED and not is_supervised(jobs.home, job.id)]
        for job in lost:
            _begin_keeper(jobs, job.id)
        return [job for job in lost if job.wish != "stop"]


def clone(job_id: str, queue: Path | None = None, **changes: object) -> LaunchedJob:
    """Begin a new job that is asked for as another one was; return it.

    A recipe's run gets a folder of its own, beside the other's. A script says itself where it trains: one that names
    the same folder goes on with the other's run.

    Args:
        job_id: of the other one.
        queue: the queue's folder.
        changes: fields of `JobRequest`.

    Raises:
        RunError: there's none of this id, or it can't be asked for so.
    """
    with JobQueue(home_of(queue)) as jobs:
        asked = jobs.get(job_id).request
        own = dataclasses.replace(asked, program=in_own_folder(asked.program))
        return begin_job(jobs, checked(dataclasses.replace(own, **changes)))  # type: ignore[arg-type]


def delete(job_id: str, queue: Path | None = None) -> None:
    """Take a job that has ended out of the queue, with its logs; its run stays, with checkpoints and ledger.

    Raises:
        RunError: there's none of this id, or it hasn't ended.
    """
    with JobQueue(home_of(queue)) as jobs:
        try:
            jobs.delete(job_id)
        except StaleHolderError as error:
            if job_id not in jobs.of_other_releases():
                state = jobs.get(job_id).state
                ends = state is LaunchState.TERMINATING
                do = f"It ends: cosmati show {job_id}" if ends else f"Stop it first: cosmati stop {job_id}"
                raise RunError(f"Job {job_id} is {state}. {do}") from error
            if is_supervised(jobs.home, job_id):
                raise RunError(f"Job {job_id} is another release's, and goes on. Stop it with that one.") from error
            jobs.delete(job_id, in_any_state=True)
        shutil.rmtree(folder_of(jobs.home, job_id), ignore_errors=True)


def _wait_for_supervisor(jobs: JobQueue, job_id: str) -> None:
    until = time.monotonic() + 30.0
    while is_supervised(jobs.home, job_id) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _begin_keeper(jobs: JobQueue, job_id: str) -> None:
    folder, python = folder_of(jobs.home, job_id), jobs.get(job_id).request.program.python
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "supervisor.log").open("ab") as log:
            # A session of its own: it goes on when the terminal is closed, and Ctrl-C isn't for it.
            subprocess.Popen(  # noqa: S603  (our own module)
                [str(python) if python.exists() else sys.executable, *_KEEPER, str(jobs.home), job_id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        msg = f"The supervisor of {job_id} can't be begun: {error}. See to that, and go on: cosmati resume {job_id}"
        raise RunError(msg) from error
