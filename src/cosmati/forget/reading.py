"""All rows of a data set, each once, as they're written: what is asked of data, and not of an order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cosmati.data.opened import OpenedSource
from cosmati.data.rows import RowBatch
from cosmati.data.streaming import StreamingDataset

_ROWS_AT_ONCE = 256
OnShare = Callable[[float, str], None]
"""Told which share of the rows is read, 0 to 1, and how many."""


def untold(_share: float, _text: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class RowsOfSource:
    """Some rows of one source, in the order in which they're written.

    Attributes:
        source: that has them.
        rows: with the ids that lineage and ledger know.
    """

    source: OpenedSource
    rows: RowBatch


def columns_of(source: OpenedSource) -> frozenset[str]:
    """Return the names of a source's columns; none where it has no shard."""
    return (
        frozenset(column.name for column in source.index.shard(0).columns) if source.index.num_shards else frozenset()
    )


def holds_packs(source: OpenedSource) -> bool:
    """Say whether a source's rows are packs, which keep the documents that they're made of."""
    return {"tokens", "spans"} <= columns_of(source)


def every_row(
    dataset: StreamingDataset, wanted: Callable[[OpenedSource], set[str]], on_share: OnShare = untold
) -> Iterator[RowsOfSource]:
    """Yield all rows of all sources; a choice of rows or an order that the data set has isn't asked.

    Args:
        dataset: any.
        wanted: names the columns that are read of a source; it's asked before the source is read.
        on_share: told how far it is.

    Raises:
        DataError: a row can't be read.
    """
    total, done = sum(source.num_rows for source in dataset.sources), 0
    for source in dataset.sources:
        columns = wanted(source)
        class_id = dataset.class_names.index(source.class_path)
        for shard, num_rows in enumerate(source.index.shard_rows.tolist()):
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                rows = np.arange(start, min(start + _ROWS_AT_ONCE, num_rows))
                read = source.rows(np.full_like(rows, shard), rows, columns)
                ids, zero = np.arange(done, done + len(rows)), np.zeros_like(rows)
                yield RowsOfSource(source, RowBatch(read, ids, zero + class_id, zero, dataset.seed))
                done += len(rows)
                on_share(done / total, f"{done:,} of {total:,} rows")


def rows_digest(dataset: StreamingDataset) -> str:
    """Return what binds something to these rows and their ids, in hex: the sources in order, by their indexes."""
    told = [[source.index.digest, source.class_path, source.num_rows] for source in dataset.sources]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
