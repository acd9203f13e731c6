"""Which rows of a source are visited, where that isn't all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.data.opened import OpenedSource
from cosmati.data.rows import RowBatch
from cosmati.errors import DataError

Predicate = Callable[[RowBatch], Any]
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Selection:
    """Rows of a source.

    Attributes:
        shard_rows: int64 [shards], how many are visited of each shard.
        rows: int64 [visited], their numbers within their shards, shard by shard, rising.
    """

    shard_rows: NDArray[np.int64]
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, mask: NDArray[np.bool_], shard_rows: NDArray[np.int64]) -> Selection:
        """Select rows of a source.

        Args:
            mask: bool [rows].
            shard_rows: int64 [shards], rows of each shard.
        """
        starts = np.cumsum(shard_rows) - shard_rows
        kept = np.flatnonzero(mask)
        # Empty shards start where the next one does; the last of equals holds the row.
        shards = np.searchsorted(starts, kept, side="right") - 1
        return cls(np.bincount(shards, minlength=len(shard_rows)).astype(np.int64), kept - starts[shards])

    def mask(self, shard_rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows of the source are visited: bool [rows]."""
        found = np.zeros(int(shard_rows.sum()), np.bool_)
        found[np.repeat(np.cumsum(shard_rows) - shard_rows, self.shard_rows) + self.rows] = True
        return found

    def locate(self, shards: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row within its shard of the n-th visited row of a shard, for each: int64 [n]."""
        found: NDArray[np.int64] = self.rows[self._starts[shards] + places]
        return found

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.shard_rows) - self.shard_rows

    def digest(self, num_shards: int) -> str:
        """Return SHA-256 over what is visited of the first shards, in hex."""
        first = self.shard_rows[:num_shards]
        content = first.astype("<i8").tobytes() + self.rows[: int(first.sum())].astype("<i8").tobytes()
        return hashlib.sha256(content).hexdigest()


def mask_of_ids(row_ids: Sequence[int] | NDArray[np.int64], num_rows: int) -> NDArray[np.bool_]:
    """Return which rows some row ids name: bool [rows of all sources].

    Raises:
        DataError: an id isn't a row's, or comes twice.
    """
    ids = np.asarray(row_ids)
    if ids.dtype == np.bool_ and ids.shape == (num_rows,):
        return ids
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        msg = f"A subset is a list of row ids, or {num_rows} booleans, and {ids.dtype} of shape {ids.shape} was given."
        raise DataError(msg)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise DataError(f"A subset names the rows {ids.min()} to {ids.max()}, and the data have 0 to {num_rows - 1}.")
    if len(np.unique(ids)) != len(ids):
        raise DataError("A subset names a row twice. Name each once, and visit rows more often with repeats.")
    mask = np.zeros(num_rows, np.bool_)
    mask[ids.astype(np.int64)] = True
    return mask


def mask_of_predicate(
    source: OpenedSource, predicate: Predicate, *, first_row: int, class_id: int, seed: int
) -> NDArray[np.bool_]:
    """Read a source once, and return which of its rows a predicate takes: bool [rows].

    Raises:
        DataError: a row can't be read, or the predicate gives no boolean for each row.
    """
    parts = [np.zeros(0, np.bool_)]
    for shard, num_rows in enumerate(source.index.shard_rows.tolist()):
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, num_rows))
            columns = source.rows(np.full_like(rows, shard), rows)
            zero = np.zeros_like(rows)
            batch = RowBatch(columns, first_row + sum(map(len, parts)) + rows - start, zero + class_id, zero, seed)
            taken = np.asarray(predicate(batch))
            if taken.dtype != np.bool_ or taken.shape != (len(rows),):
                msg = (
                    f"A filter gave {taken.dtype} of shape {taken.shape} for {len(rows)} rows. Give one boolean for "
                    "each: lambda rows: rows.columns['length'] > 10."
                )
                raise DataError(msg)
            parts.append(taken)
    return np.concatenate(parts)
