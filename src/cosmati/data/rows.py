"""A batch of rows as columns, with what each row is: its id, class, epoch and its own draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from cosmati.core.batch import Data
from cosmati.core.rng import row_uniform
from cosmati.errors import DataError

ColumnValues = NDArray[Any] | list[Any]
"""An array [rows, ...] where all rows have one shape, a list of values otherwise."""


class RowDict(dict[str, Any]):
    """A row as a dictionary. PyTorch's default collation takes a `RowBatch` of them by its columns, not row by row."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch(Sequence[dict[str, Any]]):
    """Rows, read together and kept as columns; as a sequence, it's a sequence of dictionaries.

    They hold the columns, `row_id` and `class_id`; a column of one of these names keeps its own values there.

    Attributes:
        columns: by name.
        row_ids: int64 [rows], distinct over the whole data set.
        class_ids: int64 [rows].
        epochs: int64 [rows], which visit of its source each row belongs to.
        seed: keys the draws.
        digests: uint8 [rows, 32], SHA-256 of each encoded row, where asked for.
        class_names: that the class ids index, where the data set that read them says.
    """

    columns: Mapping[str, ColumnValues]
    row_ids: NDArray[np.int64]
    class_ids: NDArray[np.int64]
    epochs: NDArray[np.int64]
    seed: int
    digests: NDArray[np.uint8] | None = None
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.row_ids)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        values = {name: _value(column, index) for name, column in self.columns.items()}
        # A column of such a name keeps its values.
        return RowDict({"row_id": int(self.row_ids[index]), "class_id": int(self.class_ids[index])} | values)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def select(self, indices: NDArray[np.int64]) -> RowBatch:
        """Return some rows, in the order given."""
        columns = {
            name: column[indices] if isinstance(column, np.ndarray) else [column[i] for i in indices]
            for name, column in self.columns.items()
        }
        digests = None if self.digests is None else self.digests[indices]
        return RowBatch(
            columns,
            self.row_ids[indices],
            self.class_ids[indices],
            self.epochs[indices],
            self.seed,
            digests,
            self.class_names,
        )

    def uniform(self, stream: str, num: int = 1) -> Tensor:
        """Draw uniforms in [0, 1) that belong to the rows: float64 [rows, num].

        A row draws anew in each epoch, and the same whoever reads it, in whichever worker, beside whichever rows.
        """
        drawn = torch.empty(len(self), num, dtype=torch.float64)
        ids = torch.from_numpy(self.row_ids)
        for epoch in np.unique(self.epochs):
            mine = torch.from_numpy(self.epochs == epoch)
            drawn[mine] = row_uniform(self.seed, stream, int(epoch), ids[mine], num=num)
        return drawn

    def tensor(self, name: str) -> Tensor:
        """Return a column as a tensor [rows, ...], without a copy where it's an array.

        Raises:
            DataError: there is no such column, or its rows have several shapes or aren't numbers.
        """
        if name not in self.columns:
            raise DataError(f"There is no column {name!r}; the rows have {', '.join(sorted(self.columns))}.")
        column = self.columns[name]
        if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
            return torch.from_numpy(column)
        kinds = sorted({type(value).__name__ for value in column})
        shapes = sorted({np.shape(value) for value in column})[:4]
        msg = (
            f"Column {name!r} can't be one tensor: its rows are {', '.join(kinds)} of shapes {shapes}. Name other "
            "columns=, or give transform=, a function from RowBatch to tensors."
        )
        raise DataError(msg)


def _value(column: ColumnValues, index: int) -> Any:  # noqa: ANN401  (what the column holds)
    # Whole numbers of 64 bits, and floats that are Python's, come as Python's: JSON and dictionaries take them.
    is_plain = isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype in (np.int64, np.float64)
    return column[index].item() if is_plain else column[index]


def _collate_rows(rows: Sequence[RowDict], *, collate_fn_map: Any = None) -> dict[str, Any]:  # noqa: ANN401  (PyTorch's)
    """Return what PyTorch makes of dictionaries, by columns where they're there."""
    if not isinstance(rows, RowBatch):
        made: dict[str, Any] = collate([dict(row) for row in rows], collate_fn_map=collate_fn_map)
        return made
    columns = {"row_id": rows.row_ids, "class_id": rows.class_ids} | dict(rows.columns)
    return {
        name: torch.from_numpy(column)
        if isinstance(column, np.ndarray) and column.dtype.kind in "biuf"
        else collate(list(column), collate_fn_map=collate_fn_map)
        for name, column in columns.items()
    }


default_collate_fn_map[RowDict] = _collate_rows


def tensors_of(batch: RowBatch, columns: Sequence[str] | None) -> Data:
    """Return columns as a loss reads them: one tensor, or a tuple in the order named; all numeric ones if None."""
    if columns is None:
        columns = [n for n, c in batch.columns.items() if isinstance(c, np.ndarray) and c.dtype.kind in "biuf"]
        if not columns:
            names = ", ".join(sorted(batch.columns))
            raise DataError(f"No column is numeric ({names}). Give transform=, a function from RowBatch to tensors.")
    found = tuple(batch.tensor(name) for name in columns)
    return found[0] if len(found) == 1 else found


def concatenate(
    parts: Sequence[tuple[NDArray[np.int64], Mapping[str, ColumnValues]]], num_rows: int
) -> dict[str, ColumnValues]:
    """Put parts of a batch into their places.

    Args:
        parts: for each part the places of its rows, and its columns; together they fill all places.
        num_rows: rows of the whole.

    Raises:
        DataError: the parts don't have the same columns.
    """
    if len(parts) == 1 and np.array_equal(parts[0][0], np.arange(num_rows)):
        return dict(parts[0][1])
    names = parts[0][1].keys() if parts else ()
    if any(columns.keys() != names for _, columns in parts):
        found = sorted({", ".join(sorted(columns)) for _, columns in parts})
        msg = (
            f"Shards of one data set have different columns: {' | '.join(found)}. Name those that all of them have "
            "with columns=, or write the data set again."
        )
        raise DataError(msg)
    return {name: _place([(places, columns[name]) for places, columns in parts], num_rows) for name in names}


def _place(parts: Sequence[tuple[NDArray[np.int64], ColumnValues]], num_rows: int) -> ColumnValues:
    arrays = [column for _, column in parts if isinstance(column, np.ndarray)]
    kinds = {(array.dtype, array.shape[1:]) for array in arrays}
    if len(arrays) == len(parts) and len(kinds) == 1:
        whole = np.empty((num_rows, *arrays[0].shape[1:]), arrays[0].dtype)
        for places, column in parts:
            whole[places] = column
        return whole
    values: list[Any] = [None] * num_rows
    for places, column in parts:
        for place, value in zip(places, column, strict=True):
            values[place] = value
    return values
