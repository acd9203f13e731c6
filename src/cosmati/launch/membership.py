"""Runs a training function among processes that come and go by themselves, without one that begins or watches them.

Whoever says who is there is behind one interface, `Membership`. Each agreement gives the processes ranks; as many as
divide the most train, and the others wait for the next agreement. The run goes on from its last checkpoint each time,
to the bits of one process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from cosmati.errors import RunError
from cosmati.launch.claim import claimed, say_that_others_train
from cosmati.launch.worker import is_of_others
from cosmati.train.run.result import RunResult

_MEET_SECONDS = 60.0
_TRIES = 5
"""That gloo makes to reach one, each with the whole limit."""
_MOST_SECONDS = 1e9
"""What PyTorch and Python can count in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Those who have agreed.

    Attributes:
        number: of the agreement; no other one of this job has it, not even one among the same processes.
        rank: of this process.
        size: processes.
        host: of the first one's store.
        port: of the first one's store.
    """

    number: int
    rank: int
    size: int
    host: str
    port: int


class Membership(Protocol):
    """Knows which processes are there.

    Attributes:
        name: of this job among all that train into a run's folder.
    """

    name: str

    def agree(self) -> RankGroup:
        """Wait until those who are there have agreed.

        Raises:
            RunError: nobody answers who could know.
        """
        ...


def train_among(
    members: Membership,
    train: Callable[[], RunResult],
    *,
    run_folder: Path,
    num_ranks: int,
    look_seconds: float = 300.0,
    max_failures: int = 10,
    wait_seconds: float = 1800.0,
) -> None:
    """Train among processes that each call this in their main thread, and return when the run has ended.

    One that's killed is noticed at once. One that's frozen keeps the others waiting for `wait_seconds`, for gloo can't
    be interrupted; while they meet, for a minute.

    Args:
        members: say who is there.
        train: builds a `Trainer`, calls `fit()` and returns what that returns. The process group is there.
        run_folder: of the run, absolute, on a disk that all share; the one that `train` gives its `RunConfig`.
        num_ranks: at most, a power of two that divides V.
        look_seconds: between two looks for processes that have come. Each is a stop with a checkpoint.
        max_failures: how often others may be lost to this process.
        wait_seconds: that a rank may wait for another one, as one that is frozen and not dead: more than its slowest
            step, checkpoint or evaluation takes.

    Raises:
        RunError: the numbers or the folder are none; it isn't the main thread, or a process group is there already;
            somebody else trains in the folder; `train` returns something else; or others were lost too often.
    """
    check_begin(run_folder, num_ranks, max_failures, look_seconds=look_seconds, wait_seconds=wait_seconds)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    failures, is_told = 0, False
    while True:
        group = members.agree()
        most = 1 << (min(group.size, num_ranks).bit_length() - 1)
        if group.rank >= most:
            continue
        try:
            with (
                _joined(group, most, wait_seconds),
                _looking(look_seconds if group.rank == 0 else None) as looked,
                claimed(run_folder, members.name) as is_theirs,
            ):
                if is_theirs:
                    _set_pg_timeout(timedelta(seconds=wait_seconds))
                    result = _result_of(train)
                    if result.outcome != "stopped" or not _any(looked.is_set()):
                        return
                elif not is_told:
                    is_told = True
                    say_that_others_train(run_folder)
        except Exception as error:
            if not is_of_others(error, most):
                raise
            failures += 1
            cause = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"Others were lost ({cause}): agreeing anew with those left.\n")
            if failures > max_failures:
                msg = (
                    f"Others were lost {failures} times, and {max_failures} are allowed. The last time it was {cause}. "
                    f"See to them, and begin again."
                )
                raise RunError(msg) from error


def check_begin(run_folder: Path, num_ranks: int, max_failures: int, **seconds: float) -> None:
    """Refuse what can't be trained with, before anything begins.

    Raises:
        RunError: see `train_among`.
    """
    for name, number in {"num_ranks": num_ranks, "max_failures": max_failures}.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise RunError(f"{name}={number!r} is no whole number. Give one.")
    if num_ranks < 1 or num_ranks & (num_ranks - 1):
        msg = f"num_ranks={num_ranks} can't be shared by halves. Give a power of two: 1, 2, 4, ..., up to V."
        raise RunError(msg)
    if max_failures < 0:
        raise RunError(f"max_failures={max_failures} can't be. Give 0 or more.")
    for name, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_SECONDS:
            raise RunError(
                f"{name}={value!r} can't be waited for. Give seconds: more than 0, at most {_MOST_SECONDS:g}."
            )
    if not run_folder.is_absolute():
        msg = f"{run_folder} isn't absolute, and others begin elsewhere. Give Path(...).absolute(), on a shared disk."
        raise RunError(msg)
    if threading.current_thread() is not threading.main_thread():
        msg = "Training among others stops by SIGTERM, which only the main thread can take. Call it from there."
        raise RunError(msg)
    if dist.is_initialized():
        msg = "A process group is there already, and members make their own. Leave it: dist.destroy_process_group()."
        raise RunError(msg)


def _result_of(train: Callable[[], RunResult]) -> RunResult:
    result = train()
    if not isinstance(result, RunResult):
        msg = (
            f"train returned {result!r}, so nobody knows whether the run has ended. Return what fit() returns, and "
            f"begin again: it goes on from its last checkpoint."
        )
        raise RunError(msg)
    return result


@contextmanager
def _joined(group: RankGroup, size: int, wait_seconds: float) -> Iterator[None]:
    limit = timedelta(seconds=min(_MEET_SECONDS, wait_seconds))
    store = PrefixStore(str(group.number), TCPStore(group.host, group.port, timeout=limit))
    # One who was frozen meanwhile finds what others have said who have gone on since: they answer in a second round.
    for word in ("is here", "has seen all"):
        store.set(f"rank {group.rank} {word}", "")
        store.wait([f"rank {rank} {word}" for rank in range(size)], limit)
    # Collectives are given another limit below; sends and receives of the user's own keep this one.
    limit = timedelta(seconds=_MEET_SECONDS / _TRIES)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=size, timeout=limit)
    try:
        # The first rank may have to watch for some seconds, however short the others are to wait later, who trains.
        _set_pg_timeout(timedelta(seconds=_MEET_SECONDS))
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _looking(seconds: float | None) -> Iterator[threading.Event]:
    """Have `fit` stop after so long; what is given says whether that was why."""
    looked, is_over = threading.Event(), threading.Event()
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, _: FrameType | None) -> None:
        if not looked.is_set():  # somebody else's, and nothing trains
            raise SystemExit(128 + number)

    def look() -> None:
        while not is_over.wait(seconds):
            if signal.getsignal(signal.SIGTERM) is not end:  # `fit` listens
                looked.set()
                signal.raise_signal(signal.SIGTERM)
                return  # a second signal would be a stop at once, without a checkpoint

    signal.signal(signal.SIGTERM, end)
    thread = threading.Thread(target=look, daemon=True, name="cosmati-look")
    if seconds is not None:
        thread.start()
    try:
        yield looked
    finally:
        is_over.set()
        signal.signal(signal.SIGTERM, before)


def _any(flag: bool) -> bool:
    """Return whether any rank says so."""
    told = torch.tensor([int(flag)], device="cpu")
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told.item())
