"""Leases on names: while a process holds one, no other does away with what the name stands for."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path


class Leases:
    """This process's leases on names: record locks on bytes of one file, so one descriptor, however many names.

    The kernel ends a record lock with its process, and a forked child holds none. It ends all of them as well when the
    process closes any descriptor of the file, so there is one object a file and process: ask `leases_in`.

    Args:
        path: of the file, which stays empty. Where it can neither be made nor opened for want of permission, leases
            aren't seen by others.
    """

    def __init__(self, path: Path) -> None:
        # Reentrant, because a lease may be collected, and so given back, at any point.
        self._lock = threading.RLock()
        self._held: Counter[int] = Counter()
        self._pid = os.getpid()
        self._descriptor = -1
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
            try:
                self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
                break
            except OSError as error:
                if not isinstance(error, PermissionError | FileNotFoundError) and error.errno != errno.EROFS:
                    raise

    def take(self, name: str) -> Lease:
        """Take a lease on a name; waits for whoever is about to do away with it."""
        place = _place(name)
        with self._lock:
            self._held[place] += 1
            if self._held[place] == 1 and self._descriptor >= 0:
                try:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_SH, 1, place)
                except BaseException:
                    self._held[place] -= 1
                    raise
        return Lease(self, place)

    def give_back(self, place: int) -> None:
        """End one lease."""
        if os.getpid() != self._pid:
            return  # the parent's; and its lock may have been held by a thread that isn't here
        with self._lock:
            self._held[place] -= 1
            if not self._held[place]:
                del self._held[place]
                if self._descriptor >= 0:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, place)

    def unless_leased(self, name: str, act: Callable[[], None]) -> bool:
        """Act while nobody has a lease on a name, here or elsewhere, and nobody can take one; return whether."""
        place = _place(name)
        with self._lock:
            if self._held.get(place) or self._descriptor < 0:
                return False
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except OSError:
                return False
            try:
                act()
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, place)
            return True

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Lease:
    """One lease, until it's given back or forgotten."""

    def __init__(self, leases: Leases, place: int) -> None:
        self._leases: Leases | None = leases
        self._place = place

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.give_back(self._place)

    def __del__(self) -> None:
        """Give it back."""
        self.release()


_of_files: dict[Path, Leases] = {}
_registry = [threading.Lock()]


def leases_in(path: Path) -> Leases:
    """Return this process's leases of a file.

    Raises:
        OSError: it can't be opened, for another reason than want of permission.
    """
    key = path.absolute()
    with _registry[0]:
        if key not in _of_files:
            _of_files[key] = Leases(path)
        return _of_files[key]


def _place(name: str) -> int:
    """Return the byte that stands for a name; two names that share one are merely leased together."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def _begin_anew_in_child() -> None:
    _registry[0] = threading.Lock()
    for leases in _of_files.values():
        leases.close()  # a child's close ends no lock of its parent's
    _of_files.clear()


os.register_at_fork(after_in_child=_begin_anew_in_child)
