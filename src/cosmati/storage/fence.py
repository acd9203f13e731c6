"""One writer of a folder: the kernel's lock, and an epoch that fences off who doesn't know that he's stale."""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

from cosmati.storage.atomic import replace_file
from cosmati.storage.lock import FileLock, is_locked

LOCK, EPOCH = "lock", "epoch"


class Fence:
    """The kernel's lock on `lock` in a folder, and a token in `epoch` that every new holder changes.

    The kernel drops the lock when its holder dies. The token stops a holder that has lost it without noticing: the file
    was deleted, a network file system forgot it, or `fence_off` has given the place to somebody else. It's looked at
    before each write; a holder that is stopped between the look and the write isn't seen.

    Args:
        folder: that has one writer.
        lock: on its file `lock`, where somebody has taken it already.

    Raises:
        BlockingIOError: another process, or another writer of this one, holds it. OSError: it can't be written.
    """

    def __init__(self, folder: Path, lock: FileLock | None = None) -> None:
        self.epoch_path = folder / EPOCH
        self._lock = lock or FileLock(folder / LOCK)
        try:
            self._token = _advance(self.epoch_path)
        except OSError:
            self.release()
            raise

    @property
    def number(self) -> int:
        """How many have had the place, this one included."""
        return int(self._token.partition(" ")[0])

    def holds(self) -> bool:
        """Return whether nobody has taken this writer's place."""
        return _read(self.epoch_path) == self._token

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        self._lock.release()


def fence_off(folder: Path, wait_seconds: float = 0.0) -> None:
    """Make a folder's writer stale, if it has one, and make room for the next: from now on it can commit nothing.

    Args:
        folder: that has one writer.
        wait_seconds: for it to let the lock go by itself. What is still locked then, as by a machine that nobody
            reaches, is removed, which gives the next writer a lock of its own.

    Raises:
        OSError: the folder can't be written.
    """
    if not folder.is_dir():
        return
    _advance(folder / EPOCH)
    until = time.monotonic() + wait_seconds
    while is_locked(folder / LOCK) and time.monotonic() < until:
        time.sleep(0.02)
    if is_locked(folder / LOCK):
        (folder / LOCK).unlink(missing_ok=True)


def _advance(path: Path) -> str:
    number = _read(path).partition(" ")[0]
    last = int(number) if number.isascii() and number.isdigit() else 0
    token = f"{last + 1} {secrets.token_hex(8)}\n"
    replace_file(path, token.encode())
    return token


def _read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text("utf-8", "replace")
    return ""
