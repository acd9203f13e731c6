"""One group of a job's processes trains in a run's folder: it shows that it's alive, and others can't take its place.

```text
members.begun   the job's name
members.alive   locked by the first rank of those who train, and changed every second
```
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.errors import RunError
from cosmati.storage.fence import LOCK, fence_off
from cosmati.storage.lock import FileLock, is_locked

_BEGUN, _ALIVE = "members.begun", "members.alive"
_LOCK_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_WATCH_SECONDS = 5.0
"""Some beats: who trains may hold Python's lock for a second or two."""


class _Found(IntEnum):
    NOBODY = 0
    OTHERS = 1
    STRANGERS = 2


@contextmanager
def claimed(run_folder: Path, name: str) -> Iterator[bool]:
    """Take a run's folder for this process group, and show that it's alive; each rank calls it.

    Whoever of this job has trained before, and shows nothing of it, is stale from now on: one that nobody reaches may
    train on. In what is given, each rank is told whether the folder is theirs, or others of this job train there.

    Args:
        run_folder: of the run, on a disk that all share.
        name: of the job.

    Raises:
        RunError: somebody trains there who isn't of this job.
    """
    with ExitStack() as stack:
        found = torch.zeros(1, dtype=torch.int64, device="cpu")
        if dist.get_rank() == 0:
            found.fill_(_claim(run_folder, name, stack))
        dist.broadcast(found, 0)  # no rank begins before the first one knows
        if found.item() == _Found.STRANGERS:
            msg = (
                f"Another process is training in {run_folder}, which isn't this job's ({name}), and would lose its "
                f"run. Wait for its end, stop it, or give this job a run folder of its own."
            )
            raise RunError(msg)
        yield found.item() == _Found.NOBODY


def say_that_others_train(run_folder: Path) -> None:
    """Tell why this process does nothing."""
    sys.stderr.write(f"Others of this job train in {run_folder}: waiting until they look for those who have come.\n")


def _claim(run_folder: Path, name: str, stack: ExitStack) -> _Found:
    """Return who trains in a folder; where that's nobody, this process has it until the stack's end."""
    begun, alive = run_folder / _BEGUN, run_folder / _ALIVE
    is_own = begun.exists() and begun.read_text() == name
    if not is_own and _stays_locked(run_folder / LOCK):
        return _Found.STRANGERS
    run_folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(alive)
    if lock is None:
        if not is_own:
            return _Found.STRANGERS
        if _changes(alive):
            return _Found.OTHERS
    elif _stays_locked(run_folder / LOCK):  # by one that isn't a member, as those lock both
        lock.release()
        return _Found.STRANGERS
    if is_own:
        for path in (run_folder, run_folder / "ledger"):
            fence_off(path, wait_seconds=_LOCK_SECONDS)
    else:
        begun.write_text(name)
    if lock is None:
        alive.unlink(missing_ok=True)  # frozen, or on a machine that nobody reaches
        lock = _lock(alive)
        if lock is None:
            return _Found.OTHERS
    stack.callback(lock.release)
    is_over = threading.Event()
    stack.callback(is_over.set)
    threading.Thread(target=_beat, args=(lock, is_over), daemon=True, name="cosmati-alive").start()
    return _Found.NOBODY


def _lock(path: Path) -> FileLock | None:
    with suppress(BlockingIOError):
        return FileLock(path)
    return None


def _stays_locked(path: Path) -> bool:
    """Return whether a lock isn't about to be let go, as by a process that is ending."""
    until = time.monotonic() + _LOCK_SECONDS
    while is_locked(path):
        if time.monotonic() > until:
            return True
        time.sleep(0.02)
    return False


def _changes(path: Path) -> bool:
    """Return whether whoever has locked a file shows that it's alive, if only by leaving, to agree with those here."""
    until, before = time.monotonic() + _WATCH_SECONDS, _read(path)
    while time.monotonic() < until:
        time.sleep(0.1)
        if _read(path) != before or not is_locked(path):
            return True
    return False


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _beat(lock: FileLock, is_over: threading.Event) -> None:
    number = 0
    while not is_over.wait(_BEAT_SECONDS):
        with suppress(OSError):  # a full disk is told by who trains
            if lock.is_in_place():  # else it's another's
                number += 1
                lock.path.write_text(str(number))
