"""A file of finished pieces of work, a line each, that a killed process leaves whole but for the last line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from cosmati.errors import RunError
from cosmati.records.encoding import decode_record, encode_record
from cosmati.storage.atomic import replace_file, sync, write_all
from cosmati.storage.lock import FileLock

LINE_VERSION = 1
T = TypeVar("T")


class LineFile(Generic[T]):
    """Records of one kind, a line each. A line is on disk before `append` returns.

    Args:
        path: of the file, which may not be there yet.
        kind: a frozen dataclass with a field `version`.
        upgrade: gives an older line the fields that it couldn't have.
    """

    def __init__(
        self, path: Path, kind: type[T], *, upgrade: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> None:
        self._path, self._kind, self._upgrade = path, kind, upgrade

    def read(self) -> list[T]:
        """Return the records, and cut off a last line that wasn't finished.

        Raises:
            RunError: a finished line is damaged, or the file can't be read.
        """
        with readable(self._path):
            # A torn line may end inside a character.
            whole, newline, torn = self._path.read_bytes().rpartition(b"\n") if self._path.exists() else (b"",) * 3
        if torn:
            with writable(self._path):
                replace_file(self._path, whole + newline)
        # A JSON text may hold other ends of lines.
        return [self._record(line, number) for number, line in enumerate(whole.split(b"\n"), 1)] if newline else []

    def _record(self, line: bytes, number: int) -> T:
        try:
            return decode_record(self._kind, line.decode(), version=LINE_VERSION, upgrade=self._upgrade)
        except (RunError, UnicodeDecodeError) as error:
            reason = str(error).rstrip(".")
            msg = (
                f"Line {number} of {self._path} is damaged: {reason}. Or take the line out: what it holds is then done "
                "once more."
            )
            raise RunError(msg) from error

    def append(self, record: T) -> None:
        """Add a record.

        Raises:
            RunError: it can't be written, as where the disk is full. What was written before stays.
        """
        line = (json.dumps(json.loads(encode_record(record))) + "\n").encode()
        is_new = not self._path.exists()
        with writable(self._path):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                try:
                    write_all(descriptor, line)
                except OSError:
                    os.ftruncate(descriptor, size)  # half a line is no line
                    raise
            finally:
                os.close(descriptor)
            if is_new:
                sync(self._path.parent)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Name the file where it can't be read.

    Raises:
        RunError: it can't, or isn't UTF-8.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        msg = f"{path} can't be read: {reason}. Make it readable, or restore it from a copy."
        raise RunError(msg) from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Name the file where it can't be written.

    Raises:
        RunError: it can't.
    """
    try:
        yield
    except OSError as error:
        msg = (
            f"{path} can't be written: {error.strerror or error}. What is finished stays. Make room on the disk, or "
            "the file writable, and begin again: it goes on from there."
        )
        raise RunError(msg) from error


def made_folder(folder: str | Path) -> Path:
    """Return a folder of finished work, made if it isn't there.

    Raises:
        RunError: something else has its name, or it can't be made.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        is_other = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "it, or a part of its path, is a file" if is_other else error.strerror or error
        msg = f"{path} can't be the folder of finished runs: {reason}. Name a folder that can be made or written."
        raise RunError(msg) from error
    return path


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Keep other processes out of a study's folder.

    Raises:
        RunError: one is in it, or its lock can't be written.
    """
    try:
        with writable(folder / "lock"):
            lock = FileLock(folder / "lock")
    except RunError as error:
        if not isinstance(error.__cause__, BlockingIOError):
            raise
        msg = f"Another process runs a study or a search in {folder}. Wait for its end, or take another folder."
        raise RunError(msg) from error
    with lock:
        yield
