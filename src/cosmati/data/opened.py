"""A source opened for reading: index, cache, and the shards that are mapped into memory.

A source is a directory, here or remote, with `index.json` and MDS shards, or with Parquet files; all its rows are of
one class. A data set is a directory with `sources.json`, which names its sources, or one source by itself.
"""

from __future__ import annotations

import copy
import errno
import glob
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cosmati.data.graded import also_said, grades_said
from cosmati.data.open_shards import MAPPED, OpenShards, Shard
from cosmati.data.rows import ColumnValues, concatenate
from cosmati.data.shards.cache import ShardCache, ShardFiles
from cosmati.data.shards.formats import files_of
from cosmati.data.shards.gathering import Part, rows_together
from cosmati.data.shards.index import ShardIndex, ShardInfo
from cosmati.data.shards.manifest import packed_said
from cosmati.data.shards.mds import ChangedShardError, MdsShard, are_alike
from cosmati.data.shards.opening import CacheOptions, Opening, cache_directory, has_kept, remote_of
from cosmati.data.shards.parquet import ParquetIndex, ParquetShard
from cosmati.data.shards.remote import EnvironmentFaultError, disk_error, local_path
from cosmati.data.shards.split import SplitShard
from cosmati.data.vouching import AskedAuthority, CheckedOnce, VouchedShards, asked_for, vouched_shards
from cosmati.errors import DataError
from cosmati.records.joint_classes import joint_name
from cosmati.storage.lease import Lease

__all__ = ["UNKNOWN_CLASS", "CacheOptions", "OpenedSource", "open_all", "open_sources"]

UNKNOWN_CLASS = "unknown"
_MAX_DECODED = 8
_GRACE_SECONDS = 0.5
_T = TypeVar("_T")


