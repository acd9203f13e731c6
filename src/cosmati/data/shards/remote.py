"""Files of a directory that may lie anywhere: here, or behind any URL that fsspec knows.

A fetch has one deadline by the wall clock, with as many attempts as fit. What can't get better (not found, not
allowed) is raised at once.
"""

from __future__ import annotations

import errno
import glob
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from cosmati.data.shards.attempt import Attempt
from cosmati.data.shards.lengths import lengths_here, lengths_over_http
from cosmati.data.shards.one_request import Take, stream_whole
from cosmati.errors import DataError, MissingExtraError

_CHUNK_BYTES = 1 << 20
_MAX_CLIENTS = 8
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_SHORTEST_STALL_SECONDS = 5.0
_FINAL_STATUS = {400, 401, 403, 404, 410, 416}
_PROBE_SECONDS = 5.0
_HANDLES = "too many files are open. Raise the limit (ulimit -n), or use fewer workers"
_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
)
"""What tells a file's version in fsspec's facts, the best first."""


class EnvironmentFaultError(DataError):
    """What no row is to blame for: a disk, a limit, a permission, a whole file. It's never left out as a bad row."""


class RemoteError(EnvironmentFaultError):
    """A file that can't be fetched."""


class RemoteMissingError(RemoteError):
    """A file that isn't there."""


class RemoteDeniedError(RemoteError):
    """A file that may not be read; some servers say so of what isn't there."""


