"""A study's runs as tasks of a Ray cluster. Needs the extra `ray`.

Ray sends each run to a node with room, and once more to another where the node or the process dies. Runs aren't gone on
with: they're begun again.
"""

from __future__ import annotations

import pickle
import socket
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch

from cosmati.errors import MissingExtraError, RunError
from cosmati.study.costs import profile_costs
from cosmati.study.definition import Study
from cosmati.study.jobs import FailedCall, Jobs, answer_to, hardware_by, outcome_of, pickled, words_of
from cosmati.study.python_file import files_behind
from cosmati.study.runner import first_starts

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_ANSWER_SECONDS = 5.0


class RayTasks(Jobs):
    """Carries calls out as tasks of Ray's, each in a process with one thread; at its end what still runs is killed.

    Args:
        num_jobs: how many at a time.
        num_cpus: that Ray reserves for each.
        num_gpus: that Ray gives each.
        retries: how often a task is begun again where its node or process dies.
    """

    def __init__(self, num_jobs: int, *, num_cpus: float = 1.0, num_gpus: float = 0.0, retries: int = 3) -> None:
        self._num_jobs = num_jobs
        self._options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_retries": retries, "retry_exceptions": False}
        self._runs: dict[Any, object] = {}
        """Keys, by what Ray has promised."""

    def outcomes(self, calls: Mapping[K, Callable[[], T]]) -> Iterator[tuple[K, T | FailedCall]]:
        """Give each call's key and result as it ends, or what it failed with; that its processes died, for one.

        Raises:
            RunError: a call can't be sent, or raised it.
        """
        import ray

        remote = ray.remote(**self._options)(_carry_out)
        waiting = deque((key, pickled(key, call)) for key, call in calls.items())
        while waiting or self._runs:
            while waiting and len(self._runs) < self._num_jobs:
                key, data = waiting.popleft()
                files = [str(file) for file in files_behind(data)]
                self._runs[remote.remote(files, data)] = key
            (done, *_), _ = ray.wait(list(self._runs))
            key = cast("K", self._runs.pop(done))
            try:
                answer = ray.get(done)
            except ray.exceptions.RayError as error:
                outcome: object = FailedCall(RunError(_died(key, error)))
            else:
                outcome = outcome_of(pickle.loads(answer))  # noqa: S301  # our own task's
            yield key, cast("T | FailedCall", outcome)

    def __enter__(self) -> Self:
        """Begin; tasks are submitted with the calls."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what is left."""
        import ray

        for run in self._runs:
            ray.cancel(run, force=True)
        self._runs = {}


class RayStudy:
    """Carries a study's runs out on the cluster that this process is joined to.

    Args:
        folder: of the study, on a disk that all nodes share.
        num_jobs: how many tasks at a time.
        options: of `RayTasks`.
    """

    def __init__(self, folder: Path, num_jobs: int, **options: Any) -> None:  # noqa: ANN401  (numbers of two kinds)
        self._folder, self._options = folder.expanduser().absolute(), options
        self.num_jobs = num_jobs

    def hardware(self, study: Study) -> str:
        """Return what its runs train on: a task looks."""
        with self._tasks(1) as tasks:
            return hardware_by(tasks, first_starts(study))

    def workers(self, study: Study, recipes: Mapping[str, str], hardware: str) -> Jobs:  # noqa: ARG002  (a cluster's)
        """Return what carries its cells out."""
        return self._tasks(self.num_jobs)

    def profile(self, study: Study, hardware: str) -> None:
        """Profile its costs in one task."""
        with self._tasks(1) as tasks:
            dict(tasks.results({"costs": partial(profile_costs, study, self._folder, hardware=hardware)}))

    def _tasks(self, num_jobs: int) -> RayTasks:
        return RayTasks(num_jobs, **self._options)


def join_cluster(address: str) -> None:
    """Join a Ray cluster, unless this process has joined one.

    Raises:
        MissingExtraError: Ray isn't installed.
        RunError: there's no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Tasks of Ray's need Ray. Install it: pip install 'cosmati[ray]'") from error
    if not ray.is_initialized():
        host, colon, port = address.rpartition(":")
        try:
            if colon and port.isdigit() and "/" not in host:  # Ray asks one that nobody hears for minutes
                socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
            ray.init(address=address, log_to_driver=False)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            msg = f"No Ray cluster answers at {address}: {error}. Begin one (ray start --head), or --with address=."
            raise RunError(msg) from error


def _carry_out(files: Sequence[str], data: bytes) -> bytes:
    torch.set_num_threads(1)
    return answer_to([Path(file) for file in files], data)


def _died(key: object, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"The task of the run {words_of(key)} died more often than it may be begun again: {first}"
