"""The kernel's lock on a file, which goes when its holder dies."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

_known: weakref.WeakSet[FileLock] = weakref.WeakSet()
_opening = threading.RLock()
"""Held where a descriptor comes or goes, and while a process is forked: a child knows each copy that it has."""


class FileLock:
    """An exclusive lock (flock) on the file that a path names; made where it isn't there. A context manager.

    It is this process's alone: a child that is forked off (a loader's worker) doesn't hold it, so that one which
    outlives its killed parent keeps nobody out.

    Args:
        path: of the file. It may be renamed or removed while it's locked: who waited then locks the path's new file.
        wait: for another holder, in this process too, instead of raising.

    Raises:
        BlockingIOError: somebody else holds it. OSError: it can't be opened.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self.path = path
        self._descriptor, self.is_held = -1, False
        operation = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
        while True:
            with _opening:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                _known.add(self)
            try:
                fcntl.flock(self._descriptor, operation)
                if self.is_in_place():
                    self.is_held = True
                    return
            except BaseException:
                self.release()
                raise
            self.release()

    def is_in_place(self) -> bool:
        """Return whether the path still names the locked file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let others have it; a second call does nothing."""
        self.forget(unlock=True)

    def forget(self, *, unlock: bool = False) -> None:
        """Close the descriptor; the lock stays with whoever has a copy, unless it's unlocked."""
        with _opening:
            descriptor, self._descriptor, self.is_held = self._descriptor, -1, False
            if descriptor >= 0:
                if unlock:
                    # A child that was forked off just now may not have come to closing its copy.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied: the copy's end would close the descriptor, and let others have the lock."""
        msg = f"The lock on {self.path} can't be copied or pickled: it's of one process, once."
        raise TypeError(msg)

    def __del__(self) -> None:
        """Whoever has forgotten it (a notebook's cell that is run again) holds nothing."""
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""
        self.release()


def _let_go_in_child() -> None:
    """Close a forked child's copies of the descriptors: the lock is its parent's, as long as that lives.

    Also of those that a thread of the parent only waits for: it gets them together with its copies.
    """
    _opening.release()
    for lock in list(_known):
        lock.forget()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go_in_child)


def is_held_here(path: Path) -> bool:
    """Say whether this very process holds the lock on a file."""
    return any(lock.is_held and lock.path.absolute() == path.absolute() for lock in list(_known))


def is_locked(path: Path) -> bool:
    """Say whether a process holds the lock on a file, without taking it or making the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe may have that name
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
