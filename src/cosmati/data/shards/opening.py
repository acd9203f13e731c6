"""The opening of a data set: its small files from where they lie or, where nobody answers, as the cache has them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cosmati.data.shards.attempt import Attempt
from cosmati.data.shards.cache import RemoteVersion
from cosmati.data.shards.index import ShardIndex, parse_index
from cosmati.data.shards.kept import KeptFiles
from cosmati.data.shards.manifest import MANIFEST_FILE
from cosmati.data.shards.parquet import ParquetIndex, dump_parquet_index, load_parquet_index, parquet_index
from cosmati.data.shards.remote import Remote, RemoteDeniedError, RemoteMissingError
from cosmati.data.shards.sources import SOURCES_FILE, parse_sources
from cosmati.errors import DataError

_MAX_INDEX_BYTES = 1 << 30
_MOST_LISTED = 5000
_INDEX, _PARQUET = "index.json", "parquet.json"
_told: set[str] = set()


class UnverifiedDataWarning(UserWarning):
    """Data that have no hashes, so that nobody can say whether they're what was written."""


@dataclass(frozen=True)
class CacheOptions:
    """Where fetched shards are kept.

    Args:
        directory: of the cache; None reads local shards where they lie, and refuses a remote.
        max_bytes: of the whole directory, whatever jobs share it: above it, the shards that were used longest ago go;
            None keeps all.
        ahead_bytes: how much may be fetched before it's needed; half of `max_bytes` at most, 0 for nothing.
        deadline_seconds: for one fetch, retries included; above 0.
        storage_options: for fsspec: credentials, endpoints.
    """

    directory: str | Path | None = None
    max_bytes: int | None = None
    ahead_bytes: int = 1 << 28
    deadline_seconds: float = 60.0
    storage_options: Mapping[str, Any] | None = None


