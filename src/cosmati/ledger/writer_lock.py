"""The lock that keeps a ledger to one writer."""

from __future__ import annotations

from pathlib import Path

from cosmati.errors import LedgerError
from cosmati.storage.fence import LOCK, Fence


class WriterLock:
    """A ledger's fence: the kernel's lock, and an epoch that every new holder changes.

    Raises:
        LedgerError: another process, or another writer of this one, holds it.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._fence = Fence(directory)
        except BlockingIOError as error:
            raise LedgerError(
                f"The ledger {directory} has a writer already: {directory / LOCK} is locked. Wait until that "
                "run ends, or stop it; don't delete the lock."
            ) from error

    def check(self) -> None:
        """Refuse to go on for a writer whose place another one has taken.

        Raises:
            LedgerError: the epoch isn't this writer's.
        """
        if not self._fence.holds():
            raise LedgerError(
                f"This writer is stale: {self._fence.epoch_path} says that another one has opened the ledger "
                "since. Stop this "
                "run; what it flushed before stands."
            )

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        self._fence.release()
