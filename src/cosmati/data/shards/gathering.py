"""Rows of one or more shards as columns: gathered from wherever they lie in memory, in one go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cosmati.data.shards.encodings import Encoding
from cosmati.errors import DataError

Values = NDArray[Any] | list[Any]


class ShardInMemory(Protocol):
    """What there is to know of a shard whose rows are gathered."""

    @property
    def columns(self) -> Sequence[tuple[str, Encoding]]:
        """Names and encodings, in the order of a row's values."""
        ...

    @property
    def num_lengths(self) -> int:
        """How many columns have values that vary in length; a row starts with these lengths."""
        ...

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a row, without the values that vary."""
        ...

    def bytes_of(self, indices: NDArray[np.int64]) -> tuple[memoryview, NDArray[np.int64], NDArray[np.int64]]:
        """Return bytes, and where in them rows start and how long they are."""
        ...

    def unfilled(self, row: int) -> DataError:
        """Return the error that a row's values have other lengths than the row."""
        ...

    def undecodable(self, row: int, column: str, error: DataError) -> DataError:
        """Return the error that a value isn't of its column's encoding."""
        ...


Part = tuple[NDArray[np.int64], ShardInMemory, NDArray[np.int64]]
"""Places in a batch, the shard whose rows stand there, and which rows: int64 [n] each."""


def rows_together(parts: Sequence[Part], columns: Collection[str] | None = None) -> dict[str, Values]:
    """Return rows of shards that have the same columns, each at its place in the batch.

    A column is gathered in one go, whichever shards its values lie in: to gather each shard's rows and put them into
    their places afterwards would move all bytes twice.

    Args:
        parts: together they fill all places.
        columns: which ones; None for all.

    Raises:
        CorruptShardError: a row can't be decoded.
        EnvironmentFaultError: a shard can't be read.
    """
    view, starts, sizes, kept = _in_memory(parts)
    first = parts[0][1]
    lengths = _lengths(view, starts, first.num_lengths)
    wrong = np.flatnonzero(lengths.sum(0) + first.fixed_bytes != sizes)
    if len(wrong):
        shard, row = _row_at(parts, int(wrong[0]))
        raise shard.unfilled(row)
    at = starts + 4 * first.num_lengths
    found: dict[str, Values] = {}
    variable = 0
    for name, kind in first.columns:
        if kind.size is None:
            width: NDArray[np.int64] | int = lengths[variable]
            variable += 1
        else:
            width = kind.size
        if columns is None or name in columns:
            found[name] = _column(view, name, kind, at, width, parts)
        at = at + width
    del kept  # until here: a mapping lasts as long as somebody refers to it
    return found


def _in_memory(parts: Sequence[Part]) -> tuple[memoryview, NDArray[np.int64], NDArray[np.int64], object]:
    """Return one view of all that the rows lie in, where in it each starts, their lengths, and what keeps it alive."""
    read = [(places, *shard.bytes_of(indices)) for places, shard, indices in parts]
    if len(read) == 1:
        _, view, starts, sizes = read[0]
        return view, starts, sizes, view
    starts, sizes = (np.empty(sum(len(places) for places, *_ in read), np.int64) for _ in range(2))
    stop, low = 0, min(_address(view) for _, view, *_ in read)
    for places, view, own, long in read:
        start = _address(view) - low
        starts[places], sizes[places] = start + own, long
        stop = max(stop, start + len(view))
    return memoryview(np.asarray(_Memory(low, stop))), starts, sizes, read  # type: ignore[arg-type]


class _Memory:
    """Bytes of this process from an address on, as NumPy takes them. Between two mappings nothing may be read."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (num_bytes,), "typestr": "|u1", "version": 3}


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _row_at(parts: Sequence[Part], place: int) -> tuple[ShardInMemory, int]:
    """Return the shard and the row of a place in the batch."""
    for places, shard, indices in parts:
        found = np.flatnonzero(places == place)
        if len(found):
            return shard, int(indices[found[0]])
    raise AssertionError("the parts fill all places")


def _lengths(view: memoryview, starts: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Return the lengths that rows start with: int64 [variable columns, rows]."""
    if not num:
        return np.zeros((0, len(starts)), np.int64)
    raw = _gather(view, starts, 4 * num)
    return raw.view("<u4").astype(np.int64).T


def _column(
    view: memoryview,
    name: str,
    kind: Encoding,
    at: NDArray[np.int64],
    width: NDArray[np.int64] | int,
    parts: Sequence[Part],
) -> Values:
    if kind.dtype is not None:
        raw = _gather(view, at, int(kind.size or 0))
        return raw.view(kind.dtype).reshape(len(at), *kind.shape)
    widths = np.broadcast_to(width, at.shape)
    if kind.header is not None and len(at):
        array = _arrays(view, kind, at, widths)
        if array is not None:
            return array
    values = []
    for place, (start, size) in enumerate(zip(at.tolist(), widths.tolist(), strict=True)):
        try:
            # A copy: what is made of the file's own bytes would outlive the mapping, and the lease on it.
            values.append(kind.decode(memoryview(bytearray(view[start : start + size]))))
        except DataError as error:
            shard, row = _row_at(parts, place)
            raise shard.undecodable(row, name, error) from error
    return values


def _arrays(view: memoryview, kind: Encoding, at: NDArray[np.int64], width: NDArray[np.int64]) -> NDArray[Any] | None:
    """Return arrays that carry their shapes as one array, if all of them carry the same; None otherwise."""
    first, size = int(at[0]), int(width[0])
    if (width != size).any() or not size:
        return None
    assert kind.header is not None, "checked"
    try:
        dtype, shape, start = kind.header(memoryview(view[first : first + size].tobytes()))
    except DataError:
        return None  # whoever decodes it by itself says whose it is
    heads = _gather(view, at, start)
    if (heads != heads[0]).any() or size == start:
        return None
    return _gather(view, at + start, size - start).view(dtype).reshape(len(at), *shape)


def _gather(view: memoryview, starts: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Return equally long pieces: uint8 [pieces, width], a copy."""
    # Every place at which a piece can start, as records of `width` bytes: each is copied in one go.
    places = np.ndarray((len(view) - width + 1,), np.dtype((np.void, width)), view, strides=(1,))
    return places[starts].view(np.uint8).reshape(len(starts), width)
