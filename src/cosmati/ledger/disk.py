"""Writes that survive a crash, and the lock that keeps a ledger to one writer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

from cosmati.errors import LedgerError

TEMPORARY = ".tmp"


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the bytes at the file's position."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_data(descriptor: int) -> None:
    """Wait until a file's bytes are on disk, and of its facts those that reading needs."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # not every Unix has fdatasync


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Put a whole file in place: temporary file, fsync, rename. The directory is yours to sync."""
    temporary = path.with_name(path.name + TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


class WriterLock:
    """The kernel's lock on `<ledger>/lock`, and an epoch that every new holder changes.

    The kernel drops the lock when its holder dies. The epoch stops a holder that lost it without noticing, as
    when the file was deleted or a network file system forgot it.

    Raises:
        LedgerError: another process, or another writer of this one, holds it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._epoch_path = directory / "epoch"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerError(
                f"The ledger {directory} has a writer already: {self._path} is locked. Wait until that "
                "run ends, or "
                "stop it; don't delete the lock."
            ) from error
        try:
            self._token = f"{self._last_epoch() + 1} {secrets.token_hex(8)}\n"
            replace_file(self._epoch_path, self._token.encode())
            sync_directory(directory)
        except OSError:
            self.release()
            raise

    def _last_epoch(self) -> int:
        text = self._epoch_path.read_text("utf-8", "replace") if self._epoch_path.exists() else "0"
        number = text.partition(" ")[0]
        return int(number) if number.isascii() and number.isdigit() else 0

    def check(self) -> None:
        """Refuse to go on for a writer whose place another one has taken.

        Raises:
            LedgerError: the epoch isn't this writer's.
        """
        token = ""
        with contextlib.suppress(FileNotFoundError):
            token = self._epoch_path.read_text("utf-8", "replace")
        if token != self._token:
            raise LedgerError(
                f"This writer is stale: {self._epoch_path} says that another one has opened the ledger "
                "since. Stop this "
                "run; what it flushed before stands."
            )

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
