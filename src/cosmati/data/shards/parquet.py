"""Parquet as shards: a row group is a shard. Read as it comes, and converted from MDS and back without losing a bit.

A file that came from MDS says so in its schema: each column's MDS encoding, the class, the manifest's digest. Columns
whose encoding Parquet has no type for hold the encoded bytes, so a row's digest is the same on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.data.shards.encodings import encoding
from cosmati.data.shards.gathering import Values
from cosmati.data.shards.index import Column, FileInfo, ShardInfo
from cosmati.data.shards.mds import encode_sample
from cosmati.data.shards.remote import EnvironmentFaultError, Remote
from cosmati.errors import DataError, MissingExtraError
from cosmati.storage.atomic import draft_of, publish

METADATA_KEY = b"cosmati"
_PLAIN = ("str", "bytes", "int")


@dataclass(frozen=True, eq=False)
class ParquetIndex:
    """The row groups of the Parquet files of a directory, in the order of names (see `ShardIndex`).

    Attributes:
        shard_rows: int64 [row groups].
        digest: SHA-256 over names, lengths and footers, in hex.
        extra: what the files say of their provenance.
        shards: one for each row group.
    """

    shard_rows: NDArray[np.int64]
    digest: str
    extra: Mapping[str, Any]
    shards: tuple[ShardInfo, ...]

    @property
    def num_shards(self) -> int:
        """Row groups."""
        return len(self.shards)

    @property
    def num_rows(self) -> int:
        """Rows."""
        return int(self.shard_rows.sum())

    @property
    def largest_shard(self) -> int:
        """Bytes of the largest file."""
        return max((shard.raw.num_bytes for shard in self.shards), default=0)

    @property
    def file_names(self) -> list[str]:
        """Names of all files."""
        return sorted({shard.raw.basename for shard in self.shards})

    def digest_of_first(self, num_shards: int) -> str:
        """Return SHA-256 over what is known of the first row groups, in hex."""
        return hashlib.sha256(repr(self.shards[:num_shards]).encode()).hexdigest()

    def shard(self, number: int) -> ShardInfo:
        """Return one row group."""
        return self.shards[number]


def parquet_index(remote: Remote, pattern: str | None = None) -> ParquetIndex | None:
    """Read the footers of a directory's Parquet files, those of its folders too; None where there are none.

    Args:
        remote: the directory.
        pattern: of the files, below the directory; None takes `**/*.parquet`, save what starts with `_` or a dot.

    Raises:
        DataError: a file isn't Parquet, or the files have different columns.
    """
    names = remote.names(pattern or "**/*.parquet")
    if pattern is None:
        names = [name for name in names if not any(part.startswith(("_", ".")) for part in name.split("/"))]
    if not names:
        return None
    digest = hashlib.sha256()
    shards: list[ShardInfo] = []
    extra: dict[str, Any] = {}
    for name in names:
        with remote.opened(name) as stream:
            num_bytes = stream.seek(0, 2)
            stream.seek(0)
            footer = _metadata(stream, f"{remote.url}/{name}")
        schema = footer.schema.to_arrow_schema()
        told = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
        columns = _columns(schema, told, name)
        extra = {"cosmati": told} if told else extra
        rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        digest.update(f"{name} {num_bytes} {rows} {columns}".encode())
        file = FileInfo(name, num_bytes)
        shards += [ShardInfo(count, columns, file, format="parquet", row_group=n) for n, count in enumerate(rows)]
    if len({shard.columns for shard in shards}) > 1:
        raise DataError(_differing(remote.url, shards))
    return ParquetIndex(
        np.asarray([shard.num_rows for shard in shards], np.int64), digest.hexdigest(), extra, tuple(shards)
    )


def dump_parquet_index(index: ParquetIndex) -> bytes:
    """Return what `load_parquet_index` makes the same index of."""
    shards = [
        [
            one.num_rows,
            [[column.name, column.encoding, column.size] for column in one.columns],
            *(one.raw.basename, one.raw.num_bytes, one.row_group),
        ]
        for one in index.shards
    ]
    return json.dumps({"digest": index.digest, "extra": index.extra, "shards": shards}).encode()


def load_parquet_index(text: bytes) -> ParquetIndex:
    """Return the index that was kept; its text is known to be what was kept."""
    content = json.loads(text)
    shards = tuple(
        ShardInfo(rows, tuple(Column(*one) for one in columns), FileInfo(name, size), format="parquet", row_group=group)
        for rows, columns, name, size, group in content["shards"]
    )
    rows = np.asarray([shard.num_rows for shard in shards], np.int64)
    return ParquetIndex(rows, content["digest"], content["extra"], shards)


def _differing(url: str, shards: Sequence[ShardInfo]) -> str:
    other = next(shard for shard in shards if shard.columns != shards[0].columns)
    told = [
        f"{shard.raw.basename} has {', '.join(f'{c.name} ({c.encoding})' for c in shard.columns)}"
        for shard in (shards[0], other)
    ]
    return (
        f"The Parquet files in {url} have different columns: {'; '.join(told)}. Put each kind in its own directory, or "
        "give a pattern."
    )


def _metadata(source: Any, name: str) -> Any:  # noqa: ANN401  (pyarrow has no types)
    parquet = _pyarrow()[1]
    try:
        return parquet.read_metadata(source)
    except Exception as error:
        raise EnvironmentFaultError(f"{name} isn't a Parquet file, or its footer is damaged: {error}.") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("Parquet needs pyarrow: pip install 'cosmati[streaming]'.") from error
    return pa, pq


def _columns(schema: Any, told: Mapping[str, Any], name: str) -> tuple[Column, ...]:  # noqa: ANN401  (pyarrow)
    if "columns" in told:
        pairs = [(str(column), str(kind)) for column, kind in told["columns"]]
    else:
        pairs = [(field.name, _encoding_of(field.type, field.name, name)) for field in schema]
    names = [column for column, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(column for column in names if names.count(column) > 1)
        raise DataError(f"{name} has several columns of the name {twice!r}. Rename all but one of them.")
    return tuple(Column(column, kind, encoding(kind).size) for column, kind in pairs)


def _encoding_of(kind: Any, column: str, name: str) -> str:  # noqa: ANN401  (pyarrow)
    pa, _ = _pyarrow()
    types = pa.types
    if types.is_boolean(kind):
        return "uint8"
    if types.is_integer(kind) or types.is_floating(kind):
        return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    if types.is_string(kind) or types.is_large_string(kind):
        return "str"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = kind.value_type
        if types.is_integer(item) or types.is_floating(item):
            shape = f":{kind.list_size}" if types.is_fixed_size_list(kind) else ""
            return f"ndarray:{_encoding_of(item, column, name)}{shape}"
    if types.is_struct(kind) or types.is_list(kind) or types.is_map(kind):
        return "json"
    raise DataError(f"Column {column!r} of {name} has the type {kind}, which no row can hold. Convert it first.")


class ParquetShard:
    """One row group, decoded whole when it's first read (see `MdsShard`).

    Args:
        path: of the file.
        info: what the index says of it.
        allow_pickle: decode columns of the encoding `pkl`.
    """

    def __init__(self, path: Path, info: ShardInfo, *, allow_pickle: bool = False) -> None:
        self._path, self._info = path, info
        self._kinds = {c.name: encoding(c.encoding, allow_pickle=allow_pickle) for c in info.columns}
        self.num_rows = info.num_rows
        footer = _metadata(path, str(path))
        told = (footer.schema.to_arrow_schema().metadata or {}).get(METADATA_KEY)
        self._is_ours = told is not None and "columns" in json.loads(told)
        if info.row_group >= footer.num_row_groups or footer.row_group(info.row_group).num_rows != info.num_rows:
            raise EnvironmentFaultError(
                f"{path} isn't the file that was indexed: row group {info.row_group} is another. Open it again."
            )

    @cached_property
    def _table(self) -> Any:  # noqa: ANN401  (pyarrow)
        parquet = _pyarrow()[1]
        try:
            return parquet.ParquetFile(self._path).read_row_group(self._info.row_group, columns=list(self._kinds))
        except Exception as error:
            raise EnvironmentFaultError(
                f"{self._path}, row group {self._info.row_group}, can't be read: {error}."
            ) from error

    def decoded(self) -> ParquetShard:
        """Return the row group, read: from here on its file isn't needed."""
        assert self._table is not None
        return self

    def sample(self, row: int) -> memoryview:
        """Return a row as MDS encodes it."""
        values = {name: column[0] for name, column in self.rows(np.asarray([row])).items()}
        return memoryview(encode_sample(self._info.columns, values))

    def row(self, row: int) -> dict[str, Any]:
        """Return a row's values by column."""
        return {name: column[0] for name, column in self.rows(np.asarray([row])).items()}

    def rows(self, indices: NDArray[np.int64], columns: Collection[str] | None = None) -> dict[str, Values]:
        """Return rows as columns, in the order asked for."""
        table = self._table.take(indices)
        chosen = [column for column in self._info.columns if columns is None or column.name in columns]
        return {column.name: self._column(table, column) for column in chosen}

    def _column(self, table: Any, column: Column) -> Values:  # noqa: ANN401  (pyarrow)
        values, kind = table[column.name].combine_chunks(), self._kinds[column.name]
        holds_lists = not self._is_ours and (kind.shape or kind.header is not None)
        if values.null_count or (holds_lists and values.flatten().null_count):
            raise DataError(
                f"Column {column.name!r} of {self._path} has nulls, which no row can hold. Fill them first."
            )
        if kind.dtype is not None:
            flat = values.flatten() if kind.shape else values
            array = np.asarray(flat.to_numpy(zero_copy_only=False), kind.dtype)
            # Arrow's memory is read-only, and tensors are made of it.
            return array.reshape(len(values), *kind.shape).copy()
        if self._is_ours and column.encoding not in _PLAIN:
            return [kind.decode(memoryview(value)) for value in values.to_pylist()]
        if kind.header is not None:
            dtype = np.dtype(column.encoding.split(":")[1])
            return [np.asarray(value.values.to_numpy(zero_copy_only=False), dtype) for value in values]
        return list(values.to_pylist())


