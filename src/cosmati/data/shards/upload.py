"""Where a writer's files go: a directory here, or behind any URL that fsspec knows. A file appears whole or not."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from cosmati.data.shards.remote import Remote, RemoteError
from cosmati.errors import DataError
from cosmati.storage.atomic import DRAFT_SUFFIX, draft_of, publish, replace_file

_WITH_FOLDERS = {"file", "local", "dir", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs", "arrow_hdfs"}
_BYTES_PER_SECOND = 100_000


class Target(Remote):
    """A directory that is written to.

    Args:
        url: a path, or any URL that fsspec knows.
        options: for fsspec: credentials, endpoints.
        deadline_seconds: for one file, all attempts together, and a second more for each 100 kB of it.
    """

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None, deadline_seconds: float = 60.0) -> None:
        super().__init__(url, options=options, deadline_seconds=deadline_seconds)
        self._least_seconds = deadline_seconds

    def put(self, name: str, data: bytes) -> None:
        """Put a whole file in place; one of that name goes.

        Raises:
            OSError: a local disk won't take it.
            DataError: the remote won't.
        """
        if self.local is not None:
            replace_file(self.local / name, data)
            return

        self._deadline_seconds = self._least_seconds + len(data) / _BYTES_PER_SECOND

        def send(files: Any, path: str) -> None:  # noqa: ANN401  (fsspec's)
            if not _has_folders(files):  # an object store's objects appear whole
                files.pipe_file(path, data)
                return
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            files.pipe_file(path + DRAFT_SUFFIX, data)
            files.mv(path + DRAFT_SUFFIX, path)

        self._change(name, send)

    def put_file(self, name: str, path: Path) -> None:
        """Put a copy of a file here in place, whole; one of that name goes. It isn't read into memory.

        Raises:
            OSError: a local disk won't take it.
            DataError: the remote won't.
        """
        if self.local is not None:
            place = self.local / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, draft_of(place))
            publish(draft_of(place), place)
            return
        self._deadline_seconds = self._least_seconds + path.stat().st_size / _BYTES_PER_SECOND

        def send(files: Any, to: str) -> None:  # noqa: ANN401  (fsspec's)
            if not _has_folders(files):
                files.put_file(str(path), to)
                return
            files.makedirs(to.rpartition("/")[0], exist_ok=True)
            files.put_file(str(path), to + DRAFT_SUFFIX)
            files.mv(to + DRAFT_SUFFIX, to)

        self._change(name, send)

    def fetch(self, path: str, to: IO[bytes], *, num_bytes: int | None = None) -> None:
        """Copy a file into an open one, as `Remote` does; a long one has as much longer as it has to be put there."""
        self._deadline_seconds = self._least_seconds + (num_bytes or 0) / _BYTES_PER_SECOND
        super().fetch(path, to, num_bytes=num_bytes)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that aren't there count as removed.

        Raises:
            OSError: a local file can't be removed.
            DataError: a remote one can't.
        """

        def drop(files: Any, path: str) -> None:  # noqa: ANN401  (fsspec's)
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(path)

        for name in names:
            if self.local is not None:
                (self.local / name).unlink(missing_ok=True)
            else:
                self._change(name, drop)

    def _change(self, name: str, work: Callable[[Any, str], None]) -> None:
        def attempt(_: object) -> None:
            files, root = self._open_files()
            work(files, f"{root}/{name}")
            files.invalidate_cache()

        try:
            self._attempts(name, attempt)
        except RemoteError as error:
            why = error.__cause__ or error
            msg = (
                f"{self.url}/{name} can't be written: {type(why).__name__}: {why}. What went there before is "
                "whole: look at address and credentials, and run the same command again; it goes on."
            )
            raise DataError(msg) from error


@dataclass(frozen=True)
class Destination:
    """Where a writer writes, and where what stays with the owner lies: salt and journal.

    Args:
        url: a path, or any URL that fsspec knows.
        keep: of a remote, the directory here for salt and journal, which aren't uploaded. A local one holds its own.
        storage_options: of a remote, for fsspec.
        deadline_seconds: of a remote, as `Target` has it.

    Raises:
        DataError: the target is remote and no directory is named, or it's local and one is.
    """

    url: str
    keep: Path | None = None
    storage_options: Mapping[str, Any] | None = None
    deadline_seconds: float = 60.0

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition(":/")
        if not self.url.strip() or (len(scheme) > 1 and scheme.isalnum() and rest and not rest.startswith("/")):
            raise DataError(
                f"{self.url!r} is no place to write to. Give a directory, or a URL such as s3://bucket/data."
            )
        if self.target.local is None and self.keep is None:
            raise DataError(
                f"{self.url} is remote, and the salt of its rows stays with you. Name a directory here that keeps it, "
                "and what a broken write needs to go on: keep=, --keep."
            )
        if self.target.local is not None and self.keep is not None:
            raise DataError(f"{self.url} is a local directory, which keeps its salt itself. Leave keep=, --keep out.")

    @cached_property
    def target(self) -> Target:
        """The directory itself."""
        return Target(self.url, options=self.storage_options, deadline_seconds=self.deadline_seconds)

    @property
    def here(self) -> Path:
        """The local directory of salt and journal."""
        return self.keep or self.target.local or Path()

    def below(self, path: str) -> Destination:
        """Return a directory below it."""
        keep = None if self.keep is None else self.keep / path
        return Destination(f"{self.target.url}/{path}", keep, self.storage_options, self.deadline_seconds)


def _has_folders(files: Any) -> bool:  # noqa: ANN401  (fsspec's)
    protocols = [files.protocol] if isinstance(files.protocol, str) else files.protocol
    return not _WITH_FOLDERS.isdisjoint(protocols)
