"""`index.json`, version 2: which shards a source has, and what each must be.

A source may have a hundred thousand shards, so the index is kept as columns; `shard(i)` puts one together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from cosmati.data.shards.compression import parse_compression
from cosmati.data.shards.encodings import encoding
from cosmati.errors import DataError

Format = Literal["mds", "json", "csv", "tsv", "xsv", "parquet"]
MAX_SHARD_BYTES = (1 << 32) - 1


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a shard.

    Args:
        name: of the column.
        encoding: its name.
        size: bytes of each value, None where they vary.
    """

    name: str
    encoding: str
    size: int | None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a shard.

    Args:
        basename: path below the source's directory, with forward slashes.
        num_bytes: length.
        hashes: hex digests by algorithm.
    """

    basename: str
    num_bytes: int
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard.

    Args:
        num_rows: of the shard.
        columns: in the order in which they're written.
        raw: the file that is read; for Parquet, the file that holds the row group.
        zip: the file that is fetched, where shards are compressed.
        compression: of it.
        size_limit: that the writer kept, bytes.
        format: of the file.
        row_group: of a Parquet file; 0 otherwise.
        meta: of JSON, CSV, TSV and XSV, the file with the offsets of the rows, and the same compressed.
        newline: what ends each of their rows.
        separator: what is between the values of a row of CSV, TSV and XSV.
    """

    num_rows: int
    columns: tuple[Column, ...]
    raw: FileInfo
    zip: FileInfo | None = None
    compression: str | None = None
    size_limit: int | None = None
    format: Format = "mds"
    row_group: int = 0
    meta: tuple[FileInfo, FileInfo | None] | None = None
    newline: str = ""
    separator: str = ""


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The shards of a source.

    Attributes:
        shard_rows: int64 [shards].
        digest: SHA-256 of the index file, in hex.
        extra: what else stands in it; ours is `cosmati`.
    """

    shard_rows: NDArray[np.int64]
    digest: str
    extra: Mapping[str, Any]
    _layouts: tuple[_Layout, ...]
    _layout_of: NDArray[np.int32]
    _names: tuple[bytes, ...]
    _num_bytes: NDArray[np.int64]
    _hashes: tuple[bytes, ...]

    @property
    def num_shards(self) -> int:
        """Shards of the source."""
        return len(self.shard_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the source."""
        return int(self.shard_rows.sum())

    @property
    def largest_shard(self) -> int:
        """Bytes that the largest shard takes at once: each of its files, fetched or read, with the offsets' if any."""
        files = self._num_bytes.reshape(-1, _FILES // 2, 2).max(2, initial=0)
        return int(files.sum(1).max(initial=0))

    @property
    def file_names(self) -> list[str]:
        """Names of all files, compressed and not."""
        return [name.decode() for name in self._names if name]

    def shard(self, number: int) -> ShardInfo:
        """Return one shard."""
        layout = self._layouts[self._layout_of[number]]
        first = _FILES * number
        raw, packed, meta, packed_meta = (self._file(first + which, layout) for which in range(_FILES))
        return ShardInfo(
            num_rows=int(self.shard_rows[number]),
            columns=layout.columns,
            raw=raw or FileInfo("", 0),
            zip=packed,
            compression=layout.compression,
            size_limit=layout.size_limit,
            format=layout.format,
            meta=None if meta is None else (meta, packed_meta),
            newline=layout.newline,
            separator=layout.separator,
        )

    def digest_of_first(self, num_shards: int) -> str:
        """Return SHA-256 over what the index says of the first shards' rows and files, in hex."""
        rows, files = self.shard_rows[:num_shards], slice(_FILES * num_shards)
        digest = hashlib.sha256(rows.astype("<i8").tobytes() + self._num_bytes[files].astype("<i8").tobytes())
        for columns in (self._names[files], self._hashes[files]):
            digest.update(b"\0".join(columns) + b"\1")
        return digest.hexdigest()

    def _file(self, place: int, layout: _Layout) -> FileInfo | None:
        if self._num_bytes[place] < 0:
            return None
        digests = self._hashes[place].decode().split()
        return FileInfo(
            self._names[place].decode(), int(self._num_bytes[place]), dict(zip(layout.hashes, digests, strict=True))
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the shards of one write have in common."""

    columns: tuple[Column, ...]
    compression: str | None
    hashes: tuple[str, ...]
    size_limit: int | None
    format: Format
    newline: str
    separator: str


class _FileJson(msgspec.Struct, gc=False):
    basename: str
    bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHARD_BYTES)]
    hashes: dict[str, str]


class _ShardJson(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    version: Literal[2]
    format: Literal["mds", "json", "csv", "tsv", "xsv"]
    samples: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHARD_BYTES)]
    size_limit: int | None
    compression: str | None
    hashes: list[str]
    raw_data: _FileJson | None
    zip_data: _FileJson | None
    column_names: list[str] | None = None
    column_encodings: list[str] | None = None
    column_sizes: list[int | None] | None = None
    # What follows stands in JSON, CSV, TSV and XSV only.
    columns: dict[str, str] | None = None
    newline: str | None = None
    separator: str | None = None
    raw_meta: _FileJson | None = None
    zip_meta: _FileJson | None = None


_FILES = 4
"""Files that a shard may have: data and meta, each as it's read and as it's fetched."""


def parse_index(data: bytes, *, name: str) -> ShardIndex:
    """Read an index.

    Args:
        data: the file.
        name: of the file, for messages.

    Raises:
        DataError: it isn't an index of MDS version 2, or names a file outside its directory.
    """
    try:
        head = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(head.pop("version", b"null"))
        if version != 2:
            raise DataError(f"it has version {version!r}; this reads version 2 of MDS.")
        shards = msgspec.json.decode(head.pop("shards", b"null"), type=list[msgspec.Raw])
        extra = {key: msgspec.json.decode(value) for key, value in head.items()}
        return _columnar(shards, hashlib.sha256(data).hexdigest(), extra)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{name} isn't an index of MDS version 2: {error}. Fetch it again, or have it written again."
        raise DataError(msg) from error
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _columnar(shards: Sequence[msgspec.Raw], digest: str, extra: Mapping[str, Any]) -> ShardIndex:
    layouts: list[_Layout] = []
    layout_of = np.empty(len(shards), np.int32)
    names: list[bytes] = []
    hashes: list[bytes] = []
    num_bytes: list[int] = []
    like: _ShardJson | None = None
    rows = np.empty(len(shards), np.int64)
    decode = msgspec.json.Decoder(_ShardJson).decode
    for number, text in enumerate(shards):
        # One at a time: a hundred thousand shards as objects take 300 MB.
        shard = decode(text)
        rows[number] = shard.samples
        if like is None or not _alike(shard, like):
            # One writer's shards are alike, so comparing with the one before finds nearly all.
            layouts.append(_layout(shard, number))
            like = shard
        layout_of[number] = len(layouts) - 1
        for file in (shard.raw_data, shard.zip_data, shard.raw_meta, shard.zip_meta):
            if file is None:
                names.append(b"")
                hashes.append(b"")
                num_bytes.append(-1)
                continue
            _check_file(file, shard.hashes, number)
            names.append(file.basename.encode())
            hashes.append(" ".join([file.hashes[name] for name in shard.hashes]).encode())
            num_bytes.append(file.bytes)
    if len({*names}) - (b"" in names) < len(names) - names.count(b""):
        twice = next(name for name, count in Counter(names).items() if name and count > 1)
        raise DataError(f"several shards are in one file, {twice.decode()}: their rows would be read twice.")
    sizes = np.asarray(num_bytes, np.int64)
    return ShardIndex(rows, digest, extra, tuple(layouts), layout_of, tuple(names), sizes, tuple(hashes))


def _check_file(file: _FileJson, hashes: Sequence[str], number: int) -> None:
    if not _is_below(file.basename):
        msg = f"shard {number} names the file {file.basename!r}, which isn't below the source's directory."
        raise DataError(msg)
    for name in hashes:
        if not re.fullmatch("[0-9a-f]+", file.hashes.get(name, "")):
            raise DataError(f"shard {number} lacks a hash of {name} for {file.basename}, or has one that isn't hex.")


def _alike(one: _ShardJson, other: _ShardJson) -> bool:
    return (
        one.column_names == other.column_names
        and one.format == other.format
        and one.columns == other.columns
        and (one.newline, one.separator) == (other.newline, other.separator)
        and (one.raw_meta is None) == (other.raw_meta is None)
        and (one.zip_meta is None) == (other.zip_meta is None)
        and one.column_encodings == other.column_encodings
        and one.column_sizes == other.column_sizes
        and one.compression == other.compression
        and one.hashes == other.hashes
        and one.size_limit == other.size_limit
        and (one.raw_data is None) == (other.raw_data is None)
        and (one.zip_data is None) == (other.zip_data is None)
    )


def _layout(shard: _ShardJson, number: int) -> _Layout:
    columns = _columns(shard, number)
    if len({column.name for column in columns}) != len(columns):
        raise DataError(f"shard {number} has several columns of one name.")
    metas = (shard.raw_meta is not None, shard.zip_meta is not None)
    due = (False, False) if shard.format == "mds" else (True, shard.compression is not None)
    if shard.raw_data is None or (shard.zip_data is None) != (shard.compression is None) or metas != due:
        raise DataError(
            f"shard {number} of the format {shard.format} doesn't name its files, or those that are compressed."
        )
    if any(" " in h or not h for h in shard.hashes) or len(set(shard.hashes)) != len(shard.hashes):
        raise DataError(f"shard {number} names the hashes {shard.hashes}, which aren't hashes, or repeat.")
    if shard.compression is not None:
        parse_compression(shard.compression)
    separator = {"csv": ",", "tsv": "\t"}.get(shard.format, shard.separator or "")
    if shard.format != "mds" and (not shard.newline or not (separator or shard.format == "json")):
        raise DataError(f"shard {number} doesn't say what is between its rows and values (newline, separator).")
    hashes = tuple(shard.hashes)
    return _Layout(columns, shard.compression, hashes, shard.size_limit, shard.format, shard.newline or "", separator)


def _columns(shard: _ShardJson, number: int) -> tuple[Column, ...]:
    names, kinds, sizes = shard.column_names, shard.column_encodings, shard.column_sizes
    if shard.format == "json" and shard.columns is not None:
        names, kinds = list(shard.columns), list(shard.columns.values())
    if names is None or kinds is None or (sizes is None and shard.format == "mds"):
        raise DataError(f"shard {number} of the format {shard.format} doesn't say what its columns are.")
    if len({len(one) for one in (names, kinds, names if sizes is None else sizes)}) != 1:
        raise DataError(f"shard {number} has columns whose names, encodings and sizes don't match.")
    if shard.format != "mds":
        unknown = sorted({*kinds} - {"str", "int", "float"})
        if unknown:
            raise DataError(f"shard {number} has the encoding {unknown[0]!r}; {shard.format} has str, int and float.")
        return tuple(Column(name, kind, None) for name, kind in zip(names, kinds, strict=True))
    columns = []
    for name, kind, size in zip(names, kinds, sizes or (), strict=True):
        fixed = None if kind == "pkl" else encoding(kind).size
        if size != fixed:
            raise DataError(f"shard {number} says that column {name!r} has {size} bytes a row; {kind} has {fixed}.")
        columns.append(Column(name, kind, size))
    return tuple(columns)


def _is_below(basename: str) -> bool:
    """Whether a path stays below the directory that it's relative to, on any system."""
    if _PLAIN_NAME.fullmatch(basename):
        return True
    parts = basename.replace("\\", "/").split("/")
    return bool(basename) and not {"", "..", "."} & set(parts) and "\0" not in basename and ":" not in parts[0]


def dump_index(shards: Sequence[ShardInfo], extra: Mapping[str, Any]) -> bytes:
    """Return the file for some shards; equal shards give equal bytes."""
    content = {**extra, "version": 2, "shards": [shard_to_json(shard) for shard in shards]}
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def shard_to_json(shard: ShardInfo) -> dict[str, Any]:
    """Return a shard as it stands in an index."""
    return {
        "version": 2,
        "format": "mds",
        "samples": shard.num_rows,
        "size_limit": shard.size_limit,
        "column_names": [column.name for column in shard.columns],
        "column_encodings": [column.encoding for column in shard.columns],
        "column_sizes": [column.size for column in shard.columns],
        "compression": shard.compression,
        "hashes": sorted(shard.raw.hashes),
        "raw_data": _file_json(shard.raw),
        "zip_data": None if shard.zip is None else _file_json(shard.zip),
    }


def shard_from_json(content: Mapping[str, Any]) -> ShardInfo:
    """Read one shard as `shard_to_json` gives it."""
    text = json.dumps({"version": 2, "shards": [content]}).encode()
    return parse_index(text, name="a shard's entry").shard(0)


def _file_json(file: FileInfo) -> dict[str, Any]:
    return {"basename": file.basename, "bytes": file.num_bytes, "hashes": dict(file.hashes)}
