"""One shard of MDS version 2: `u32 n | u32 offset[n + 1] | header | rows`, little-endian.

A row is one u32 length for each column whose values vary, in order, then all values without padding. Readers map the
file and never read the header between offsets and rows.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.data.shards.encodings import Encoding, encoding
from cosmati.data.shards.index import MAX_SHARD_BYTES, Column, ShardInfo
from cosmati.errors import DataError

Values = NDArray[Any] | list[Any]


class CorruptShardError(DataError):
    """A shard whose bytes can't be what its writer wrote."""


def encode_sample(columns: Sequence[Column], row: Mapping[str, Any]) -> bytes:
    """Return a row as it's written.

    Raises:
        DataError: the row has other columns, or a value isn't of its column's encoding.
    """
    if row.keys() != {column.name for column in columns}:
        wanted, found = ", ".join(column.name for column in columns), ", ".join(sorted(row))
        raise DataError(f"A row has the columns {found}, where {wanted} were due.")
    lengths, values = [], []
    for column in columns:
        try:
            # Who writes a pickle has the objects already; the danger is in reading.
            value = encoding(column.encoding, allow_pickle=True).encode(row[column.name])
        except DataError as error:
            raise DataError(f"Column {column.name!r}: {error}") from error
        if column.size is None:
            lengths.append(len(value))
        values.append(value)
    try:
        return struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(values)
    except struct.error as error:
        raise DataError("A value has 4 GiB or more, which no MDS row can hold. Split it.") from error


def encode_shard(columns: Sequence[Column], rows: Sequence[bytes], *, size_limit: int | None = None) -> bytes:
    """Return the file of a shard.

    Raises:
        DataError: it would have 4 GiB or more, which its offsets can't say.
    """
    header = {
        "column_encodings": [column.encoding for column in columns],
        "column_names": [column.name for column in columns],
        "column_sizes": [column.size for column in columns],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": size_limit,
        "version": 2,
    }
    head = json.dumps(header, sort_keys=True).encode()
    start = 4 + 4 * (len(rows) + 1) + len(head)
    offsets = start + np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
    if offsets[-1] > MAX_SHARD_BYTES:
        raise DataError(f"A shard of {offsets[-1]} bytes passes 4 GiB. Write smaller ones: lower size_limit.")
    return b"".join([struct.pack("<I", len(rows)), offsets.astype("<u4").tobytes(), head, *rows])


