"""Carry calls out, several at a time: here, in processes of this machine, or wherever else somebody adds."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import torch

from cosmati.data.worker import WorkerStart
from cosmati.errors import PlanError, RunError
from cosmati.study.measured import Run, hardware_of_start
from cosmati.study.python_file import files_behind, load_once

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_END_SECONDS = 2.0


@dataclass(frozen=True)
class FailedCall:
    """A call that raised an error, or whose process died."""

    error: Exception

    @property
    def text(self) -> str:
        """The error with its kind, in one line that any file can hold: a file's name needn't be UTF-8."""
        words = f"{type(self.error).__name__}: {self.error}".split()
        return " ".join(words).encode(errors="backslashreplace").decode()

    @property
    def trace(self) -> str:
        """The error with where it was raised, in another process too."""
        return "".join(traceback.format_exception(self.error))


class Jobs(Protocol):
    """Carries calls out. A context manager; at its end whatever still runs is ended."""

    def outcomes(self, calls: Mapping[K, Callable[[], T]]) -> Iterator[tuple[K, T | FailedCall]]:
        """Give each call's key and result as it ends, in any order, or what it failed with; the others go on.

        Raises:
            RunError: a call raised it, which says that nothing can go on.
        """
        ...

    def results(self, calls: Mapping[K, Callable[[], T]]) -> Iterator[tuple[K, T]]:
        """Give each call's key and result as it ends, in any order; raise what a call raises."""
        for key, outcome in self.outcomes(calls):
            if isinstance(outcome, FailedCall):
                raise outcome.error
            yield key, outcome

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs."""
        ...


def jobs_of(num_jobs: int) -> Jobs:
    """Return what carries out so many calls at a time: one in this process, more in processes of their own.

    Raises:
        PlanError: the number isn't positive.
    """
    if num_jobs < 1:
        msg = f"jobs is {num_jobs}: give how many runs go on at a time, 1 or more."
        raise PlanError(msg)
    return InProcess() if num_jobs == 1 else LocalProcesses(num_jobs)


class InProcess(Jobs):
    """Carries calls out one after another, in this process."""

    def outcomes(self, calls: Mapping[K, Callable[[], T]]) -> Iterator[tuple[K, T | FailedCall]]:
        """Give each call's key and result, or what it failed with, in the calls' order."""
        for key, call in calls.items():
            outcome: T | FailedCall
            try:
                outcome = call()
            except RunError:
                raise
            except Exception as error:  # noqa: BLE001  # whoever asked decides
                outcome = FailedCall(error)
            yield key, outcome

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing runs any more."""


class LocalProcesses(Jobs):
    """Carries calls out in processes of this machine, one thread each. They end when this process does.

    A process is started where it's first needed and then kept, so what calls load stays loaded.

    Args:
        num_jobs: how many at a time.
    """

    def __init__(self, num_jobs: int) -> None:
        self._num_jobs = num_jobs
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, Hashable]] = {}

    def outcomes(self, calls: Mapping[K, Callable[[], T]]) -> Iterator[tuple[K, T | FailedCall]]:
        """Give each call's key and result as it ends, or what it failed with; that its process died, for one.

        Raises:
            RunError: a call can't be sent to another process, or raised it.
        """
        waiting = deque((key, pickled(key, call)) for key, call in calls.items())
        while waiting or self._busy:
            while waiting and len(self._busy) < self._num_jobs:
                key, data = waiting.popleft()
                worker = self._idle.pop() if self._idle else _Worker()
                self._busy[worker.connection] = worker, key
                worker.send(data)
            for connection in wait(list(self._busy)):
                assert isinstance(connection, Connection), "all of them are"
                worker, done = self._busy.pop(connection)
                try:
                    outcome = worker.receive(done)
                finally:
                    if worker.process.exitcode is None:
                        self._idle.append(worker)
                yield done, outcome  # type: ignore[misc]  # a key of `calls`, and its call's result

    def __enter__(self) -> Self:
        """Begin; processes start with the first calls."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, in the midst of a run too."""
        workers = [*self._idle, *(worker for worker, _ in self._busy.values())]
        self._idle, self._busy = [], {}
        for worker in workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join(_END_SECONDS)
            worker.process.kill()
            worker.process.join()


