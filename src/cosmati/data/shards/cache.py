"""Shards kept on disk: fetched, verified, decompressed, and only then given their names.

    open -> verified in this process? -> on disk and whole? -> fetch, verify, decompress, verify, rename

A file that is being made is `KEY.part`, and whoever makes it holds the kernel's lock on it: a process that dies lets go
of both, and the next one starts over. A damaged file goes to `quarantine/` and is fetched again. Jobs may share one
cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cosmati.data.shards.compression import decompress
from cosmati.data.shards.index import FileInfo
from cosmati.data.shards.remote import Remote, disk_error
from cosmati.errors import DataError
from cosmati.storage.atomic import publish
from cosmati.storage.lock import FileLock

_KNOWN_HASHES = ("sha256", "sha512", "sha384", "sha224", "blake2b", "blake2s", "sha3_256", "sha1", "md5")
_XXHASHES = ("xxh3_128", "xxh128", "xxh3_64", "xxh64", "xxh32")


class DamagedRemoteError(DataError):
    """A remote file that isn't what the index says."""


@dataclass(frozen=True)
class ShardFiles:
    """The files of one shard.

    Args:
        raw: the file that is read.
        zip: the file that is fetched, where shards are compressed.
        compression: of it.
    """

    raw: FileInfo
    zip: FileInfo | None = None
    compression: str | None = None


