"""A source opened for reading: index, cache, and the shards that are mapped into memory.

A source is a directory, here or remote, with `index.json` and MDS shards, or with Parquet files; all its rows are of
one class. A data set is a directory with `sources.json`, which names its sources, or one source by itself.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cosmati.data.rows import ColumnValues, concatenate
from cosmati.data.shards.cache import ShardCache, ShardFiles
from cosmati.data.shards.index import ShardIndex, ShardInfo, parse_index
from cosmati.data.shards.mds import MdsShard
from cosmati.data.shards.parquet import ParquetIndex, ParquetShard, parquet_index
from cosmati.data.shards.remote import Remote, RemoteMissingError
from cosmati.errors import DataError

UNKNOWN_CLASS = "unknown"
_MAX_INDEX_BYTES = 1 << 30
_MAX_MAPPED = 256
_MAX_DECODED = 8


class Shard(Protocol):
    """Rows of one shard, whatever its format."""

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        ...

    def sample(self, row: int) -> memoryview:
        """Return a row as it's encoded."""
        ...

    def rows(self, indices: NDArray[np.int64], columns: Collection[str] | None = None) -> dict[str, ColumnValues]:
        """Return rows as columns, all of them or those named."""
        ...


@dataclass(frozen=True)
class CacheOptions:
    """Where fetched shards are kept.

    Args:
        directory: of the cache; None reads local shards where they lie, and refuses a remote.
        max_bytes: above it, the shards that were used longest ago go; None keeps all.
        deadline_seconds: for one fetch, retries included.
        storage_options: for fsspec: credentials, endpoints.
    """

    directory: str | Path | None = None
    max_bytes: int | None = None
    deadline_seconds: float = 60.0
    storage_options: Mapping[str, Any] | None = None


