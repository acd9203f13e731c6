"""Shards kept on disk: fetched, verified, decompressed, and only then given their names.

    open -> verified in this process? -> on disk and whole? -> fetch, verify, decompress, verify, rename

A file that is being made is `KEY.LENGTH.part`, and whoever makes it holds the kernel's lock on it: a process that dies
lets go of both, and the next one starts over. A damaged file goes to `quarantine/` and is fetched again. Jobs may share
one cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cosmati.data.shards.compression import decompress
from cosmati.data.shards.folder import QUARANTINE, CacheFolder, sweep
from cosmati.data.shards.index import FileInfo
from cosmati.data.shards.kept import Note, Notes
from cosmati.data.shards.mds import signature
from cosmati.data.shards.remote import EnvironmentFaultError, Remote, RemoteMissingError, disk_error
from cosmati.errors import DataError
from cosmati.storage.atomic import publish
from cosmati.storage.lease import Lease
from cosmati.storage.lock import FileLock, is_locked

_SHA3 = ("sha3_256", "sha3_512", "sha3_384", "sha3_224")
_KNOWN_HASHES = ("sha256", "sha512", "sha384", "sha224", "blake2b", "blake2s", *_SHA3, "sha1", "md5")
_XXHASHES = ("xxh3_128", "xxh128", "xxh3_64", "xxh64", "xxh32")

_TOUCHED_SECONDS = 1.0
_ATTEMPTS = 3


class DamagedRemoteError(EnvironmentFaultError):
    """A remote file that isn't what the index says."""


class ReplacedRemoteError(EnvironmentFaultError):
    """A remote whose files without hashes were replaced by others."""


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

    @property
    def fetched(self) -> FileInfo:
        """The file that is fetched."""
        return self.zip or self.raw


@dataclass(frozen=True)
class RemoteVersion:
    """The version of a remote, or of local data, that a run reads, where its files have no hashes.

    Args:
        digest: of the index.
        markers: of files, as they were when it was opened; empty if the remote couldn't be asked.
    """

    digest: str = ""
    markers: Mapping[str, str] = field(default_factory=dict)

    def witness(self, basename: str) -> str:
        """Return the file whose marker tells a version of a shard: the index where only that is known, or its own."""
        return "index.json" if "index.json" in self.markers and basename not in self.markers else basename


