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
        """Return the records, and cut off a line that wasn't finished.

        Raises:
            RunError: a finished line is damaged.
        """
        if not self._path.exists():
            return []
        # A torn line may end inside a character.
        whole, newline, torn = self._path.read_bytes().rpartition(b"\n")
        if torn:
            replace_file(self._path, whole + newline)
        lines = whole.decode().split("\n") if whole else []  # a JSON text may hold other ends of lines
        return [decode_record(self._kind, line, version=LINE_VERSION, upgrade=self._upgrade) for line in lines]

    def append(self, record: T) -> None:
        """Add a record."""
        is_new = not self._path.exists()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            write_all(descriptor, (json.dumps(json.loads(encode_record(record))) + "\n").encode())
        finally:
            os.close(descriptor)
        if is_new:
            sync(self._path.parent)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Keep other processes out of a study's folder.

    Raises:
        RunError: one is in it.
    """
    try:
        lock = FileLock(folder / "lock")
    except BlockingIOError as error:
        msg = f"Another process runs a study or a search in {folder}. Wait for its end, or take another folder."
        raise RunError(msg) from error
    with lock:
        yield