class MdsShard:
    """A shard mapped into memory. Nothing is read before it's asked for, and nothing is held but the mapping.

    Args:
        path: of the uncompressed file.
        info: what the index says of it.
        allow_pickle: decode columns of the encoding `pkl`.

    Raises:
        CorruptShardError: the file's structure doesn't hold.
        DataError: a column has an encoding that can't be decoded.
    """

    def __init__(self, path: Path, info: ShardInfo, *, allow_pickle: bool = False) -> None:
        self._name = info.raw.basename or path.name
        self._columns = [(c.name, encoding(c.encoding, allow_pickle=allow_pickle)) for c in info.columns]
        self._num_lengths = sum(kind.size is None for _, kind in self._columns)
        self._fixed_bytes = sum(kind.size or 0 for _, kind in self._columns) + 4 * self._num_lengths
        self.num_rows = info.num_rows
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise self._corrupt(f"has {size} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._view = memoryview(self._map)
        self._offsets = self._checked_offsets(size)

    def _corrupt(self, what: str) -> CorruptShardError:
        msg = f"Shard {self._name} {what}: it's damaged. Remove it from the cache, so that it's fetched again."
        return CorruptShardError(msg)

    def _checked_offsets(self, size: int) -> NDArray[np.int64]:
        num_rows = int.from_bytes(self._view[:4], "little")
        if num_rows != self.num_rows:
            raise self._corrupt(f"says {num_rows} rows, and its index {self.num_rows}")
        if 4 + 4 * (num_rows + 1) > size:
            raise self._corrupt(f"has {size} bytes, too few for the offsets of {num_rows} rows")
        # Copied, in 64 bits: differences are then safe, and a batch needs no cast. 4 MB for 500,000 rows.
        offsets = np.frombuffer(self._map, "<u4", num_rows + 1, 4).astype(np.int64)
        in_order = bool((np.diff(offsets) >= self._fixed_bytes).all())
        if offsets[0] < 4 + 4 * (num_rows + 1) or offsets[-1] != size or not in_order:
            raise self._corrupt("has offsets that don't rise to its length, or leave a row no room")
        return offsets

    def sample(self, row: int) -> memoryview:
        """Return a row as it's encoded."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"Shard {self._name} has {self.num_rows} rows, and no row {row}.")
        return self._view[int(self._offsets[row]) : int(self._offsets[row + 1])]

    def row(self, row: int) -> dict[str, Any]:
        """Return a row's values by column.

        Raises:
            CorruptShardError: its lengths don't fill it, or a value can't be decoded.
        """
        sample = self.sample(row)
        start = 4 * self._num_lengths
        lengths = iter(np.frombuffer(sample[:start], "<u4").tolist())
        values = {}
        for name, kind in self._columns:
            stop = start + (next(lengths) if kind.size is None else kind.size)
            if stop > len(sample):
                raise self._corrupt(f"has a row {row} that ends within column {name!r}")
            try:
                values[name] = kind.decode(sample[start:stop])
            except DataError as error:
                raise CorruptShardError(f"Shard {self._name}, row {row}, column {name!r}: {error}") from error
            start = stop
        if start != len(sample):
            raise self._corrupt(f"has a row {row} that is {len(sample) - start} bytes longer than its values")
        return values

    def rows(self, indices: NDArray[np.int64], columns: Collection[str] | None = None) -> dict[str, Values]:
        """Return rows as columns, in the order asked for.

        Columns of numbers become arrays [rows, ...], gathered at once; where all rows lay their values out alike, all
        columns are gathered without a loop over rows.

        Args:
            indices: int64 [n].
            columns: which ones; None for all.

        Raises:
            CorruptShardError: a row can't be decoded.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_rows:
            raise IndexError(f"Shard {self._name} has {self.num_rows} rows; rows {indices} were asked for.")
        starts = self._offsets[indices]
        lengths = self._lengths(starts)
        sizes = self._offsets[indices + 1] - starts
        wrong = np.flatnonzero(lengths.sum(0) + self._fixed_bytes != sizes)
        if len(wrong):
            raise self._corrupt(f"has a row {int(indices[wrong[0]])} whose values don't fill it")
        at = starts + 4 * self._num_lengths
        found: dict[str, Values] = {}
        variable = 0
        for name, kind in self._columns:
            if kind.size is None:
                width, variable = lengths[variable], variable + 1
            else:
                width = np.full(len(indices), kind.size)
            if columns is None or name in columns:
                found[name] = self._column(name, kind, indices, at, width)
            at = at + width
        return found

    def _lengths(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths that rows start with: int64 [variable columns, rows]."""
        if not self._num_lengths:
            return np.zeros((0, len(starts)), np.int64)
        raw = self._gather(starts, 4 * self._num_lengths)
        return raw.view("<u4").astype(np.int64).T

    def _gather(self, starts: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
        """Return equally long pieces: uint8 [pieces, width], a copy."""
        # Every place at which a piece can start, as records of `width` bytes: each is copied in one go.
        places = np.ndarray((len(self._bytes) - width + 1,), np.dtype((np.void, width)), self._map, strides=(1,))
        return places[starts].view(np.uint8).reshape(len(starts), width)

    def _column(
        self, name: str, kind: Encoding, indices: NDArray[np.int64], at: NDArray[np.int64], width: NDArray[np.int64]
    ) -> Values:
        if kind.dtype is not None:
            raw = self._gather(at, int(kind.size or 0))
            return raw.view(kind.dtype).reshape(len(indices), *kind.shape)
        if kind.header is not None and len(indices):
            array = self._arrays(kind, at, width)
            if array is not None:
                return array
        values = []
        for index, start, size in zip(indices.tolist(), at.tolist(), width.tolist(), strict=True):
            try:
                values.append(kind.decode(self._view[start : start + size]))
            except DataError as error:
                raise CorruptShardError(f"Shard {self._name}, row {index}, column {name!r}: {error}") from error
        return values

    def _arrays(self, kind: Encoding, at: NDArray[np.int64], width: NDArray[np.int64]) -> NDArray[Any] | None:
        """Return arrays that carry their shapes as one array, if all of them carry the same; None otherwise."""
        if (width != width[0]).any() or not width[0]:
            return None
        raw = self._gather(at, int(width[0]))
        assert kind.header is not None, "checked"
        dtype, shape, start = kind.header(memoryview(raw[0].tobytes()))
        if (raw[:, :start] != raw[0, :start]).any():
            return None
        return np.ascontiguousarray(raw[:, start:]).view(dtype).reshape(len(at), *shape)
