"""One shard of MDS version 2: `u32 n | u32 offset[n + 1] | header | rows`, little-endian.

A row is one u32 length for each column whose values vary, in order, then all values without padding. Readers map the
file and never read the header between offsets and rows.
"""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.data.shards.encodings import encoding
from cosmati.data.shards.gathering import Values, rows_together
from cosmati.data.shards.index import MAX_SHARD_BYTES, Column, ShardInfo
from cosmati.data.shards.remote import EnvironmentFaultError, disk_error
from cosmati.errors import DataError
from cosmati.storage.lease import Lease
from cosmati.storage.mapped import map_file


class CorruptShardError(DataError):
    """A shard, or a row of it, whose bytes can't be what its writer wrote."""


class BrokenShardError(CorruptShardError, EnvironmentFaultError):
    """A shard whose structure doesn't hold, whatever the row."""


class ChangedShardError(EnvironmentFaultError):
    """A mapped shard whose file isn't the one that was mapped."""


def signature(status: os.stat_result) -> tuple[int, int, int]:
    """Return what changes when a file is replaced or written to."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def encode_sample(columns: Sequence[Column], row: Mapping[str, Any]) -> bytes:
    """Return a row as it's written.

    Raises:
        DataError: the row has other columns, or a value isn't of its column's encoding.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"A row is a {type(row).__name__}, and a dictionary by column was due.")
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


def columns_of(encodings: Mapping[str, str]) -> tuple[Column, ...]:
    """Return columns, given their encodings by name.

    Raises:
        DataError: there are none, or an encoding isn't known.
    """
    if not encodings:
        raise DataError("A row needs a column. Give columns={'text': 'str'}, say.")
    return tuple(Column(name, kind, encoding(kind, allow_pickle=True).size) for name, kind in encodings.items())