class Remote:
    """A directory of files.

    Args:
        url: a path, or any URL that fsspec knows.
        options: for fsspec: credentials, endpoints.
        deadline_seconds: for one file, all attempts together.
    """

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None, deadline_seconds: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._options = dict(options or {})
        self._deadline_seconds = deadline_seconds
        self._files: tuple[int, Any] | None = None
        self.local = local_path(self.url)

    def __reduce__(self) -> tuple[Callable[..., Remote], tuple[object, ...]]:
        return _restored, (self.url, self._options, self._deadline_seconds)

    def exists(self, path: str) -> bool:
        """Say whether a file is there.

        Raises:
            RemoteError: that can't be found out.
        """
        if self.local is not None:
            return (self.local / path).is_file()

        def ask(_: Attempt) -> bool:
            files, root = self._open_files()
            files.invalidate_cache()
            return bool(files.exists(f"{root}/{path}"))

        return bool(self._attempts(path, ask))

    def names(self, pattern: str) -> list[str]:
        """Return the paths of the files below the directory that match a pattern (`**/*.parquet`), sorted.

        Raises:
            RemoteError: it can't be listed.
        """
        if self.local is not None:
            # Path.glob doesn't go into linked folders.
            found = glob.glob(pattern, root_dir=self.local, recursive=True)  # noqa: PTH207
            return sorted(Path(path).as_posix() for path in found if (self.local / path).is_file())

        def ask(_: Attempt) -> list[str]:
            files, root = self._open_files()
            files.invalidate_cache()
            matching = files.glob(f"{root}/{pattern}", detail=True)
            paths = [str(path) for path, facts in matching.items() if facts["type"] == "file"]
            return sorted(path.removeprefix(root).lstrip("/") for path in paths)

        listed: list[str] = self._attempts(pattern, ask)
        return listed

    def marker(self, path: str) -> str:
        """Return what tells this version of a file from others: ETag or time, and length; nothing if nobody says.

        Raises:
            RemoteError: it can't be found out.
        """
        if self.local is not None:
            try:
                status = os.stat(os.path.join(self.local, path))  # noqa: PTH116, PTH118  (there may be very many)
            except FileNotFoundError:
                return ""
            return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"

        def ask(_: Attempt) -> str:
            files, root = self._open_files()
            files.invalidate_cache()
            return _marker(files.info(f"{root}/{path}"))

        return str(self._attempts(path, ask))

    def markers(self, paths: Sequence[str]) -> dict[str, str]:
        """Return the markers of files, as far as one look at the directory gives them; HTTP gives none.

        Raises:
            RemoteError: the directory can't be listed.
        """
        if self.local is not None:
            found = {path: self.marker(path) for path in paths}
            return {path: marker for path, marker in found.items() if marker}
        if self.url.startswith("http"):
            return {}

        def ask(_: Attempt) -> dict[str, str]:
            files, root = self._open_files()
            files.invalidate_cache()
            found = files.find(root, detail=True)
            markers = {name.removeprefix(root).lstrip("/"): _marker(facts) for name, facts in found.items()}
            return {name: marker for name, marker in markers.items() if marker}

        listed = self._attempts("", ask)
        return {path: listed[path] for path in paths if path in listed}

    def sizes(self, paths: Sequence[str], *, sure: tuple[str, int]) -> Mapping[str, int | None] | None:
        """Return the lengths in bytes of those files that are there; None where it isn't known before they're fetched.

        One look at the directory tells all. HTTP has no lists: `lengths_over_http` asks for each.

        Raises:
            RemoteError: the directory can't be listed.
        """
        if self.local is not None:
            return lengths_here(self.local, paths)
        if self.url.startswith("http"):
            return lengths_over_http(*self._open_files(), paths, sure=sure, seconds=self._deadline_seconds)

        def ask(_: Attempt) -> dict[str, int]:
            files, root = self._open_files()
            files.invalidate_cache()
            listed = files.find(root, detail=True)
            return {name.removeprefix(root).lstrip("/"): int(facts["size"]) for name, facts in listed.items()}

        there: dict[str, int] = self._attempts("", ask)
        return {path: there[path] for path in paths if path in there}

    def why_unreachable(self, path: str) -> str:
        """Return why a file that once was there can't be asked for now, soon; nothing if the remote answers."""
        if self.local is not None:
            return "" if self.local.is_dir() else f"{self.local} isn't there"
        try:
            Remote(
                self.url, options=self._options, deadline_seconds=min(self._deadline_seconds, _PROBE_SECONDS)
            ).marker(path)
        except RemoteMissingError:
            return ""
        except RemoteError as error:
            return str(error)
        return ""

    def opened(self, path: str) -> IO[bytes]:
        """Open a file for reading here and there, without fetching all of it."""
        return self._reading(path)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content.

        Raises:
            RemoteError: it can't be fetched, or is longer than `max_bytes`.
        """
        content: bytes = self._attempts(path, partial(self._content, path, max_bytes))
        return content

    def begin_reading(self, path: str, *, max_bytes: int) -> Attempt:
        """Begin a single attempt to read a file's content, in a thread; who wants it waits for it."""
        self._open_files()
        attempt = Attempt(partial(self._content, path, max_bytes))
        attempt.start()
        return attempt

    def _content(self, path: str, max_bytes: int, attempt: Attempt) -> bytes:
        parts: list[bytes] = []

        def take(piece: bytes) -> bool:
            parts.append(piece)
            return sum(map(len, parts)) <= max_bytes and not attempt.is_over

        self._stream(path, take)
        content = b"".join(parts)
        if len(content) > max_bytes:
            raise RemoteError(f"{self.url}/{path} has more than {max_bytes} bytes, which can't be right.")
        return content

    def fetch(self, path: str, to: IO[bytes], *, num_bytes: int | None = None) -> None:
        """Copy a file into an open one, from its start.

        Args:
            path: below the directory.
            to: open for writing and seeking.
            num_bytes: the length that it must have; a shorter or longer body is an attempt that failed.

        Raises:
            RemoteMissingError: there is no such file.
            RemoteError: it can't be fetched before the deadline.
        """

        def copy(attempt: Attempt) -> None:
            attempt.write(to, b"", rewind=True)
            length = 0

            def take(piece: bytes) -> bool:
                nonlocal length
                length += len(piece)
                if num_bytes is not None and length > num_bytes:
                    msg = (
                        f"{self.url}/{path} has more than the {num_bytes} bytes that the index says: it was "
                        "changed or damaged where it lies. Restore it, or write the data set again."
                    )
                    raise RemoteError(msg)
                return attempt.write(to, piece)

            self._stream(path, take)
            if num_bytes is not None and length != num_bytes:
                raise OSError(errno.EIO, f"{length} bytes came where {num_bytes} were due")

        self._attempts(path, copy)

    def _stream(self, path: str, take: Take) -> None:
        """Hand a file over, piece by piece, in one request where that can be."""
        if self.local is None:
            files, root = self._open_files()
            if stream_whole(files, f"{root}/{path}", take):
                return
        with self._reading(path) as stream:
            while (piece := stream.read(_CHUNK_BYTES)) and take(piece):
                pass

    def _reading(self, path: str) -> IO[bytes]:
        if self.local is not None:
            return (self.local / path).open("rb")
        files, root = self._open_files()
        opened: IO[bytes] = files.open(f"{root}/{path}", "rb", block_size=8 * _CHUNK_BYTES)
        return opened

    def _open_files(self) -> tuple[Any, str]:
        """Return the file system and the root in it, one for each process: connections don't survive a fork."""
        if self._files is None or self._files[0] != os.getpid():
            try:
                import fsspec.core

                files, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **self._options)
            except ImportError as error:
                scheme = self.url.partition("://")[0]
                msg = f"{scheme}:// needs another package: {error}. Install what fsspec names for it."
                raise MissingExtraError(msg) from error
            except ValueError as error:
                raise RemoteError(f"{self.url} is no URL that fsspec knows: {error}.") from error
            self._files = (os.getpid(), (_connected(files, self.url, self._options), root))
        files, root = self._files[1]
        return files, str(root).rstrip("/")

    def _attempts(self, path: str, work: Callable[[Attempt], Any]) -> Any:  # noqa: ANN401  (what the work returns)
        if self.local is None:
            # The first use imports a client library, which on a busy machine takes seconds that no server took.
            self._open_files()
        end = time.monotonic() + self._deadline_seconds
        pause, number = _FIRST_PAUSE_SECONDS, 0
        while True:
            number += 1
            attempt = Attempt(work)
            left = None if self.local is not None else max(0.0, end - time.monotonic())
            # Long deadlines leave room for several attempts; within a short one a busy machine needs all of it.
            error = attempt.run(left, stall_seconds=max(self._deadline_seconds / 3, _SHORTEST_STALL_SECONDS))
            if error is None:
                return attempt.result
            try:
                self._give_up_if_final(path, error)
                if time.monotonic() + pause >= end:
                    msg = (
                        f"{self.url}/{path} couldn't be fetched in {self._deadline_seconds:g} s, in {number} "
                        f"attempt(s): {type(error).__name__}: {error}. Look whether it can be reached, or raise "
                        "deadline_seconds."
                    )
                    raise RemoteError(msg) from error
            finally:
                del error  # it knows this frame, if it comes from this thread
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _give_up_if_final(self, path: str, error: BaseException) -> None:
        if isinstance(error, DataError | MissingExtraError):
            raise error
        name, cause = f"{self.url}/{path}", _cause(error)
        status = getattr(cause, "status", None)
        if isinstance(cause, FileNotFoundError) or status in (404, 410):
            raise RemoteMissingError(
                f"{name} isn't there. Look at the path, and whether all files were copied."
            ) from error
        if isinstance(cause, PermissionError) or status in _FINAL_STATUS:
            raise RemoteDeniedError(
                f"{name} may not be read ({cause}). Look at the credentials in storage_options."
            ) from error
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise disk_error(cause, name) from error
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            raise RemoteError(f"{name}: {_HANDLES}.") from error
        if self.local is not None or not isinstance(error, Exception):
            raise RemoteError(f"{name} can't be read: {type(error).__name__}: {error}.") from error