class OpenedSource:
    """One source.

    Args:
        url: directory of the source, local or any URL that fsspec knows.
        class_path: class of its rows; None takes what the index says, or `unknown`.
        options: of the cache.
        index_sha256: what the index must be, where somebody said so.
        allow_pickle: decode columns of the encoding `pkl`: only from who you'd let run code.

    Raises:
        DataError: there is no index, or it isn't what it should be.
    """

    def __init__(
        self,
        url: str,
        *,
        class_path: str | None = None,
        options: CacheOptions | None = None,
        index_sha256: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        options = options or CacheOptions()
        self.url = url
        self._options = options
        self._allow_pickle = allow_pickle
        self._open()
        self.index: ShardIndex | ParquetIndex = _index(url, options)
        if index_sha256 is not None and self.index.digest != index_sha256:
            msg = (
                f"{url}/index.json has SHA-256 {self.index.digest[:16]}, and sources.json says {index_sha256[:16]}: "
                "one was changed without the other. Fetch both again, or write the data set again."
            )
            raise DataError(msg)
        own = self.index.extra.get("cosmati", {})
        says = own.get("class") if isinstance(own, dict) else None
        if class_path is not None and says not in (None, UNKNOWN_CLASS, class_path):
            raise DataError(
                f"{url} says that its rows are of class {says!r}, and class_path={class_path!r} was asked for. A class "
                "is what the data say: leave class_path out, or write the source again with its right class."
            )
        self.class_path: str = class_path or says or UNKNOWN_CLASS
        band = own.get("band", 0) if isinstance(own, dict) else 0
        if not isinstance(band, int) or band < 0:
            raise DataError(f"{url} says band {band!r}, and a band is a number from 0. Write the source again.")
        self.band = band

    def _open(self) -> None:
        local = _local_path(self.url)
        self._lock = threading.Lock()
        self._mapped: OrderedDict[int, Shard] = OrderedDict()
        if local is not None and self._options.directory is None:
            self._cache = ShardCache(local, None)
        else:
            if self._options.directory is None:
                msg = f"{self.url} is remote: say where to keep what is fetched, with cache=."
                raise DataError(msg)
            directory = Path(self._options.directory) / hashlib.sha256(self.url.encode()).hexdigest()[:16]
            remote = _remote(self.url, self._options)
            self._cache = ShardCache(directory, remote, max_bytes=self._options.max_bytes)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process."""
        return {k: v for k, v in self.__dict__.items() if k not in {"_lock", "_mapped", "_cache"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open anew: no file handle crosses from one process to another."""
        self.__dict__.update(state)
        self._open()

    @property
    def num_rows(self) -> int:
        """Rows of the source."""
        return self.index.num_rows

    @property
    def is_remote(self) -> bool:
        """Whether shards are copied into a cache before they're read."""
        return self._options.directory is not None

    @property
    def shards_ahead(self) -> int:
        """How many shards may be fetched before they're needed: those that fill half the cache."""
        if self._options.max_bytes is None:
            return self.index.num_shards
        largest = max(1, self.index.largest_shard)
        return self._options.max_bytes // (2 * largest)

    def fetch(self, shard: int) -> None:
        """Bring a shard into the cache, if it isn't there."""
        self._cache.open(_files(self.index.shard(shard)))

    def shard(self, number: int) -> Shard:
        """Return a shard, mapped into memory."""
        with self._lock:
            found = self._mapped.get(number)
            if found is not None:
                self._mapped.move_to_end(number)
                return found
        info = self.index.shard(number)
        opened = self._map(info)
        with self._lock:
            # Two threads may have opened it; a mapping that nobody holds any more closes itself.
            self._mapped[number] = opened
            # A row group is decoded whole, and held in memory; a mapped file isn't.
            while len(self._mapped) > (_MAX_MAPPED if info.format == "mds" else _MAX_DECODED):
                self._mapped.popitem(last=False)
        return opened

    def _map(self, info: ShardInfo) -> Shard:
        files = _files(info)
        for attempt in range(3):
            path = self._cache.open(files)
            try:
                kind = MdsShard if info.format == "mds" else ParquetShard
                return kind(path, info, allow_pickle=self._allow_pickle)
            except FileNotFoundError:
                # Another process of the same cache evicted it between its opening and its mapping.
                if attempt == 2:
                    raise
        raise AssertionError("the loop returns or raises")

    def rows(
        self, shards: NDArray[np.int64], rows: NDArray[np.int64], columns: Collection[str] | None = None
    ) -> dict[str, ColumnValues]:
        """Return rows as columns, in the order asked for; each shard is read once.

        Raises:
            DataError: a shard can't be had or isn't what its hash says, or a row can't be decoded.
        """
        parts = [(places, shard.rows(rows[places], columns)) for places, shard in self._by_shard(shards)]
        return concatenate(parts, len(rows))

    def digests(self, shards: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return SHA-256 of each row as it's encoded: uint8 [rows, 32]. The manifest's row leaves hold the same."""
        found = np.empty((len(rows), 32), np.uint8)
        for places, shard in self._by_shard(shards):
            for place in places:
                sample = hashlib.sha256(shard.sample(int(rows[place]))).digest()
                found[place] = np.frombuffer(sample, np.uint8)
        return found

    def _by_shard(self, shards: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], Shard]]:
        order = np.argsort(shards, kind="stable")
        cuts = np.flatnonzero(np.diff(shards[order])) + 1
        return [(places, self.shard(int(shards[places[0]]))) for places in np.split(order, cuts) if len(places)]


def open_sources(
    url: str | Path,
    *,
    class_path: str | None = None,
    options: CacheOptions | None = None,
    allow_pickle: bool = False,
) -> list[OpenedSource]:
    """Open a data set, or a single source.

    Raises:
        DataError: there is neither `sources.json` nor `index.json`, or they don't hold.
    """
    options = options or CacheOptions()
    root = str(url).rstrip("/")
    listed = _sources_file(root, options)
    if listed is None:
        return [OpenedSource(root, class_path=class_path, options=options, allow_pickle=allow_pickle)]
    for entry in listed:
        if class_path not in (None, entry["class"]) and entry["class"] != UNKNOWN_CLASS:
            raise DataError(
                f"{root}/{entry['path']} is of class {entry['class']!r}, and class_path={class_path!r} was asked for. "
                "A class is what the data say: leave class_path out, or write the source again with its right class."
            )
    return [
        OpenedSource(
            f"{root}/{entry['path']}",
            class_path=class_path or entry["class"],
            options=options,
            index_sha256=entry["index_sha256"],
            allow_pickle=allow_pickle,
        )
        for entry in listed
    ]


def _sources_file(root: str, options: CacheOptions) -> Sequence[Mapping[str, str]] | None:
    remote = _remote(root, options)
    if not remote.exists("sources.json"):
        return None
    text = remote.read("sources.json", max_bytes=1 << 26)
    try:
        content = json.loads(text)
        entries = [{key: str(entry[key]) for key in ("path", "class", "index_sha256")} for entry in content["sources"]]
        bad = [entry["path"] for entry in entries if entry["path"].startswith("/") or ".." in entry["path"].split("/")]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{root}/sources.json can't be read: {error!r}. Write the data set again.") from error
    if content.get("version") != 1 or not entries or bad:
        what = f"a path that leaves it: {bad[0]}" if bad else "no source, or a version that isn't 1"
        raise DataError(f"{root}/sources.json names {what}. Write the data set again with this version.")
    return entries


def _index(url: str, options: CacheOptions) -> ShardIndex | ParquetIndex:
    remote = _remote(url, options)
    try:
        return parse_index(remote.read("index.json", max_bytes=_MAX_INDEX_BYTES), name=f"{url}/index.json")
    except RemoteMissingError as error:
        found = parquet_index(remote)
        if found is None:
            msg = (
                f"{url} holds neither an index.json (MDS) nor Parquet files. Look at the path; `cosmati data write` "
                "makes a source."
            )
            raise DataError(msg) from error
        return found


def _files(info: ShardInfo) -> ShardFiles:
    return ShardFiles(info.raw, info.zip, info.compression)


def _local_path(url: str) -> Path | None:
    return Path(url.removeprefix("file://")).expanduser() if "://" not in url or url.startswith("file://") else None


def _remote(url: str, options: CacheOptions) -> Remote:
    return Remote(url, options=options.storage_options, deadline_seconds=options.deadline_seconds)
