"""The order of one source's rows: shards permuted, cut into windows, rows permuted within each window.

Downloads stay local, since a window is read before the next one, and the order of a billion rows takes memory for the
shards only. The first epoch's first window is one shard, and each is twice as wide as the one before until they have
their full width: the first batch needs one shard, not most of a window. Later epochs can be read ahead, and keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cosmati.core.rng import keyed_permutation, position_key
from cosmati.data.order.interleave import Ints
from cosmati.data.order.permutation import check_range, distinct, permute
from cosmati.errors import DataError

ORDER_VERSION = 2
"""Changes whenever the same seed gives another order; runs from before go on in theirs. In version 1 all windows are of
one width."""

_BLOCK_ROWS = 1024
"""Rows that are located together: for a batch of 256 the permutation's calls would cost four times its arithmetic."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The layout of one epoch: int64 [shards], and for `window_starts` [windows + 1]."""

    shards: Ints
    starts: Ints
    window_starts: Ints


class ShardOrder:
    """Where the rows of a source stand in each epoch.

    Args:
        shard_rows: int64 [shards], rows of each shard.
        seed: keys the order.
        window_rows: a window holds whole shards of about this many rows; rows are shuffled within it.
        shuffle: False keeps the order in which the rows were written.
        version: of the order, 1 or 2.

    Raises:
        DataError: there is no such version.
    """

    def __init__(
        self,
        shard_rows: Ints,
        *,
        seed: int,
        window_rows: int = 1 << 17,
        shuffle: bool = True,
        version: int = ORDER_VERSION,
    ) -> None:
        if version not in (1, ORDER_VERSION):
            msg = f"There is no order version {version}: give 1 for a run from before version 2, or {ORDER_VERSION}."
            raise DataError(msg)
        self.shard_rows = np.asarray(shard_rows, np.int64)
        self._seed = seed
        self._window_rows = max(1, window_rows)
        self._shuffle = shuffle
        self._version = version
        self.num_rows = int(self.shard_rows.sum())
        self._layout = lru_cache(maxsize=4)(self._lay_out)
        self._block = lru_cache(maxsize=2)(self._locate_block)

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.shard_rows, self._seed, self._window_rows, self._shuffle, self._version)

    def _lay_out(self, epoch: int) -> _Epoch:
        shards = np.arange(len(self.shard_rows))
        if self._shuffle:
            shards = keyed_permutation(position_key(self._seed, "shards", epoch), shards)
        starts = np.cumsum(self.shard_rows[shards]) - self.shard_rows[shards]
        widens = self._version > 1 and epoch == 0 and self._shuffle and self.num_rows > 0
        windows = self._widening(starts, self.shard_rows[shards]) if widens else starts // self._window_rows
        first = np.flatnonzero(np.diff(windows, prepend=-1))
        return _Epoch(shards, starts, np.append(starts[first], self.num_rows))

    def _widening(self, starts: Ints, rows: Ints) -> Ints:
        """Return the window of each shard, by where it starts and the rows it has: int64 [shards]."""
        widths = [int(rows[np.flatnonzero(rows)[0]])]
        while 2 * widths[-1] < self._window_rows:
            widths.append(2 * widths[-1])
        ends = np.cumsum(widths)
        beyond = len(ends) + (starts - ends[-1]) // self._window_rows
        return np.where(starts < ends[-1], np.searchsorted(ends, starts, side="right"), beyond)

    def locate(self, epoch: int | Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Return shard and row within the shard of each index of an epoch.

        Args:
            epoch: of all indices, or int64 [n].
            indices: int64 [n], each in [0, num_rows).

        Returns:
            int64 [n] and int64 [n].

        Raises:
            DataError: an index isn't of this source.
        """
        check_range(indices, self.num_rows)
        if not isinstance(epoch, np.ndarray) or not epoch.ndim:
            return self._located(int(epoch), indices)
        epochs = distinct(epoch)
        if len(epochs) == 1:
            return self._located(int(epochs[0]), indices)
        shards, rows = np.empty_like(indices), np.empty_like(indices)
        for one in epochs:
            mine = np.flatnonzero(epoch == one)
            shards[mine], rows[mine] = self._located(int(one), indices[mine])
        return shards, rows

    def _located(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        """Locate indices of one epoch, by whole blocks where they follow one another, as whoever trains reads them."""
        if not len(indices) or (np.diff(indices) != 1).any():
            return self._locate(epoch, indices)
        first, last = int(indices[0]) // _BLOCK_ROWS, int(indices[-1]) // _BLOCK_ROWS
        shards, rows = zip(*(self._block(epoch, block) for block in range(first, last + 1)), strict=True)
        start = int(indices[0]) - first * _BLOCK_ROWS
        mine = slice(start, start + len(indices))
        return np.concatenate(shards)[mine], np.concatenate(rows)[mine]

    def _locate_block(self, epoch: int, block: int) -> tuple[Ints, Ints]:
        start = block * _BLOCK_ROWS
        return self._locate(epoch, np.arange(start, min(start + _BLOCK_ROWS, self.num_rows)))

    def _locate(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        layout = self._layout(epoch)
        places = self._shuffled(epoch, layout, indices) if self._shuffle else indices
        # Empty shards start where the next one does; the last of equals holds the row.
        position = np.searchsorted(layout.starts, places, side="right") - 1
        return layout.shards[position], places - layout.starts[position]

    def _shuffled(self, epoch: int, layout: _Epoch, indices: Ints) -> Ints:
        windows = np.searchsorted(layout.window_starts, indices, side="right") - 1
        places = np.empty_like(indices)
        for window in distinct(windows):
            mine = np.flatnonzero(windows == window)
            start, stop = (int(value) for value in layout.window_starts[window : window + 2])
            key = position_key(self._seed, "rows", epoch, int(window))
            places[mine] = permute(key, indices[mine] - start, stop - start) + start
        return places

    def shards_of(self, epoch: int, start: int, stop: int) -> Ints:
        """Return the shards that indices `start` to `stop - 1` of an epoch may need, in that order: int64 [n]."""
        layout = self._layout(epoch)
        if start >= stop:
            return np.empty(0, np.int64)
        if self._shuffle:
            first, last = np.searchsorted(layout.window_starts, [start, stop - 1], side="right") - 1
            start, stop = int(layout.window_starts[first]), int(layout.window_starts[last + 1])
        first, last = np.searchsorted(layout.starts, [start, stop - 1], side="right") - 1
        found = layout.shards[first : last + 1]
        return found[self.shard_rows[found] > 0]

    def window_of(self, epoch: int, index: int) -> tuple[Ints, int]:
        """Return the shards that an index and those after it in its window may need, and where the next window starts.

        The shards come in their order: int64 [n].
        """
        starts = self._layout(epoch).window_starts
        stop = int(starts[np.searchsorted(starts, index, side="right")])
        return self.shards_of(epoch, index, stop), stop


def _restored(shard_rows: Ints, seed: int, window_rows: int, shuffle: bool, version: int) -> ShardOrder:
    return ShardOrder(shard_rows, seed=seed, window_rows=window_rows, shuffle=shuffle, version=version)
