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

from cosmati.errors import RunError
from cosmati.launch.worker import is_of_others
from cosmati.storage.fence import fence_off
from cosmati.train.run.result import RunResult

_BEGUN = "members.begun"
_LOCK_SECONDS = 5.0
_MEET_SECONDS = 60.0


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
) -> None:
    """Train among processes that each call this, and return when the run has ended.

    Args:
        members: say who is there.
        train: builds a `Trainer`, calls `fit()` and returns what that returns. The process group is there.
        run_folder: of the run, absolute, on a disk that all share; the one that `train` gives its `RunConfig`.
        num_ranks: at most, a power of two that divides V.
        look_seconds: between two looks for processes that have come. Each is a stop with a checkpoint.
        max_failures: how often others may be lost to this process.

    Raises:
        RunError: the numbers or the folder are none; or others were lost too often.
    """
    if num_ranks < 1 or num_ranks & (num_ranks - 1):
        msg = f"{num_ranks} ranks can't be shared by halves. Give a power of two: 1, 2, 4, ..., up to V."
        raise RunError(msg)
    if not run_folder.is_absolute():
        msg = f"{run_folder} isn't absolute, and others begin elsewhere. Give Path(...).absolute(), on a shared disk."
        raise RunError(msg)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    failures = 0
    while True:
        group = members.agree()
        most = 1 << (min(group.size, num_ranks).bit_length() - 1)
        if group.rank >= most:
            continue
        try:
            with _joined(group, most), _looking(look_seconds if group.rank == 0 else None) as looked:
                _fence_off_earlier(run_folder, members.name)
                result = train()
                if result.outcome != "stopped" or not _any(looked.is_set()):
                    return
        except Exception as error:
            if not is_of_others(error):
                raise
            failures += 1
            sys.stderr.write(f"Others were lost ({type(error).__name__}: {error}): agreeing anew with those left.\n")
            if failures > max_failures:
                msg = (
                    f"Others were lost {failures} times, and {max_failures} are allowed. See to them, and begin again."
                )
                raise RunError(msg) from error


@contextmanager
def _joined(group: RankGroup, size: int) -> Iterator[None]:
    limit = timedelta(seconds=_MEET_SECONDS)
    store = PrefixStore(str(group.number), TCPStore(group.host, group.port, timeout=limit))
    # A process group would wait for the half hour that its operations have, for one who has died since they agreed.
    store.set(f"rank {group.rank} is here", "")
    store.wait([f"rank {rank} is here" for rank in range(size)], limit)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=size)
    try:
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
    told = torch.tensor([float(flag)])
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told.item())


def _fence_off_earlier(run_folder: Path, name: str) -> None:
    """Make whoever has trained this job's run before stale: one that nobody reaches may train on."""
    if dist.get_rank() == 0:
        begun = run_folder / _BEGUN
        if begun.exists() and begun.read_text() == name:
            for path in (run_folder, run_folder / "ledger"):
                fence_off(path, wait_seconds=_LOCK_SECONDS)
        else:
            run_folder.mkdir(parents=True, exist_ok=True)
            begun.write_text(name)
    dist.barrier()
