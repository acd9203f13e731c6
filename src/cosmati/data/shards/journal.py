"""A writer's own record: a line a step, each with its checksum, which tells a line that a crash cut off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cosmati.errors import DataError
from cosmati.storage.lock import FileLock


class Journal:
    """A file that one process at a time reads and appends to.

    Args:
        path: of the file; made where it isn't there, with its directory.
        wait: for another process that has it open, instead of raising.

    Raises:
        BlockingIOError: somebody else has it open.
        DataError: it can't be written.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path, wait=wait)
            self._path = path
            # Unbuffered: of a line that couldn't be written nothing is left to be written later.
            self._file = path.open("a+b", buffering=0)
        except BlockingIOError:
            raise
        except OSError as error:
            msg = f"{path.parent} can't be written to: {error.strerror}. Name a directory that can."
            raise DataError(msg) from error

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield what was noted, oldest first, and at the end cut off what a crash left of a line."""
        self._file.seek(0)
        end = 0
        for line in self._file.readall().splitlines(keepends=True):
            entry = _parse(line)
            if entry is None:
                break
            end += len(line)
            yield entry
        self._file.truncate(end)

    def note(self, entry: Mapping[str, Any]) -> None:
        """Append an entry; after an error it can be noted again.

        Raises:
            DataError: it can't be written; nothing of it is.
        """
        text = json.dumps(entry, sort_keys=True).encode()
        line, end = _checksum(text).encode() + b" " + text + b"\n", self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            msg = f"{self._path} can't be written: {error.strerror}. What was noted before holds: make room, and go on."
            raise DataError(msg) from error

    def close(self) -> None:
        """Let others have it."""
        # What couldn't be written was told when it was noted.
        with contextlib.suppress(OSError):
            self._file.close()
        self._lock.release()

    def refuse_closed(self) -> None:
        """Refuse to go on after `close`.

        Raises:
            DataError: others may have it by now.
        """
        if self._file.closed:
            msg = f"What writes {self._path.parent} was closed. Open it again (append=True, where it was finished)."
            raise DataError(msg)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def first_entry(path: Path) -> dict[str, Any] | None:
    """Return the first entry of a journal that somebody else may have open; None if there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        return _parse(file.readline())


def noted_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal that somebody else may have open, oldest first; none if there is no file."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        entry = _parse(line)
        if entry is None:
            return
        yield entry


def _parse(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or _checksum(text).encode() != checksum:
        return None
    content: dict[str, Any] = json.loads(text)
    return content


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
