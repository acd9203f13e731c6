"""What a worker process of a DataLoader does first, and how it's told to end."""

from __future__ import annotations

import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

_LOOK_SECONDS = 1.0

T = TypeVar("T")


def ending_in_cycles(batches: T) -> T:
    """Have the workers of a DataLoader's iterator end at once where it's part of a cycle that is collected.

    A collection ends the queues, which have weak references, before it ends the iterator. Its workers would never hear
    that they're to end, and be waited for 5 seconds each; an error that a worker raised makes such a cycle by itself.

    Args:
        batches: the iterator; returned as it is.
    """
    # What is referred to from outside of the cycle isn't collected with it.
    weakref.finalize(batches, _let_go, getattr(batches, "_index_queues", None)).atexit = False
    return batches


def _let_go(_queues: object) -> None:
    """Hold them no longer."""


class WorkerStart:
    """A `worker_init_fn` with which a worker ends when its parent does, however early that is.

    PyTorch's own worker asks whether its parent is still the one that it began with: one whose parent was killed before
    it had begun would wait for ever, and hold the job's pipes open.

    Args:
        then: the `worker_init_fn` that somebody wants besides; it gets the worker's number.
    """

    def __init__(self, then: Callable[[int], object] | None = None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        """Begin; DataLoader calls it in the worker."""
        threading.Thread(target=_end_with_parent, daemon=True, name="cosmati-parent").start()
        if self._then is not None:
            self._then(worker)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has one"
    assert parent.pid is not None, "it was running"
    is_above = os.getppid() == parent.pid  # a fork server's worker has the server above it
    # The pipe that says so stays open as long as any process lives that the parent forked after this one.
    while parent.is_alive() and _is_there(parent.pid) and (not is_above or os.getppid() == parent.pid):
        parent.join(_LOOK_SECONDS)
    os._exit(1)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True
