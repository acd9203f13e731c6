"""The order of one source's rows: shards permuted, cut into windows, rows permuted within each window.

Downloads stay local, since a window is read before the next one, and the order of a billion rows takes memory for the
shards only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cosmati.core.rng import keyed_permutation, position_key
from cosmati.data.order.interleave import Ints
from cosmati.data.order.permutation import check_range, permute


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
    """

    def __init__(self, shard_rows: Ints, *, seed: int, window_rows: int = 1 << 17, shuffle: bool = True) -> None:
        self.shard_rows = np.asarray(shard_rows, np.int64)
        self._seed = seed
        self._window_rows = max(1, window_rows)
        self._shuffle = shuffle
        self.num_rows = int(self.shard_rows.sum())
        self._layout = lru_cache(maxsize=4)(self._lay_out)

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.shard_rows, self._seed, self._window_rows, self._shuffle)

    def _lay_out(self, epoch: int) -> _Epoch:
        shards = np.arange(len(self.shard_rows))
        if self._shuffle:
            shards = keyed_permutation(position_key(self._seed, "shards", epoch), shards)
        starts = np.cumsum(self.shard_rows[shards]) - self.shard_rows[shards]
        windows = starts // self._window_rows
        first = np.flatnonzero(np.diff(windows, prepend=-1))
        return _Epoch(shards, starts, np.append(starts[first], self.num_rows))

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
        if np.ndim(epoch) == 0:
            return self._locate(int(epoch), indices)
        shards, rows = np.empty_like(indices), np.empty_like(indices)
        for one in np.unique(epoch):
            mine = np.flatnonzero(epoch == one)
            shards[mine], rows[mine] = self._locate(int(one), indices[mine])
        return shards, rows

    def _locate(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        layout = self._layout(epoch)
        places = self._shuffled(epoch, layout, indices) if self._shuffle else indices
        # Empty shards start where the next one does; the last of equals holds the row.
        position = np.searchsorted(layout.starts, places, side="right") - 1
        return layout.shards[position], places - layout.starts[position]

    def _shuffled(self, epoch: int, layout: _Epoch, indices: Ints) -> Ints:
        windows = np.searchsorted(layout.window_starts, indices, side="right") - 1
        places = np.empty_like(indices)
        for window in np.unique(windows):
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


def _restored(shard_rows: Ints, seed: int, window_rows: int, shuffle: bool) -> ShardOrder:
    return ShardOrder(shard_rows, seed=seed, window_rows=window_rows, shuffle=shuffle)