def hardware_of_starts(starts: Mapping[str, Callable[[], Run]], num_jobs: int) -> str:
    """Return what runs train on, in words: the device of the first of them that can be made.

    Args:
        starts: make runs, by words that name them.
        num_jobs: how many runs at a time there will be. Where they have processes of their own, this one shouldn't take
            hold of an accelerator.

    Raises:
        RunError: none can be made.
    """
    with InProcess() if num_jobs == 1 else LocalProcesses(1) as workers:
        return hardware_by(workers, starts)


def hardware_by(workers: Jobs, starts: Mapping[str, Callable[[], Run]]) -> str:
    """Return what runs train on where `workers` carry them out, in words: the device of one that can be made.

    Args:
        workers: make it.
        starts: make runs, by words that name them.

    Raises:
        RunError: none can be made.
    """
    failed: dict[str, FailedCall] = {}
    for words, outcome in workers.outcomes({one: partial(hardware_of_start, start) for one, start in starts.items()}):
        if not isinstance(outcome, FailedCall):
            return outcome
        failed[words] = outcome
    words, first = next(iter(failed.items()))
    msg = f"No run can be made. The first, of {words}: {first.text}. Mend it and begin again."
    raise RunError(msg) from first.error


def named_call(words: str, call: Callable[[], T]) -> T:
    """Carry a call out; an error that it raises says in a note whose it is."""
    try:
        return call()
    except BaseException as error:
        error.add_note(f"In the run {words}.")
        raise


def pickled(key: Hashable, call: Callable[[], object]) -> bytes:
    """Return a call as it's sent to another process.

    Raises:
        RunError: it can't be sent.
    """
    try:
        return pickle.dumps(call)
    except Exception as error:
        msg = (
            f"The run {words_of(key)} can't be sent to another process: {error}. Let `start` be a function of a "
            "module, or a functools.partial of one with arguments that can be pickled, or run one at a time: jobs=1."
        )
        raise RunError(msg) from error


def words_of(key: Hashable) -> str:
    """Return a call's key in words."""
    return ", ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)


class _Worker:
    """A process that carries out one call after another."""

    def __init__(self) -> None:
        # Forked processes inherit threads' locks and an accelerator that they can't use.
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), name="cosmati-run")
        self.process.start()
        theirs.close()

    def send(self, data: bytes) -> None:
        """Give it a call."""
        try:
            self.connection.send((files_behind(data), data))
        except BrokenPipeError:
            return  # it's dead, which `receive` says

    def receive(self, key: Hashable) -> object:
        """Return the call's result, or what it failed with; raise what lets nothing go on."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.connection.close()
            msg = (
                f"The process of the run {words_of(key)} died with exit code {self.process.exitcode}. Was memory "
                'short? A script that starts a study needs `if __name__ == "__main__":` around what it does.'
            )
            return FailedCall(RunError(msg))
        return outcome_of(answer)


def outcome_of(answer: tuple[object, BaseException | None, str]) -> object:
    """Return the result that another process has answered with, or what it failed with; raise what lets nothing go on.

    Args:
        answer: result, error and the error's traceback, as `answer_to` pickles them.
    """
    result, error, trace = answer
    if error is None:
        return result
    error.add_note(trace)
    if isinstance(error, RunError) or not isinstance(error, Exception):
        raise error
    return FailedCall(error)


def _serve(connection: Connection) -> None:
    WorkerStart()(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's: it ends this process
    torch.set_num_threads(1)
    while True:
        try:
            files, data = connection.recv()
            connection.send_bytes(answer_to(files, data))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the parent wants no more


def answer_to(files: Sequence[Path], data: bytes) -> bytes:
    """Carry out a call that another process has sent, and return the answer for it, pickled.

    Args:
        files: outside of any package, that the call takes functions from.
        data: the call, as `pickled` makes it.
    """
    try:
        for file in files:
            load_once(file)
        return pickle.dumps((pickle.loads(data)(), None, ""))  # noqa: S301  # our own parent's
    except BaseException as error:  # noqa: BLE001  # the parent raises it
        return _failure(error)


def _failure(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps((None, error, trace))
        pickle.loads(data)  # noqa: S301  # an error whose constructor takes other arguments can't be read back
    except Exception:  # noqa: BLE001
        data = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return data