def _cause(error: BaseException) -> BaseException:
    """Return what is behind an error: fsspec says "not found" of a server that refused, failed or wasn't there."""
    seen: BaseException | None = error
    while seen is not None:
        if hasattr(seen, "status") or (isinstance(seen, OSError) and not isinstance(seen, FileNotFoundError)):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


_clients: dict[tuple[int, str, str], Any] = {}


def _connected(files: Any, url: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401  (fsspec has no types)
    """Return a file system that may be connected already: a client and a connection take some 0.3 s for S3."""
    scheme, _, rest = url.partition("://")
    place = url if "::" in url else f"{scheme}://{rest.partition('/')[0]}"
    # fsspec's own cache has one for each thread.
    key = (os.getpid(), place, repr(sorted(options.items())))
    while len(_clients) >= _MAX_CLIENTS and key not in _clients:
        _clients.pop(next(iter(_clients)), None)
    return _clients.setdefault(key, files)


def _restored(url: str, options: Mapping[str, Any], deadline_seconds: float) -> Remote:
    return Remote(url, options=options, deadline_seconds=deadline_seconds)


def local_path(url: str) -> Path | None:
    """Return the path that a URL without a scheme, or of the scheme file, stands for."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    return None if "://" in url else Path(url).expanduser()


def _marker(facts: Mapping[str, Any]) -> str:
    found = next((str(facts[name]) for name in _MARKS if facts.get(name)), "")
    # A length alone tells little.
    return f"{facts.get('size')} {found}" if found else ""


def disk_error(error: OSError, name: str) -> EnvironmentFaultError:
    """Return what to tell who can't keep or read a file here."""
    mend = {
        errno.ENOSPC: "the disk is full. Free some, or give the cache another directory or max_bytes",
        errno.EDQUOT: "the quota is used up. Free some, or give the cache another directory or max_bytes",
        errno.EFBIG: "files may not become that large here. Raise the limit (ulimit -f), or use smaller shards",
        errno.EROFS: "the directory can't be written to. Give the cache another one",
        errno.EACCES: "the directory may not be written to. Give the cache another one",
        errno.EPERM: "the directory may not be written to. Give the cache another one",
        errno.EMFILE: _HANDLES,
        errno.ENFILE: _HANDLES,
        errno.ENOMEM: "there is too little memory, or too many mappings. Use fewer workers (or raise ulimit -v)",
    }.get(error.errno or 0, str(error))
    return EnvironmentFaultError(f"{name} can't be kept: {mend}. What was fetched before is whole.")
