"""What a cache remembers of a remote: its indices, and what the shards were that came without a hash.

Everything stands there with its own digest, so that damage is noticed and taken for nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmati.data.shards.remote import disk_error
from cosmati.storage.atomic import draft_of, publish
from cosmati.storage.lock import FileLock

_SUFFIX = ".kept"


class KeptFiles:
    """Copies of small files, for the time when the remote can't be reached.

    Args:
        directory: where they lie.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, name: str, data: bytes) -> None:
        """Keep a file, in place of what was kept by its name. A cache that can only be read keeps nothing.

        Raises:
            EnvironmentFaultError: there is no room for it.
        """
        path = self.directory / f"{name}.{hashlib.sha256(data).hexdigest()}{_SUFFIX}"
        try:
            if self.read(name) != data:
                self.directory.mkdir(parents=True, exist_ok=True)
                with FileLock(self.directory / ".keeping", wait=True):
                    draft_of(path).write_bytes(data)
                    publish(draft_of(path), path)
            for other in self._all(name):
                if other != path:
                    other.unlink(missing_ok=True)
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
                raise disk_error(error, f"{name} in {self.directory}") from error

    def read(self, name: str) -> bytes | None:
        """Return what was kept last; None if nothing was, or it's damaged."""
        for path in self._all(name):
            with contextlib.suppress(FileNotFoundError):
                data = path.read_bytes()
                if path.name.split(".")[-2] == hashlib.sha256(data).hexdigest():
                    return data
        return None

    def _all(self, name: str) -> list[Path]:
        found = []
        for path in self.directory.glob(f"{name}.*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found, reverse=True)]


@dataclass(frozen=True)
class Note:
    """What a shard without a hash was when it was fetched.

    Args:
        sha256: of the file that is read, in hex.
        num_bytes: its length.
        marker: the remote's: ETag or time, and length.
    """

    sha256: str
    num_bytes: int
    marker: str


class Notes:
    """Notes on shards by their names in the cache, in one file that only grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._notes: dict[str, Note] = {}

    def get(self, name: str) -> Note | None:
        """Return the latest note on a shard, whoever took it."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size > self._read_bytes:
                self._catch_up()
        return self._notes.get(name)

    def _catch_up(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            digest, _, text = line.partition(b" ")
            if hashlib.sha256(text).hexdigest().encode() == digest:
                name, facts = json.loads(text)
                self._notes[name] = Note(**facts)

    def take(self, name: str, note: Note) -> None:
        """Write a note down, before its shard gets its name."""
        text = json.dumps([name, asdict(note)]).encode()
        line = hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n"
        with FileLock(self._path.with_name(".noting"), wait=True), self._path.open("ab") as file:
            file.write(line if not file.tell() or _ends_a_line(self._path) else b"\n" + line)
        self._notes[name] = note


def _ends_a_line(path: Path) -> bool:
    """Whether the last writer came to its end."""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