class OpenedSource:
    """One source.

    Args:
        url: directory of the source, local or any URL that fsspec knows.
        class_path: class of its rows; None takes what the index says, or `unknown`.
        options: of the cache.
        index_sha256: what the index must be, where somebody said so.
        pattern: of Parquet files below the directory, where not all are meant.
        allow_pickle: decode columns of the encoding `pkl`: only from who you'd let run code.
        opening: of the data set that it belongs to; None is its own.
        authority: who has to vouch for it; None asks nobody, and its class is what it says.

    Raises:
        DataError: there is no index, or it isn't what it should be.
        ProvenanceError: the authority doesn't vouch for it.
    """

    def __init__(
        self,
        url: str,
        *,
        class_path: str | None = None,
        options: CacheOptions | None = None,
        index_sha256: str | None = None,
        pattern: str | None = None,
        allow_pickle: bool = False,
        opening: Opening | None = None,
        authority: AskedAuthority | None = None,
    ) -> None:
        options = options or CacheOptions()
        self.url = url
        self._options = options
        self._allow_pickle = allow_pickle
        opening = opening or Opening(url, options)
        self.index: ShardIndex | ParquetIndex = opening.index(url, index_sha256, pattern)
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
        self.grades = grades_said(url, own)
        self.vouched: VouchedShards | None = None
        if authority is not None:
            manifest = opening.manifest(url)
            self.vouched = vouched_shards(authority, url, manifest, self.index, opening.sizes(url, manifest))
            signed = self.vouched.manifest
            self.class_path, self.band, self.grades = signed.class_path, signed.band, dict(signed.grades)
        # What rows belong to besides is in the index, as in the manifest that has signed it.
        self.class_path = joint_name((self.class_path, *also_said(url, own)))
        self.packed = packed_said(url, own)
        self._version = opening.version(url, self.index)
        self.fetcher: int | None = None
        self._open()

    def _open(self) -> None:
        # A row group is decoded whole, and held in memory; a mapped file isn't.
        self._decoded = OpenShards(_MAX_DECODED)
        self._checked = CheckedOnce(self.vouched) if self.vouched is not None else None
        local, options = local_path(self.url), self._options
        if local is not None and options.directory is None:
            self._cache = ShardCache(local, None, version=self._version)
        else:
            assert options.directory is not None, "checked when it was opened first"
            self._cache = ShardCache(
                cache_directory(self.url, options),
                remote_of(self.url, options),
                max_bytes=options.max_bytes,
                root=Path(options.directory).expanduser(),
                version=self._version,
                patience_seconds=options.deadline_seconds,
            )
        _opened.add(self)

    def begin_in_child(self) -> None:
        """Forget what belongs to the parent that this process was forked off."""
        self._decoded = OpenShards(_MAX_DECODED)
        self._cache.begin_in_child()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one process."""
        return {k: v for k, v in self.__dict__.items() if k not in {"_decoded", "_cache", "_checked"}}

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
    def _is_bounded(self) -> bool:
        return self.is_remote and self._options.max_bytes is not None

    def fetch(self, shard: int) -> None:
        """Bring a shard into the cache, if it isn't there."""
        for files in files_of(self.index.shard(shard)):
            self._cache.open(files)

    def _read(self, number: int, read: Callable[[Shard], _T]) -> _T:
        """Read from a shard; from what is there then, if that's the same, where its file was replaced or touched."""
        try:
            return read(self._shard(number))
        except ChangedShardError:
            MAPPED.drop((id(self), number))
            return read(self._shard(number))

    def _shard(self, number: int) -> Shard:
        """Return a shard, mapped into memory or decoded."""
        key = (id(self), number)
        found = MAPPED.get(key) or self._decoded.get(key)
        # Of a bounded cache nothing stays mapped, so that room can be made whoever reads; only offsets are kept.
        if found is not None and not (self._is_bounded and isinstance(found, MdsShard)):
            return found
        info = self.index.shard(number)
        opened = self._opened(number, info, found)
        if not isinstance(opened, MdsShard):
            self._decoded.put(key, opened, owner=self)
            return opened
        MAPPED.put(key, opened.unmapped() if self._is_bounded else opened, owner=self)
        return opened

    def _opened(self, number: int, info: ShardInfo, known: Shard | None) -> Shard:
        files, *meta = files_of(info)
        for attempt in range(3):
            self._leave_to_fetcher(files)
            # Offsets first: who waits for room for the rows holds little of it meanwhile.
            held = [self._cache.hold(one) for one in meta]
            path, lease = self._cache.hold(files)
            try:
                return self._compared(number, path, info, lease, known, [offsets for offsets, _ in held])
            except FileNotFoundError as error:
                # Somebody who heeds no lease removed it between its opening and its mapping.
                if attempt == 2:
                    raise disk_error(error, str(path)) from error
            except EnvironmentFaultError as error:
                # Too many mappings for the process, or too little address space: what is only kept for later goes.
                if attempt == 2 or not isinstance(error.__cause__, OSError) or not MAPPED.clear():
                    raise
        raise AssertionError("the loop returns or raises")

    def _compared(
        self, number: int, path: Path, info: ShardInfo, lease: Lease | None, known: Shard | None, meta: Sequence[Path]
    ) -> Shard:
        """Return a shard that is what was signed, if anything was."""
        if self._checked is None:
            return self._made(path, info, lease, known, meta)
        self._checked.check(number, path, info)
        made = self._made(path, info, lease, known, meta)
        if known is None and isinstance(made, MdsShard) and not self._checked.is_same(number, made.status):
            raise ChangedShardError(
                f"{path} was replaced between its check and its reading. Leave data alone meanwhile."
            )
        return made

    def _leave_to_fetcher(self, files: ShardFiles) -> None:
        """Give the process that fetches ahead a moment: it's connected already, which takes several round trips."""
        if self.fetcher in (None, os.getpid()):
            return
        end = time.monotonic() + _GRACE_SECONDS
        while not self._cache.is_coming(files):
            if time.monotonic() > end:
                self.fetcher = None  # it doesn't
                return
            time.sleep(0.005)

    def _made(
        self, path: Path, info: ShardInfo, lease: Lease | None, known: Shard | None, meta: Sequence[Path]
    ) -> Shard:
        if meta:
            return SplitShard(path, meta[0], info)
        if info.format == "parquet":
            return ParquetShard(path, info, allow_pickle=self._allow_pickle).decoded()
        if known is None:
            return MdsShard(path, info, allow_pickle=self._allow_pickle, lease=lease)
        shard = copy.copy(known)
        assert isinstance(shard, MdsShard), "decoded shards are found, or made"
        shard.at(path, lease)
        return shard

    def rows(
        self, shards: NDArray[np.int64], rows: NDArray[np.int64], columns: Collection[str] | None = None
    ) -> dict[str, ColumnValues]:
        """Return rows as columns, in the order asked for; each shard is read once.

        Raises:
            DataError: a shard can't be had or isn't what its hash says, or a row can't be decoded.
        """
        groups = _by_shard(shards)
        if len(groups) > 1 and not self._is_bounded:
            try:
                opened = [(places, self._shard(number), rows[places]) for number, places in groups]
                if are_alike([shard for _, shard, _ in opened]):
                    return rows_together(cast("list[Part]", opened), columns)
            except EnvironmentFaultError as error:
                # Shards that were touched, or are too many to be mapped at once, are read one by one.
                if not isinstance(error, ChangedShardError) and getattr(error.__cause__, "errno", None) != errno.ENOMEM:
                    raise
        parts = [
            (places, self._read(number, lambda shard, mine=rows[places]: shard.rows(mine, columns)))  # type: ignore[misc]
            for number, places in groups
        ]
        return concatenate(parts, len(rows))

    def digests(self, shards: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return SHA-256 of each row as it's encoded: uint8 [rows, 32]. The manifest's row leaves hold the same."""
        found = np.empty((len(rows), 32), np.uint8)
        for number, places in _by_shard(shards):
            mine = rows[places].tolist()
            samples = self._read(number, lambda shard, mine=mine: [_sha256(shard.sample(row)) for row in mine])  # type: ignore[misc]
            found[places] = np.frombuffer(b"".join(samples), np.uint8).reshape(len(mine), 32)
        return found


def _sha256(sample: memoryview) -> bytes:
    return hashlib.sha256(sample).digest()


def _by_shard(shards: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    order = np.argsort(shards, kind="stable")
    cuts = np.flatnonzero(np.diff(shards[order])) + 1
    return [(int(shards[places[0]]), places) for places in np.split(order, cuts) if len(places)]


_opened: weakref.WeakSet[OpenedSource] = weakref.WeakSet()


def _begin_in_child() -> None:
    MAPPED.begin_in_child()
    for source in list(_opened):
        source.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


def open_sources(
    url: str | Path,
    *,
    class_path: str | None = None,
    options: CacheOptions | None = None,
    allow_pickle: bool = False,
    authority: AskedAuthority | None = None,
) -> list[OpenedSource]:
    """Open a data set, or a single source.

    Raises:
        DataError: there is neither `sources.json` nor `index.json`, or they don't hold.
        ProvenanceError: the authority doesn't vouch for a source.
    """
    options = options or CacheOptions()
    root = str(url).rstrip("/")
    if not root:
        raise DataError("A data set's place is empty. Give a directory, here or remote.")
    folder, pattern = _split_pattern(root, options)
    opening = Opening(folder, options, pattern)
    opened = partial(OpenedSource, options=options, opening=opening, authority=authority)
    if pattern is not None:
        return [opened(folder, class_path=class_path, pattern=pattern)]
    listed = opening.sources()
    if listed is None:
        return [opened(root, class_path=class_path, allow_pickle=allow_pickle)]
    for entry in listed:
        if class_path not in (None, entry["class"]) and entry["class"] != UNKNOWN_CLASS:
            raise DataError(
                f"{root}/{entry['path']} is of class {entry['class']!r}, and class_path={class_path!r} was asked for. "
                "A class is what the data say: leave class_path out, or write the source again with its right class."
            )
    return [
        opened(
            f"{root}/{entry['path']}",
            class_path=class_path or entry["class"],
            index_sha256=entry["index_sha256"],
            allow_pickle=allow_pickle,
        )
        for entry in listed
    ]


def open_all(urls: Iterable[str | Path], **options: Any) -> list[OpenedSource]:  # noqa: ANN401  (of open_sources)
    """Open several data sets, with the options of `open_sources`; a cache that is too small for them is refused.

    `authority` is who vouches for all of them, or for each by its address; they're asked now, each once.
    """
    listed, authority = list(urls), options.pop("authority", None)
    pairs = zip(listed, asked_for(listed, authority), strict=True)
    sources = [source for url, asked in pairs for source in open_sources(url, authority=asked, **options)]
    refuse_small_cache(sources)
    return sources


def refuse_small_cache(sources: Sequence[OpenedSource]) -> None:
    """Refuse a bounded cache that can't hold each shard beside the indices of all sources.

    Raises:
        EnvironmentFaultError: it can't; the message says what can.
    """
    if sources:
        one = max(sources, key=lambda source: source.index.largest_shard)
        one._cache.folder.refuse_too_small(one.index.largest_shard, f"the largest shard of {one.url}")  # noqa: SLF001


def _split_pattern(url: str, options: CacheOptions) -> tuple[str, str | None]:
    """Return the directory and the pattern of a URL that means some Parquet files, or one; None where it means all."""
    local = local_path(url)
    if local is not None and local.is_dir():
        return url, None
    if local is not None and local.is_file() and local.suffix != ".parquet":
        raise DataError(f"{url} is a file, and a folder or Parquet files are meant. Give the folder that it lies in.")
    scheme, separator, path = url.rpartition("://")
    parts = path.split("/")
    wild = [place for place, part in enumerate(parts) if glob.has_magic(part)]
    if wild:
        return scheme + separator + "/".join(parts[: wild[0]]) or ".", "/".join(parts[wild[0] :])
    if url.endswith(".parquet"):
        folder, name = scheme + separator + "/".join(parts[:-1]) or ".", glob.escape(parts[-1])
        # It was a file when it was opened before, which nobody has to be asked for.
        is_file = has_kept(folder, options, name) or remote_of(folder, options).names(name)
        return (folder, name) if is_file else (url, None)
    return url, None