class ShardCache:
    """Shards on disk.

    Args:
        directory: of the cache; without a remote, of the shards themselves.
        remote: where they come from.
        max_bytes: above it, the shards that were opened longest ago go; None keeps all. Without a remote, nothing ever
            goes.
    """

    def __init__(self, directory: Path, remote: Remote | None, *, max_bytes: int | None = None) -> None:
        self.directory = directory
        self._remote = remote
        self._max_bytes = max_bytes
        self._verified: set[str] = set()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        if remote is not None:
            _sweep(directory)

    def open(self, files: ShardFiles) -> Path:
        """Return the verified file of a shard, fetched if it has to be.

        Raises:
            DamagedRemoteError: the remote isn't what the index says.
            DataError: it can't be fetched or kept.
        """
        path = self._path(files)
        name = path.name if self._remote else files.raw.basename
        with self._lock:
            mine = self._locks.setdefault(name, threading.Lock())
        with mine:
            if name in self._verified and path.exists():
                self._touch(path)
                return path
            try:
                self._make(path, files)
            except OSError as error:
                raise disk_error(error, f"Shard {files.raw.basename} in {self.directory}") from error
            self._verified.add(name)
            return path

    def _path(self, files: ShardFiles) -> Path:
        if self._remote is None:
            return self.directory / files.raw.basename
        digests = [f"{name}-{files.raw.hashes[name]}" for name in _KNOWN_HASHES if name in files.raw.hashes]
        # Without a hash, the place stands for the content.
        place = f"{self._remote.url}\0{files.raw.basename}\0{files.raw.num_bytes}"
        key = digests[0] if digests else f"place-{hashlib.sha256(place.encode()).hexdigest()}"
        return self.directory / f"{key}.shard"

    def _make(self, path: Path, files: ShardFiles) -> None:
        if self._remote is None and path.exists():
            problem = _problem(path, files.raw)
            if problem:
                msg = f"Shard {path} {problem}: it's damaged, and there is no remote to fetch it from. Write it again."
                raise DataError(msg)
            return
        with contextlib.suppress(FileNotFoundError):
            # Names are given to whole files only, so this needs no lock, nor a directory that can be written to.
            if _problem(path, files.raw) is None:
                self._touch(path)
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        with FileLock(part, wait=True) as lock, _filled(lock) as file:
            if path.exists() and self._is_whole(path, files.raw):
                part.unlink()
                self._touch(path)
                return
            self._fill(file, part, files)
            publish(part, path)
        self._evict(path)

    def _is_whole(self, path: Path, raw: FileInfo) -> bool:
        problem = _problem(path, raw)
        if problem is None:
            return True
        quarantine = self.directory / "quarantine"
        quarantine.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.replace(quarantine / path.name)
        warnings.warn(f"The cached shard {path.name} {problem}; it's in {quarantine}, and fetched again.", stacklevel=2)
        return False

    def _fill(self, file: IO[bytes], part: Path, files: ShardFiles) -> None:
        """Put the verified shard into an open file."""
        source = files.zip or files.raw
        remote = self._remote or Remote(str(self.directory))
        remote.fetch(source.basename, file, num_bytes=source.num_bytes)
        file.flush()
        self._refuse_damage(part, source, remote)
        if files.zip is None:
            return
        assert files.compression is not None, "the index has both or neither"
        content = decompress(files.compression, part.read_bytes(), max_bytes=files.raw.num_bytes)
        file.seek(0)
        file.truncate()
        file.write(content)
        file.flush()
        self._refuse_damage(part, files.raw, remote)

    @staticmethod
    def _refuse_damage(path: Path, file: FileInfo, remote: Remote) -> None:
        problem = _problem(path, file)
        if problem:
            msg = (
                f"{remote.url}/{file.basename} {problem}: it was changed or damaged where it lies, so that fetching it "
                "again won't help. Restore it, or write the data set again."
            )
            raise DamagedRemoteError(msg)

    @staticmethod
    def _touch(path: Path) -> None:
        # A cache that can only be read still serves.
        with contextlib.suppress(OSError):
            os.utime(path)

    def _evict(self, keep: Path) -> None:
        if self._max_bytes is None or self._remote is None:
            return
        found: list[tuple[float, int, Path]] = []
        for path in self.directory.glob("*.shard"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                break
            if path != keep:
                # Who has it mapped keeps it until they let go.
                path.unlink(missing_ok=True)
                total -= size


@contextmanager
def _filled(lock: FileLock) -> Iterator[IO[bytes]]:
    """Open a locked file to fill it; it's gone after an error."""
    with lock.path.open("r+b") as file:
        try:
            yield file
        except BaseException:
            if lock.is_in_place():
                lock.path.unlink()
            raise


def _sweep(directory: Path) -> None:
    """Remove what dead processes left half made."""
    for part in directory.glob("*.part"):
        with contextlib.suppress(OSError), FileLock(part):
            part.unlink()


def _problem(path: Path, file: FileInfo) -> str | None:
    """Return what is wrong with a file, None if it's what it should be."""
    size = path.stat().st_size
    if size != file.num_bytes:
        return f"has {size} bytes where {file.num_bytes} were due"
    found = _strongest(file.hashes)
    if found is None:
        if not file.hashes:
            return None
        msg = f"{path}: none of the hashes {', '.join(sorted(file.hashes))} can be computed. Install xxhash."
        raise DataError(msg)
    name, digest = found
    with path.open("rb") as stream:
        computed = hashlib.file_digest(stream, lambda: _hasher(name)).hexdigest()
    return None if computed == digest else f"has {name} {computed[:16]} where {digest[:16]} was due"


def _strongest(hashes: Mapping[str, str]) -> tuple[str, str] | None:
    names = [name for name in (*_KNOWN_HASHES, *_XXHASHES) if name in hashes and _can_compute(name)]
    return (names[0], hashes[names[0]]) if names else None


def hash_of(name: str, data: bytes) -> str:
    """Return a hash by its name in the index, in hex.

    Raises:
        DataError: there is no such hash, or its package isn't installed.
    """
    if name not in (*_KNOWN_HASHES, *_XXHASHES) or not _can_compute(name):
        raise DataError(
            f"The hash {name!r} can't be computed. There are {', '.join(_KNOWN_HASHES)}; xxhash brings more."
        )
    hasher = _hasher(name)
    hasher.update(data)
    return str(hasher.hexdigest())


def _can_compute(name: str) -> bool:
    if name not in _XXHASHES:
        return True
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return False
    return True


def _hasher(name: str) -> Any:  # noqa: ANN401  (hashlib's and xxhash's objects share no type)
    if name not in _XXHASHES:
        return hashlib.new(name, usedforsecurity=False)
    import xxhash

    return getattr(xxhash, name)()
