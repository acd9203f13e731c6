"""Data with fewer rows, or other epochs, made of data."""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cosmati.data.checks import whole_number
from cosmati.data.opened import OpenedSource
from cosmati.data.selection import Predicate, Selection, mask_of_ids, mask_of_predicate


class Choosable:
    """What of a `StreamingDataset` makes others of it. Each has the sources of the one that it was made of."""

    seed: int
    sources: list[OpenedSource]
    selections: tuple[Selection | None, ...]
    repeats: Mapping[str, Fraction]
    _class_of: NDArray[np.int64]
    _earlier: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    _first_row: NDArray[np.int64]

    @abstractmethod
    def _arrange(self) -> None:
        """Lay out an epoch of what is visited."""

    @property
    @abstractmethod
    def order_facts(self) -> list[object]:
        """What the order depends on beside the rows and their repeats."""

    @property
    def digest_text(self) -> str:
        """What the digest is of, as JSON: of each source the index, class, band, repeats; and the order's options."""
        facts = [
            [source.index.digest, source.class_path, source.band, str(self.repeats[source.class_path])]
            + ([] if selection is None else [selection.digest(source.index.num_shards)])
            for source, selection in zip(self.sources, self.selections, strict=True)
        ]
        return json.dumps([facts, self.order_facts])

    def filter(self, predicate: Predicate) -> Self:
        """Return these data with only the rows that a predicate takes; each is read once, now.

        Args:
            predicate: gives one boolean for each row of a `RowBatch`: `lambda rows: rows.columns["length"] > 10`.

        Raises:
            DataError: a row can't be read, or no row is left.
        """
        return self._selected(self._taken(predicate))

    def ids_where(self, predicate: Predicate) -> NDArray[np.int64]:
        """Return the ids of the rows that a predicate takes, int64 [rows], rising; each is read once, now.

        Args:
            predicate: as of `filter`.

        Raises:
            DataError: a row can't be read.
        """
        return np.flatnonzero(self._taken(predicate))

    def _taken(self, predicate: Predicate) -> NDArray[np.bool_]:
        """Return which rows of all sources a predicate takes: bool [rows]."""
        parts = [
            mask_of_predicate(source, predicate, first_row=int(first), class_id=int(class_id), seed=self.seed)
            for source, first, class_id in zip(self.sources, self._first_row[:-1], self._class_of, strict=True)
        ]
        return np.concatenate(parts)

    def subset(self, row_ids: Sequence[int] | NDArray[Any]) -> Self:
        """Return these data with only some rows.

        Args:
            row_ids: which, each once, in any order; or one boolean for each row.

        Raises:
            DataError: there is no such row, or no row is left.
        """
        return self._selected(mask_of_ids(row_ids, int(self._first_row[-1])))

    def _selected(self, mask: NDArray[np.bool_]) -> Self:
        found = []
        for number, part in enumerate(np.split(mask, self._first_row[1:-1])):
            rows, before = self.sources[number].index.shard_rows, self.selections[number]
            found.append(Selection.of(part if before is None else part & before.mask(rows), rows))
        return self._varied(selections=tuple(found))

    def choose(self, rows: Mapping[str, int]) -> Self:
        """Return these data with so many rows an epoch of some classes, others the next epoch: `{"open/psf": 1000}`.

        Raises:
            DataError: a class isn't there, or has no rows, or has repeats as well.
        """
        if isinstance(rows, Mapping):
            rows = {name: whole_number(f"rows of {name}", number) for name, number in rows.items()}
        return self._varied(_choose=rows)

    def epochs_of(self, num_rows: int) -> Self:
        """Return these data with epochs of so many rows, in the same proportions; each goes on where the last ended.

        Raises:
            DataError: no rows are asked for.
        """
        return self._varied(_epoch_size=whole_number("num_rows", num_rows))

    def _varied(self, **changes: object) -> Self:
        varied = copy.copy(self)
        varied.__dict__.update(changes, skipped=[])
        varied._arrange()  # noqa: SLF001  (a copy of itself)
        return varied

    def with_earlier_ids(self, first: NDArray[np.int64], until: NDArray[np.int64]) -> Self:
        """Return these data with the row ids that rows had before the data grew, in the epochs until then.

        Args:
            first: int64 [sources], id that the first row of each had.
            until: int64 [sources], visit of each source from which ids are those of now.
        """
        varied = copy.copy(self)
        varied._earlier = (first, until)  # noqa: SLF001  (a copy of itself)
        return varied

    def first_ids(self, number: int, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the id of a source's first row in some of its visits: int64 [visits]."""
        now = np.full_like(epochs, self._first_row[number])
        if self._earlier is None:
            return now
        first, until = self._earlier
        return np.where(epochs < until[number], first[number], now)

    def shard_rows(self, number: int) -> NDArray[np.int64]:
        """Return how many rows are visited of each shard of a source: int64 [shards]."""
        selection = self.selections[number]
        return self.sources[number].index.shard_rows if selection is None else selection.shard_rows
