"""One shard of JSON, CSV, TSV or XSV as mosaicml-streaming writes them: a file of rows, and a meta file of offsets.

The meta file is `u32 n | u32 offset[n + 1] | header`, little-endian; row i is the bytes between offsets i and i + 1 of
the other file, its newline included. Values aren't quoted: none holds the separator or the newline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.data.rows import ColumnValues
from cosmati.data.shards.index import ShardInfo
from cosmati.data.shards.mds import BrokenShardError, CorruptShardError

_PARSED: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
_DTYPES = {"int": np.int64, "float": np.float64}


class SplitShard:
    """A shard whose rows are lines, held in memory (see `MdsShard`).

    Args:
        path: of the uncompressed file of rows.
        meta: of the uncompressed file of offsets.
        info: what the index says of them.

    Raises:
        BrokenShardError: the offsets don't fit the rows.
    """

    def __init__(self, path: Path, meta: Path, info: ShardInfo) -> None:
        self._info = info
        self.num_rows = info.num_rows
        head = np.fromfile(meta, "<u4", 1)
        if len(head) != 1 or int(head[0]) != info.num_rows:
            raise self._broken(f"has offsets of {head.tolist()} rows, and its index {info.num_rows}")
        self._offsets = np.fromfile(meta, "<u4", info.num_rows + 1, offset=4).astype(np.int64)
        size = path.stat().st_size
        is_whole = len(self._offsets) == info.num_rows + 1 and self._offsets[-1] == size
        if not is_whole or (np.diff(self._offsets) < len(info.newline.encode())).any():
            raise self._broken("has offsets that don't rise to its length, or leave a row no room")
        self._view = memoryview(path.read_bytes())

    def _broken(self, what: str) -> BrokenShardError:
        return BrokenShardError(str(self._corrupt(what)))

    def _corrupt(self, what: str) -> CorruptShardError:
        msg = f"Shard {self._info.raw.basename} {what}: it's damaged. Fetch it again, or write the source again."
        return CorruptShardError(msg)

    def sample(self, row: int) -> memoryview:
        """Return a row as it's encoded, its newline included."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"Shard {self._info.raw.basename} has {self.num_rows} rows, and no row {row}.")
        return self._view[int(self._offsets[row]) : int(self._offsets[row + 1])]

    def row(self, row: int) -> dict[str, Any]:
        """Return a row's values by column.

        Raises:
            CorruptShardError: they can't be read.
        """
        try:
            text = str(self.sample(row), "utf-8")
            if not text.endswith(self._info.newline):
                raise ValueError(f"it doesn't end with {self._info.newline!r}")
            text = text.removesuffix(self._info.newline)
            return self._from_json(text) if self._info.format == "json" else self._from_values(text)
        except (ValueError, KeyError, RecursionError) as error:
            raise self._corrupt(f"has a row {row} that can't be read ({type(error).__name__}: {error})") from error

    def _from_json(self, text: str) -> dict[str, Any]:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"{text[:40]} isn't an object")  # noqa: TRY004  (of the file, not of the caller)
        return {column.name: values[column.name] for column in self._info.columns}

    def _from_values(self, text: str) -> dict[str, Any]:
        values = text.split(self._info.separator)
        if len(values) != len(self._info.columns):
            raise ValueError(f"{len(values)} values stand where {len(self._info.columns)} were due")
        return {c.name: _PARSED[c.encoding](value) for c, value in zip(self._info.columns, values, strict=True)}

    def rows(self, indices: NDArray[np.int64], columns: Collection[str] | None = None) -> dict[str, ColumnValues]:
        """Return rows as columns, in the order asked for; numbers that fit int64 or float64 as arrays [rows].

        Raises:
            CorruptShardError: a row can't be read.
        """
        read = [self.row(row) for row in indices.tolist()]
        wanted = [column for column in self._info.columns if columns is None or column.name in columns]
        return {c.name: _column([row[c.name] for row in read], c.encoding) for c in wanted}


def _column(values: list[Any], kind: str) -> ColumnValues:
    # The writer of JSON lets booleans pass as int, and the reader numbers of any size.
    if kind == "str" or {type(value) for value in values} != {_PARSED[kind]}:
        return values
    try:
        return np.asarray(values, _DTYPES[kind])
    except OverflowError:
        return values
