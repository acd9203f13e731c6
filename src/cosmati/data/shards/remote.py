"""Files of a directory that may lie anywhere: here, or behind any URL that fsspec knows.

A fetch has one deadline by the wall clock, with as many attempts as fit. What can't get better (not found, not
allowed) is raised at once.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from cosmati.errors import DataError, MissingExtraError

_CHUNK_BYTES = 1 << 20
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_SHORTEST_STALL_SECONDS = 5.0
_FINAL_STATUS = {400, 401, 403, 404, 410, 416}


class RemoteError(DataError):
    """A file that can't be fetched."""


class RemoteMissingError(RemoteError):
    """A file that isn't there."""


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

        def ask(_: _Attempt) -> bool:
            files, root = self._open_files()
            files.invalidate_cache()
            return bool(files.exists(f"{root}/{path}"))

        return bool(self._attempts(path, ask))

    def names(self, suffix: str) -> list[str]:
        """Return the names of the directory's files that end so, sorted.

        Raises:
            RemoteError: it can't be listed.
        """
        if self.local is not None:
            found = self.local.glob(f"*{suffix}") if self.local.is_dir() else []
            return sorted(path.name for path in found)

        def ask(_: _Attempt) -> list[str]:
            files, root = self._open_files()
            return sorted(str(path).rpartition("/")[2] for path in files.glob(f"{root}/*{suffix}"))

        listed: list[str] = self._attempts(f"*{suffix}", ask)
        return listed

    def opened(self, path: str) -> IO[bytes]:
        """Open a file for reading here and there, without fetching all of it."""
        return self._reading(path)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content.

        Raises:
            RemoteError: it can't be fetched, or is longer than `max_bytes`.
        """

        def take(attempt: _Attempt) -> bytes:
            parts, length = [], 0
            with self._reading(path) as stream:
                while piece := stream.read(_CHUNK_BYTES):
                    parts.append(piece)
                    length += len(piece)
                    if length > max_bytes or attempt.is_over:
                        break
            return b"".join(parts)

        content: bytes = self._attempts(path, take)
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

        def copy(attempt: _Attempt) -> None:
            attempt.write(to, b"", rewind=True)
            length = 0
            with self._reading(path) as stream:
                while piece := stream.read(_CHUNK_BYTES):
                    length += len(piece)
                    if num_bytes is not None and length > num_bytes:
                        msg = (
                            f"{self.url}/{path} has more than the {num_bytes} bytes that the index says: it was "
                            "changed or damaged where it lies. Restore it, or write the data set again."
                        )
                        raise RemoteError(msg)
                    if not attempt.write(to, piece):
                        break
            if num_bytes is not None and length != num_bytes:
                raise OSError(errno.EIO, f"{length} bytes came where {num_bytes} were due")

        self._attempts(path, copy)

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

                self._files = (os.getpid(), fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **self._options))
            except ImportError as error:
                scheme = self.url.partition("://")[0]
                msg = f"{scheme}:// needs another package: {error}. Install what fsspec names for it."
                raise MissingExtraError(msg) from error
            except ValueError as error:
                raise RemoteError(f"{self.url} is no URL that fsspec knows: {error}.") from error
        files, root = self._files[1]
        return files, str(root).rstrip("/")

    def _attempts(self, path: str, work: Callable[[_Attempt], Any]) -> Any:  # noqa: ANN401  (what the work returns)
        if self.local is None:
            # The first use imports a client library, which on a busy machine takes seconds that no server took.
            self._open_files()
        end = time.monotonic() + self._deadline_seconds
        pause, number = _FIRST_PAUSE_SECONDS, 0
        while True:
            number += 1
            attempt = _Attempt(work)
            left = None if self.local is not None else max(0.0, end - time.monotonic())
            # Long deadlines leave room for several attempts; within a short one a busy machine needs all of it.
            error = attempt.run(left, stall_seconds=max(self._deadline_seconds / 3, _SHORTEST_STALL_SECONDS))
            if error is None:
                return attempt.result
            self._give_up_if_final(path, error)
            if time.monotonic() + pause >= end:
                msg = (
                    f"{self.url}/{path} couldn't be fetched in {self._deadline_seconds:g} s, in {number} attempt(s): "
                    f"{type(error).__name__}: {error}. Look whether it can be reached, or raise deadline_seconds."
                )
                raise RemoteError(msg) from error
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
            raise RemoteError(
                f"{name} may not be read ({cause}). Look at the credentials in storage_options."
            ) from error
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise disk_error(cause, name) from error
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            raise RemoteError(
                f"{name}: too many files are open. Raise the limit (ulimit -n), or use fewer workers."
            ) from error
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


def _restored(url: str, options: Mapping[str, Any], deadline_seconds: float) -> Remote:
    return Remote(url, options=options, deadline_seconds=deadline_seconds)


def local_path(url: str) -> Path | None:
    """Return the path that a URL without a scheme, or of the scheme file, stands for."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    return None if "://" in url else Path(url).expanduser()


def disk_error(error: OSError, name: str) -> DataError:
    """Return what to tell who can't write a file."""
    mend = {
        errno.ENOSPC: "the disk is full. Free some, or give the cache another directory or max_bytes",
        errno.EDQUOT: "the quota is used up. Free some, or give the cache another directory or max_bytes",
        errno.EFBIG: "files may not become that large here. Raise the limit (ulimit -f), or use smaller shards",
        errno.EROFS: "the directory can't be written to. Give the cache another one",
        errno.EACCES: "the directory may not be written to. Give the cache another one",
        errno.EPERM: "the directory may not be written to. Give the cache another one",
    }.get(error.errno or 0, str(error))
    return DataError(f"{name} can't be kept: {mend}. What was fetched before is whole.")


class _Attempt:
    """One try, in a thread of its own, so that a server that never answers can't hold the caller."""

    def __init__(self, work: Callable[[_Attempt], Any]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self.is_over = False
        self.result: Any = None
        self._progress = time.monotonic()
        self._error: BaseException | None = None

    def run(self, seconds: float | None, *, stall_seconds: float) -> BaseException | None:
        """Work for so long at most, and no longer than `stall_seconds` without a byte; return what went wrong."""
        if seconds is None:
            self._run()
            return self._error
        end = self._progress + seconds
        thread = threading.Thread(target=self._run, daemon=True, name="cosmati-fetch")
        thread.start()
        while thread.is_alive() and time.monotonic() < min(end, self._progress + stall_seconds):
            thread.join(max(0.0, min(end, self._progress + stall_seconds) - time.monotonic()))
        with self._lock:
            # From here on a thread that is late writes nothing.
            self.is_over = True
        if thread.is_alive():
            return TimeoutError("no answer, or too slow a one")
        return self._error

    def _run(self) -> None:
        try:
            self.result = self._work(self)
        except BaseException as error:  # noqa: BLE001  (handed to the caller, whatever it is)
            self._error = error

    def write(self, to: IO[bytes], piece: bytes, *, rewind: bool = False) -> bool:
        """Write, unless the attempt is over."""
        with self._lock:
            if self.is_over:
                return False
            if rewind:
                to.seek(0)
                to.truncate()
            to.write(piece)
            self._progress = time.monotonic()
            return True
