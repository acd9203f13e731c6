"""Appends to a ledger. The caller hands over; a thread writes, flushes and signs."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from cosmati.errors import LedgerError, words_of
from cosmati.ledger.details import committed_digest, details_digest, encode_details
from cosmati.ledger.entry import decode_entry, encode_entry
from cosmati.ledger.files import LedgerFiles, create_files, open_files
from cosmati.ledger.history import RunHistory
from cosmati.ledger.keys import SigningKey
from cosmati.ledger.note import TreeHead
from cosmati.records.ledger import NO_DETAILS, AmendEntry, Entry, KeyEntry, ResumeEntry, RunEntry

__all__ = ["LedgerWriter", "details_digest"]

T = TypeVar("T")
_Calls: TypeAlias = list[tuple[Callable[[], Any], Future[Any]]]
_MAX_WAITING = 4096
_MAX_SECONDS = threading.TIMEOUT_MAX / 2
"""For which a thread can wait: a longer time never comes."""


class LedgerWriter:
    """The one writer of a ledger; make it with `create` or `open`, and close it (it is a context manager).

    After an error of the disk every call raises it: nothing that `flush` had confirmed is lost, and `open`
    mends the rest.
    """

    def __init__(
        self,
        directory: Path,
        files: LedgerFiles,
        history: RunHistory,
        *,
        checkpoint_every: int,
        checkpoint_seconds: float,
    ) -> None:
        self._directory = directory
        self._files = files
        self._history = history
        self._every = checkpoint_every
        self._seconds = min(checkpoint_seconds, _MAX_SECONDS)
        self._first_unsigned = 0.0
        self._changed = threading.Condition()
        self._waiting: list[tuple[bytes, bytes | None]] = []
        self._calls: _Calls = []
        self._error: LedgerError | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cosmati-ledger", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls,
        directory: Path,
        *,
        origin: str,
        key: SigningKey,
        checkpoint_every: int = 64,
        checkpoint_seconds: float = 10.0,
    ) -> Self:
        """Start a ledger in a new or empty directory.

        Args:
            directory: where its files go.
            origin: unique name of the log, which is also the key's name.
            key: the operator's.
            checkpoint_every: unsigned entries after which a checkpoint is signed.
            checkpoint_seconds: seconds that an entry stays unsigned at most; infinity leaves it to the other two, the
                number of entries and whoever asks for a checkpoint.

        Raises:
            LedgerError: the directory isn't empty or can't be written, the key has another name, or the seconds aren't
                over 0.
        """
        _check_seconds(checkpoint_seconds)
        if origin != key.name:
            raise LedgerError(
                f"The key's name is {key.name!r} and the log's is {origin!r}. Load the key under the log's name."
            )
        files, history = _explained(directory, lambda: create_files(directory, key))
        return cls(
            directory,
            files,
            history,
            checkpoint_every=checkpoint_every,
            checkpoint_seconds=checkpoint_seconds,
        )

    @classmethod
    def open(
        cls, directory: Path, *, key: SigningKey, checkpoint_every: int = 64, checkpoint_seconds: float = 10.0
    ) -> Self:
        """Go on with a ledger: verify it, take flushed entries from the write-ahead log, sign them.

        Only bytes that a crash tore and that no checkpoint covers are cut.

        Raises:
            LedgerError: no ledger, another key's, or one that has a writer; or seconds that aren't over 0.
            TamperError: something doesn't verify.
        """
        _check_seconds(checkpoint_seconds)
        files, history = _explained(directory, lambda: open_files(directory, key))
        return cls(
            directory,
            files,
            history,
            checkpoint_every=checkpoint_every,
            checkpoint_seconds=checkpoint_seconds,
        )

    @property
    def size(self) -> int:
        """Number of entries appended, flushed or not."""
        with self._changed:
            return self._history.size

    @property
    def in_force(self) -> RunEntry | AmendEntry | None:
        """What the run commits to now: entry 0 or the latest amendment; None for an empty ledger."""
        with self._changed:
            return self._history.in_force

    def next_attempt(self) -> int:
        """Return the attempt number of a resume."""
        return self._history.attempt + 1

    def last_step(self) -> int | None:
        """Return the number of the last step that stands, None before the first."""
        return self._history.num_steps - 1 if self._history.num_steps else None

    def has_ended(self) -> bool:
        """Return whether the last entry is an end."""
        return self._history.has_ended

    def resume_entry(self, from_step: int) -> ResumeEntry:
        """Return the entry to append when the run goes on after `from_step` steps.

        Raises:
            LedgerError: the ledger holds fewer steps.
        """
        with self._changed:
            return self._history.resume_entry(from_step)

    def append(self, entry: Entry, details: Mapping[str, object] | None = None) -> None:
        """Hand an entry over; it is on disk after the next `flush`, or earlier.

        Args:
            entry: must fit what stands before it.
            details: what `entry.details_digest` commits to; none for `NO_DETAILS` and for kinds without
                details.

        Raises:
            LedgerError: the entry doesn't fit, the details aren't those that it commits to, or the disk
            failed.
        """
        if isinstance(entry, KeyEntry):
            raise LedgerError("A change of keys is no entry of a run's own. Close the ledger, and call `rotate_key`.")
        line = None if details is None else encode_details(details)
        expected = NO_DETAILS if line is None else hashlib.sha256(line).digest()
        if expected != committed_digest(entry):
            raise LedgerError(
                f"This {type(entry).__name__} commits to other details than were given with it. "
                "Set details_digest=details_digest(details), or NO_DETAILS where there are none."
            )
        data = encode_entry(entry)
        with self._changed:
            while len(self._waiting) >= _MAX_WAITING and self._error is None:
                self._changed.wait()
            self._check()
            self._history.append(entry)
            self._waiting.append((data, line))
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when all that was appended so far is on disk.

        Raises:
            LedgerError: the disk failed.
        """
        self._call(lambda: None)

    def checkpoint(self) -> TreeHead:
        """Flush, write the tiles, sign and publish the tree head, and return it.

        Raises:
            LedgerError: the disk failed, or another writer has taken this one's place.
        """
        return self._call(self._files.checkpoint)

    def entries(self, start: int, end: int) -> list[Entry]:
        """Return the entries `start` to `end`, unsigned ones included; flushes.

        Raises:
            LedgerError: not 0 <= start <= end <= size.
        """
        if not 0 <= start <= end <= self.size:
            raise LedgerError(f"The ledger has {self.size} entries, so not {start} to {end}. Ask within them.")
        return [decode_entry(data) for data in self._call(lambda: self._files.entries(start, end))]

    def close(self) -> None:
        """Sign what is unsigned, stop the thread, give the lock back; a second call does nothing.

        Raises:
            LedgerError: the disk failed; the ledger is closed all the same.
        """
        if self._is_closed:
            return
        try:
            self.checkpoint()
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self._thread.join()
            self._files.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error
        if self._is_closed:
            raise LedgerError(f"The ledger {self._directory} was closed. Open it again to append.")

    def _call(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        with self._changed:
            self._check()
            self._calls.append((function, future))
            self._changed.notify_all()
        return future.result()

    def _run(self) -> None:
        calls: _Calls = []
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._has_work, self._seconds_to_checkpoint())
                    if self._is_closed and not (self._waiting or self._calls):
                        return
                    batch, self._waiting = self._waiting, []
                    calls, self._calls = self._calls, []
                    self._changed.notify_all()
                self._work(batch, calls)
        except BaseException as error:  # noqa: BLE001  every failure must reach the caller's thread
            self._fail(error, calls)

    def _has_work(self) -> bool:
        return bool(self._waiting or self._calls or self._is_closed)

    def _seconds_to_checkpoint(self) -> float | None:
        if not self._files.num_unsigned:
            return None
        return max(0.0, self._first_unsigned + self._seconds - time.monotonic())

    def _is_overdue(self) -> bool:
        seconds = self._seconds_to_checkpoint()
        return seconds is not None and seconds <= 0

    def _work(self, batch: list[tuple[bytes, bytes | None]], calls: _Calls) -> None:
        if batch:
            if not self._files.num_unsigned:
                self._first_unsigned = time.monotonic()
            self._files.append(batch)
        for function, future in calls:
            future.set_result(function())
        if self._files.num_unsigned >= self._every or self._is_overdue():
            self._files.checkpoint()

    def _fail(self, error: BaseException, calls: _Calls) -> None:
        with self._changed:
            self._error = _explain(self._directory, error)
            for _, future in (*calls, *self._calls):
                if not future.done():
                    future.set_exception(self._error)
            self._changed.notify_all()


def _check_seconds(seconds: float) -> None:
    if not seconds > 0:  # nor is NaN
        raise LedgerError(
            f"checkpoint_seconds={seconds} is no time that an entry can stay unsigned. Give a number over 0, or "
            "math.inf to sign by the number of entries alone."
        )


def _explain(directory: Path, error: BaseException) -> LedgerError:
    if isinstance(error, LedgerError):
        return error
    told = words_of(error) or type(error).__name__
    explained = LedgerError(
        f"The ledger {directory} can't be written: {told}. What was flushed before is safe. Mend the disk (space, "
        "quota, permissions), then open the ledger again and resume the run."
    )
    explained.__cause__ = error
    return explained


def _explained(directory: Path, function: Callable[[], T]) -> T:
    try:
        return function()
    except OSError as error:
        raise _explain(directory, error) from error