class ShardCache:
    """Shards on disk.

    Args:
        directory: of these shards, in the cache; without a remote, of the shards themselves.
        remote: where they come from.
        max_bytes: that the whole cache may hold: those that were opened longest ago and aren't in use go; None keeps
            all. Without a remote, nothing ever goes.
        root: of the whole cache, which bounds it; None is the directory.
        version: of where the shards lie, for those without hashes.
        patience_seconds: how long to wait for room that other processes hold.
    """

    def __init__(
        self,
        directory: Path,
        remote: Remote | None,
        *,
        max_bytes: int | None = None,
        root: Path | None = None,
        version: RemoteVersion | None = None,
        patience_seconds: float = 60.0,
    ) -> None:
        self.directory = directory
        self.folder = CacheFolder(root or directory, max_bytes, patience_seconds)
        self._remote = remote
        self._version = version or RemoteVersion()
        self._has_directory = False
        self._notes = Notes(directory / ".notes")
        self._verified: dict[str, tuple[int, int, int]] = {}
        self.begin_in_child()
        if remote is not None:
            sweep(directory)

    def begin_in_child(self) -> None:
        """Forget the locks that a thread of the parent may have held when this process was forked off."""
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def hold(self, files: ShardFiles) -> tuple[Path, Lease | None]:
        """Return the verified file of a shard (see `open`), and a lease that keeps it from eviction."""
        path = self._path(files)
        if self._remote is None:
            return self.open(files), None
        try:
            if not self._has_directory:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._has_directory = True
            lease = self.folder.lease(path)
        except OSError as error:
            raise disk_error(error, f"Shard {files.raw.basename} in {self.directory}") from error
        return self.open(files), lease

    def open(self, files: ShardFiles) -> Path:
        """Return the verified file of a shard, fetched if it has to be.

        Raises:
            DamagedRemoteError: the remote isn't what the index says.
            ReplacedRemoteError: it isn't what it was, and has no hashes.
            EnvironmentFaultError: it can't be fetched or kept.
        """
        path = self._path(files)
        name = path.name if self._remote else files.raw.basename
        with self._lock:
            mine = self._locks.setdefault(name, threading.Lock())
        with mine:
            try:
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if self._verified.get(name) == signature(status):
                        if status.st_atime < time.time() - _TOUCHED_SECONDS:
                            self._touch(path)
                        return path
                for _ in range(_ATTEMPTS):
                    before = signature(path.stat()) if path.exists() else None
                    self._make(path, files)
                    after = signature(path.stat())
                    # Otherwise what was hashed may not be what is there now. A cache's file is replaced by whole ones.
                    is_new = before is None or before[0] != after[0]
                    if before == after or (self._remote is not None and is_new):
                        break
                else:
                    msg = (
                        f"Shard {path} changed each time that it was verified: leave data alone while a run reads "
                        "them, and start again."
                    )
                    raise EnvironmentFaultError(msg)
                self._verified[name] = after
            except OSError as error:
                raise disk_error(error, f"Shard {files.raw.basename} in {self.directory}") from error
            return path

    def is_coming(self, files: ShardFiles) -> bool:
        """Say whether a shard's file is here, or somebody is fetching it."""
        path = self._path(files)
        return path.exists() or is_locked(_turn_of(path))

    def _path(self, files: ShardFiles) -> Path:
        if self._remote is None:
            return self.directory / files.raw.basename
        digests = [f"{name}-{files.raw.hashes[name]}" for name in _KNOWN_HASHES if name in files.raw.hashes]
        # Without a hash, the place and the index stand for the content.
        place = f"{self._remote.url}\0{files.raw.basename}\0{files.raw.num_bytes}\0{self._version.digest}"
        key = digests[0] if digests else f"place-{hashlib.sha256(place.encode()).hexdigest()}"
        return self.directory / f"{key}.shard"

    def _make(self, path: Path, files: ShardFiles) -> None:
        if self._remote is None and path.exists():
            self._check_local(path, files.raw)
            return
        with contextlib.suppress(FileNotFoundError):
            # Names are given to whole files only, so this needs no lock, nor a directory that can be written to.
            if self._problem(path, files) is None:
                self._touch(path)
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_turn_of(path), wait=True) as turn:
            try:
                if not path.exists() or not self._is_whole(path, files):
                    most = max(files.raw.num_bytes, files.fetched.num_bytes)
                    with self.folder.part(path, most) as (part, file):
                        self._fill(file, part, files)
                        self._take_note(path.name, part, files)
                        publish(part, path)
            finally:
                turn.path.unlink(missing_ok=True)
        self._touch(path)

    def _check_local(self, path: Path, raw: FileInfo) -> None:
        problem = _problem(path, raw)
        if problem:
            msg = f"Shard {path} {problem}: it's damaged, and there is no remote to fetch it from. Write it again."
            raise EnvironmentFaultError(msg)
        if not raw.hashes:
            self._refuse_another(path, was_read=raw.basename in self._verified)

    def _refuse_another(self, path: Path, *, was_read: bool = False) -> None:
        """Refuse a local file without a hash that isn't the one that was there at the opening."""
        due = self._version.markers.get(path.relative_to(self.directory).as_posix())
        if was_read or due not in (None, Remote(str(path.parent)).marker(path.name)):
            msg = (
                f"Shard {path} was changed since the data were opened, and has no hash that would say whether it's the "
                "same. Leave data alone while a run reads them; start again with what is there now."
            )
            raise EnvironmentFaultError(msg)

    def _problem(self, path: Path, files: ShardFiles) -> str | None:
        """Return what is wrong with a cached file; one without a hash must be what was noted when it was fetched."""
        raw = files.raw
        problem = _problem(path, raw)
        if problem or raw.hashes:
            return problem
        note = self._notes.get(path.name)
        if note is None:
            return "has no hash, and nothing was noted when it was fetched"
        now = self._version.markers.get(self._version.witness(files.fetched.basename), note.marker)
        if now != note.marker:
            return "has no hash, and where it comes from something was replaced since"
        return _problem(path, FileInfo(raw.basename, raw.num_bytes, {"sha256": note.sha256}))

    def _is_whole(self, path: Path, files: ShardFiles) -> bool:
        problem = self._problem(path, files)
        if problem is None:
            return True
        quarantine = self.directory / QUARANTINE
        quarantine.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.replace(quarantine / path.name)
        warnings.warn(f"The cached shard {path.name} {problem}; it's in {quarantine}, and fetched again.", stacklevel=2)
        return False

    def _fill(self, file: IO[bytes], part: Path, files: ShardFiles) -> None:
        """Put the verified shard into an open file."""
        source = files.fetched
        remote = self._remote or Remote(str(self.directory))
        remote.fetch(source.basename, file, num_bytes=source.num_bytes)
        file.flush()
        self._refuse_damage(part, source, remote)
        if self._remote is None and not source.hashes:
            self._refuse_another(self.directory / source.basename)
        if files.zip is None:
            return
        assert files.compression is not None, "the index has both or neither"
        try:
            content = decompress(files.compression, part.read_bytes(), max_bytes=files.raw.num_bytes)
        except DataError as error:
            raise DamagedRemoteError(f"{remote.url}/{source.basename}: {error}") from error
        file.seek(0)
        file.truncate()
        file.write(content)
        file.flush()
        self._refuse_damage(part, files.raw, remote)

    def _take_note(self, name: str, part: Path, files: ShardFiles) -> None:
        """Note what a shard without a hash is; refuse it if it isn't what this run began with, or fetched before."""
        if files.raw.hashes or self._remote is None:
            return
        source = files.fetched
        witness = self._version.witness(source.basename)
        due = self._version.markers.get(witness, "")
        marker = self._remote.marker(witness)
        with part.open("rb") as stream:
            note = Note(hashlib.file_digest(stream, "sha256").hexdigest(), files.raw.num_bytes, marker)
        before = self._notes.get(name)
        is_another = marker != due if due else self._has_another_index()
        if is_another or (before is not None and before.sha256 != note.sha256):
            msg = (
                f"{self._remote.url}/{source.basename} was replaced since the data were opened or first fetched, and "
                "has no hash: two versions would be mixed. Start again; to take the new one, first remove "
                f"{self.directory}."
            )
            raise ReplacedRemoteError(msg)
        self._notes.take(name, note)

    def _has_another_index(self) -> bool:
        """Whether the remote's index isn't the one that was opened; for want of a marker to compare."""
        assert self._remote is not None, "checked by the caller"
        if not self._version.digest:
            return False
        try:
            text = self._remote.read("index.json", max_bytes=1 << 30)
        except RemoteMissingError:
            return False
        return hashlib.sha256(text).hexdigest() != self._version.digest

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
        # The time of the last opening; that of the last change says whether it's the file that was verified. A cache
        # that can only be read still serves.
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _turn_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.turn")


def _problem(path: Path, file: FileInfo) -> str | None:
    """Return what is wrong with a file, None if it's what it should be."""
    size = path.stat().st_size
    if size != file.num_bytes:
        return f"has {size} bytes where {file.num_bytes} were due"
    found = _strongest(file.hashes)
    if found is None:
        if not file.hashes:
            return None
        mend = "Install xxhash" if set(_XXHASHES) & set(file.hashes) else "Write the index again with sha256, say"
        msg = f"{path}: none of the hashes {', '.join(sorted(file.hashes))} can be computed. {mend}."
        raise EnvironmentFaultError(msg)
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