def check_size_limit(size_limit: object) -> None:
    """Refuse what is no size of a shard.

    Raises:
        DataError: it isn't one.
    """
    if not isinstance(size_limit, int) or not 0 < size_limit < 1 << 32:
        raise DataError(f"size_limit={size_limit!r}: give a number of bytes, 1 or more, and less than 4 GiB.")


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
        lease: keeps the file in its cache as long as it's read from; None for a file that is nobody's to evict.

    Raises:
        BrokenShardError: the file's structure doesn't hold.
        DataError: a column has an encoding that can't be decoded.
    """

    def __init__(self, path: Path, info: ShardInfo, *, allow_pickle: bool = False, lease: Lease | None = None) -> None:
        self._name = info.raw.basename or path.name
        self._path = path
        self.lease = lease
        self.columns = [(c.name, encoding(c.encoding, allow_pickle=allow_pickle)) for c in info.columns]
        self.num_lengths = sum(kind.size is None for _, kind in self.columns)
        self.fixed_bytes = sum(kind.size or 0 for _, kind in self.columns) + 4 * self.num_lengths
        self.num_rows = info.num_rows
        self.layout = info.columns
        view = self._map(path)
        self._view: memoryview | None = view
        self._offsets = self._checked_offsets(view)

    def _map(self, path: Path) -> memoryview:
        try:
            view, self._status = map_file(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise disk_error(error, f"Shard {path}") from error
        if self._status.st_size < 8:
            raise self._broken(f"has {self._status.st_size} bytes")
        return view

    @property
    def status(self) -> os.stat_result:
        """Which file was mapped."""
        return self._status

    def unmapped(self) -> MdsShard:
        """Return what is known of the shard, without mapping and lease: `at` says where it may be read."""
        known = copy.copy(self)
        known.at(self._path, None)
        return known

    def at(self, path: Path, lease: Lease | None) -> None:
        """From now on read row by row, from a file that is known to hold the same, and map nothing.

        To map a file for a few rows costs more than to read them: the kernel finds each page anew.
        """
        self._path, self.lease, self._view = path, lease, None

    def _check(self) -> None:
        """Refuse to read what isn't there any more, because the kernel would kill the process (SIGBUS).

        Who cuts the file off between here and the reading, microseconds later, still brings that about. A file that was
        removed stays whole for who has mapped it.
        """
        try:
            now = os.stat(self._path)  # noqa: PTH116  (a third faster, and it's done for each shard of a batch)
        except FileNotFoundError:
            return
        if signature(now) != signature(self._status):
            raise self._changed(now.st_size)

    def _changed(self, size: int) -> ChangedShardError:
        msg = (
            f"Shard {self._path} was changed while it was being read ({self._offsets[-1]} bytes then, {size} now). "
            "Leave data alone while a run reads them; start again with what is there now."
        )
        return ChangedShardError(msg)

    def _broken(self, what: str) -> BrokenShardError:
        return BrokenShardError(str(self._corrupt(what)))

    def _corrupt(self, what: str) -> CorruptShardError:
        msg = f"Shard {self._name} {what}: it's damaged. Remove it from the cache, so that it's fetched again."
        return CorruptShardError(msg)

    def _checked_offsets(self, view: memoryview) -> NDArray[np.int64]:
        num_rows, size = int.from_bytes(view[:4], "little"), len(view)
        if num_rows != self.num_rows:
            raise self._broken(f"says {num_rows} rows, and its index {self.num_rows}")
        if 4 + 4 * (num_rows + 1) > size:
            raise self._broken(f"has {size} bytes, too few for the offsets of {num_rows} rows")
        # Copied, in 64 bits: differences are then safe, and a batch needs no cast. 4 MB for 500,000 rows.
        offsets = np.frombuffer(view, "<u4", num_rows + 1, 4).astype(np.int64)
        in_order = bool((np.diff(offsets) >= self.fixed_bytes).all())
        if offsets[0] < 4 + 4 * (num_rows + 1) or offsets[-1] != size or not in_order:
            raise self._broken("has offsets that don't rise to its length, or leave a row no room")
        return offsets

    def sample(self, row: int) -> memoryview:
        """Return a row as it's encoded."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"Shard {self._name} has {self.num_rows} rows, and no row {row}.")
        view, starts, sizes = self.bytes_of(np.asarray([row]))
        return memoryview(view[int(starts[0]) : int(starts[0] + sizes[0])].tobytes())

    def bytes_of(self, indices: NDArray[np.int64]) -> tuple[memoryview, NDArray[np.int64], NDArray[np.int64]]:
        """Return bytes, and where in them rows start and how long they are: all of the mapping, or what is read now."""
        starts = self._offsets[indices]
        sizes = self._offsets[indices + 1] - starts
        if self._view is not None:
            self._check()
            return self._view, starts, sizes
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise self._changed(0) from error
        except OSError as error:
            raise disk_error(error, f"Shard {self._path}") from error
        try:
            parts = [os.pread(descriptor, *place) for place in zip(sizes.tolist(), starts.tolist(), strict=True)]
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        content = memoryview(b"".join(parts))
        if size != self._offsets[-1] or len(content) != sizes.sum():
            raise self._changed(size)
        return content, np.cumsum(sizes) - sizes, sizes

    def row(self, row: int) -> dict[str, Any]:
        """Return a row's values by column.

        Raises:
            CorruptShardError: its lengths don't fill it, or a value can't be decoded.
        """
        sample = self.sample(row)
        start = 4 * self.num_lengths
        lengths = iter(np.frombuffer(sample[:start], "<u4").tolist())
        values = {}
        for name, kind in self.columns:
            stop = start + (next(lengths) if kind.size is None else kind.size)
            if stop > len(sample):
                raise self._corrupt(f"has a row {row} that ends within column {name!r}")
            try:
                values[name] = kind.decode(sample[start:stop])
            except DataError as error:
                raise self.undecodable(row, name, error) from error
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
        return rows_together([(np.arange(len(indices)), self, indices)], columns)

    def unfilled(self, row: int) -> CorruptShardError:
        """Return the error that a row's values have other lengths than the row."""
        return self._corrupt(f"has a row {row} whose values don't fill it")

    def undecodable(self, row: int, column: str, error: DataError) -> CorruptShardError:
        """Return the error that a value isn't of its column's encoding."""
        return CorruptShardError(f"Shard {self._name}, row {row}, column {column!r}: {error}")


def are_alike(shards: Sequence[object]) -> bool:
    """Whether all are such shards, and their rows have the same columns."""
    first = shards[0]
    if not isinstance(first, MdsShard):
        return False
    return all(isinstance(shard, MdsShard) and shard.layout == first.layout for shard in shards)