def write_parquet(
    path: Path, columns: Sequence[Column], rows: Iterator[Mapping[str, Any]], told: Mapping[str, Any]
) -> None:
    """Write rows as one Parquet file of one row group, so that `ParquetShard` gives back the same rows, bit for bit.

    Args:
        path: of the file.
        columns: with their MDS encodings.
        rows: values by column.
        told: provenance for the schema's metadata: class, manifest digest.
    """
    pa, pq = _pyarrow()
    kinds = [(column, encoding(column.encoding, allow_pickle=True)) for column in columns]
    lists: dict[str, list[Any]] = {column.name: [] for column in columns}
    for row in rows:
        for column, kind in kinds:
            value = row[column.name]
            if kind.dtype is not None:
                value = np.asarray(value, kind.dtype).reshape(-1).tolist() if kind.shape else value
            elif column.encoding not in _PLAIN:
                value = kind.encode(value)
            lists[column.name].append(value)
    fields = []
    for column, kind in kinds:
        if kind.dtype is not None:
            item = pa.from_numpy_dtype(kind.dtype.newbyteorder("="))
            fields.append((column.name, pa.list_(item, int(np.prod(kind.shape))) if kind.shape else item))
        else:
            fields.append((column.name, pa.string() if column.encoding == "str" else pa.binary()))
    content = {**told, "columns": [[column.name, column.encoding] for column in columns]}
    schema = pa.schema(fields, metadata={METADATA_KEY: json.dumps(content, sort_keys=True).encode()})
    table = pa.table([pa.array(lists[name], kind) for name, kind in fields], schema=schema)
    draft = draft_of(path)
    pq.write_table(table, draft, row_group_size=max(1, len(table)), compression="zstd")
    publish(draft, path)