class Opening:
    """One opening of a data set or a source.

    Args:
        root: its URL.
        options: of the cache.
        pattern: of Parquet files below it, where not all are meant.

    Raises:
        DataError: it's remote, and there is no cache.
    """

    def __init__(self, root: str, options: CacheOptions, pattern: str | None = None) -> None:
        self._root, self._options = root, options
        if options.directory is None and remote_of(root, options).local is None:
            raise DataError(f"{root} is remote: say where to keep what is fetched, with cache=.")
        self._why_unreachable = ""
        self._early: Attempt | None = None
        kept = self._kept(root)
        names = (SOURCES_FILE, _INDEX, _PARQUET) if pattern is None else (_parquet_name(pattern),)
        name = next((name for name in names if kept and kept.read(name) is not None), None)
        if name is not None:
            self._why_unreachable = remote_of(root, options).why_unreachable(name)
        if self._why_unreachable:
            warnings.warn(
                f"{root} can't be reached ({self._why_unreachable}): it's read as the cache has it, and whether it was "
                "changed since isn't known.",
                stacklevel=4,
            )

    def _kept(self, url: str) -> KeptFiles | None:
        return KeptFiles(cache_directory(url, self._options)) if self._options.directory is not None else None

    def _copy(self, url: str, name: str) -> bytes | None:
        kept = self._kept(url)
        return kept.read(name) if kept else None

    def _keep(self, url: str, name: str, data: bytes) -> None:
        kept = self._kept(url)
        if kept:
            kept.keep(name, data)

    def sources(self) -> Sequence[Mapping[str, str]] | None:
        """Return what `sources.json` lists; None where there is none, so that it's a single source.

        Raises:
            DataError: it can't be read, or doesn't hold.
        """
        remote = remote_of(self._root, self._options)
        if self._why_unreachable:
            text = self._copy(self._root, SOURCES_FILE)
            return None if text is None else parse_sources(self._root, text)
        if remote.local is None:
            # A round trip less: nobody knows yet whether it's a data set or a source.
            self._early = remote.begin_reading(_INDEX, max_bytes=_MAX_INDEX_BYTES)
        try:
            text = remote.read(SOURCES_FILE, max_bytes=1 << 26)
        except (RemoteMissingError, RemoteDeniedError):
            return None
        self._early_index(0.0)
        entries = parse_sources(self._root, text)
        self._keep(self._root, SOURCES_FILE, text)
        return entries

    def index(self, url: str, sha256: str | None = None, pattern: str | None = None) -> ShardIndex | ParquetIndex:
        """Return a source's index.

        Args:
            url: of the source.
            sha256: what it must be, where that is known; then a copy of it is as good.
            pattern: of Parquet files below it, where not all are meant.

        Raises:
            DataError: there is none, or it can't be read.
        """
        remote = remote_of(url, self._options)
        if pattern is not None:
            return self._kept_parquet(url, pattern) if self._why_unreachable else self._matching(url, pattern)
        copy = self._copy(url, _INDEX)
        if copy is not None and (self._why_unreachable or hashlib.sha256(copy).hexdigest() == sha256):
            return parse_index(copy, name=f"{url}/index.json")
        if self._why_unreachable:
            return self._kept_parquet(url)
        early = self._early_index(self._options.deadline_seconds) if url == self._root else None
        try:
            text = early or remote.read(_INDEX, max_bytes=_MAX_INDEX_BYTES)
        except RemoteMissingError as error:
            found = parquet_index(remote)
            if found is None:
                msg = (
                    f"{url} holds neither an index.json (MDS) nor Parquet files. Look at the path; `cosmati data "
                    "write` makes a source."
                )
                raise DataError(msg) from error
            self._keep(url, _PARQUET, dump_parquet_index(found))
            return found
        index = parse_index(text, name=f"{url}/index.json")
        self._keep(url, _INDEX, text)
        return index

    def _matching(self, url: str, pattern: str) -> ParquetIndex:
        found = parquet_index(remote_of(url, self._options), pattern)
        if found is None:
            raise DataError(f"No file below {url} matches {pattern}. Look at the path, and at the pattern.")
        self._keep(url, _parquet_name(pattern), dump_parquet_index(found))
        return found

    def _kept_parquet(self, url: str, pattern: str | None = None) -> ParquetIndex:
        text = self._copy(url, _parquet_name(pattern))
        if text is None:
            raise DataError(f"{self._why_unreachable} The cache has no index of {url} either.")
        return load_parquet_index(text)

    def _early_index(self, seconds: float) -> bytes | None:
        """Return what was read early, if it has come; it's asked for anew where that failed."""
        early, self._early = self._early, None
        has_failed = early is None or early.wait(seconds, stall_seconds=seconds) is not None
        return None if early is None or has_failed else early.result

    def manifest(self, url: str) -> bytes:
        """Return a source's manifest as it lies there, or as the cache has it where nobody answers.

        Raises:
            DataError: there is none.
        """
        if self._why_unreachable:
            kept = self._copy(url, MANIFEST_FILE)
            if kept is None:
                raise DataError(f"{self._why_unreachable} The cache has no manifest of {url} either.")
            return kept
        try:
            data = remote_of(url, self._options).read(MANIFEST_FILE, max_bytes=_MAX_INDEX_BYTES)
        except RemoteMissingError as error:
            msg = f"{url} has no manifest.json, so nobody can vouch for it. `cosmati data write` writes one."
            raise DataError(msg) from error
        self._keep(url, MANIFEST_FILE, data)
        return data

    def sizes(self, url: str, manifest: bytes) -> Callable[[Sequence[str]], Mapping[str, int | None] | None]:
        """Return what asks for the sizes of a source's files where they lie, beside a manifest that was read there."""
        if self._why_unreachable:
            return lambda _names: None
        return partial(remote_of(url, self._options).sizes, sure=(MANIFEST_FILE, len(manifest)))

    def version(self, url: str, index: ShardIndex | ParquetIndex) -> RemoteVersion:
        """Return what tells this version of a source from others, where its files have no hashes; say so, once.

        Raises:
            DataError: it can't be found out.
        """
        is_local = self._options.directory is None
        if _has_hashes(index):
            return RemoteVersion(index.digest)
        if url not in _told and not (is_local and isinstance(index, ParquetIndex)):
            _told.add(url)
            then = (
                "a damaged shard is served as it is, if its length is right"
                if is_local
                else "what is fetched first is taken for right, noted, and compared from then on"
            )
            msg = f"{url} has no hashes: {then}. Data written by `cosmati data write` have them."
            warnings.warn(msg, UnverifiedDataWarning, stacklevel=4)
        if self._why_unreachable:
            return RemoteVersion(index.digest)
        remote = remote_of(url, self._options)
        if is_local:
            return RemoteVersion(index.digest, remote.markers(index.file_names))
        # To list very many takes longer than a start may; the index must do then.
        shards = range(index.num_shards if index.num_shards <= _MOST_LISTED else 0)
        names = {(shard.zip or shard.raw).basename for shard in map(index.shard, shards)}
        markers = remote.markers(sorted(names))
        if not markers and not isinstance(index, ParquetIndex):
            markers = {_INDEX: remote.marker(_INDEX)}
        return RemoteVersion(index.digest, markers)


def _has_hashes(index: ShardIndex | ParquetIndex) -> bool:
    # One writer's shards are alike; the first and the last of merged ones say enough.
    return all(index.shard(number).raw.hashes for number in {0, index.num_shards - 1} if index.num_shards)


def has_kept(url: str, options: CacheOptions, pattern: str) -> bool:
    """Say whether the cache has an index of the Parquet files below a URL that match a pattern."""
    if options.directory is None:
        return False
    return KeptFiles(cache_directory(url, options)).read(_parquet_name(pattern)) is not None


def _parquet_name(pattern: str | None) -> str:
    return _PARQUET if pattern is None else f"parquet-{hashlib.sha256(pattern.encode()).hexdigest()[:16]}.json"


def cache_directory(url: str, options: CacheOptions) -> Path:
    """Return where a source's files lie in the cache."""
    assert options.directory is not None, "asked of caches only"
    return Path(options.directory).expanduser() / hashlib.sha256(url.encode()).hexdigest()[:16]


def remote_of(url: str, options: CacheOptions) -> Remote:
    """Return a source's remote."""
    return Remote(url, options=options.storage_options, deadline_seconds=options.deadline_seconds)
