"""The lock that keeps a ledger to one writer."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from cosmati.errors import LedgerError
from cosmati.storage.atomic import replace_file
from cosmati.storage.lock import FileLock


class WriterLock:
    """The kernel's lock on `<ledger>/lock`, and an epoch that every new holder changes.

    The kernel drops the lock when its holder dies. The epoch stops a holder that lost it without noticing, as
    when the file was deleted or a network file system forgot it.

    Raises:
        LedgerError: another process, or another writer of this one, holds it.
    """

    def __init__(self, directory: Path) -> None:
        self._epoch_path = directory / "epoch"
        try:
            self._lock = FileLock(directory / "lock")
        except BlockingIOError as error:
            raise LedgerError(
                f"The ledger {directory} has a writer already: {directory / 'lock'} is locked. Wait until that "
                "run ends, or stop it; don't delete the lock."
            ) from error
        try:
            self._token = f"{self._last_epoch() + 1} {secrets.token_hex(8)}\n"
            replace_file(self._epoch_path, self._token.encode())
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
        self._lock.release()
