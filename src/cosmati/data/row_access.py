"""A data set's rows as a sequence's items, and what a subclass makes of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from cosmati.core.batch import TOMBSTONE, Batch, Data, Lineage, bury
from cosmati.data.faults import is_of_the_environment
from cosmati.data.order.permutation import distinct
from cosmati.data.places import Places
from cosmati.data.rows import ColumnValues, RowBatch, tensors_of
from cosmati.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

_OWN_COLUMNS = ("row_id", "class_id")
_NEVER_CALLED = ("__iter__", "__getitems__", "get_item")


@dataclass(frozen=True)
class BadRow:
    """A row that was left out because `on_bad_row="skip"` asks for that."""

    source: str
    row: str
    reason: str


class RowHandle(int):
    """A row's id, with the row: what a subclass's `__getitem__` is given, and hands on to `super().__getitem__`."""

    owner: object
    batch: RowBatch
    place: int


class MadeRows(list[Any]):
    """Rows as a subclass's `__getitem__` made them, and the rows that it made them of."""

    def __init__(self, made: Iterable[Any], read: RowBatch) -> None:
        super().__init__(made)
        self.read = read


def read_of(rows: RowBatch | MadeRows) -> RowBatch:
    """Return the rows as they were read.

    Raises:
        DataError: they weren't read together.
    """
    if isinstance(rows, MadeRows):
        return rows.read
    if not isinstance(rows, RowBatch):
        msg = f"collate takes rows that were read together, and is given a {type(rows).__name__} of single ones, as a"
        raise DataError(f"{msg} ConcatDataset or a collate_fn of your own has them. Give all to one StreamingDataset.")
    return rows


def made_rows(dataset: Any, read: RowBatch) -> MadeRows:  # noqa: ANN401  (a StreamingDataset, which imports this)
    """Give rows that were read together to a subclass's `__getitem__`, one by one."""

    def handles() -> Iterable[RowHandle]:
        for place, row_id in enumerate(read.row_ids.tolist()):
            handle = RowHandle(row_id)
            handle.owner, handle.batch, handle.place = dataset, read, place
            yield handle

    return MadeRows((dataset[handle] for handle in handles()), read)


def bad_rows(places: Places, made: Callable[[Places], object]) -> dict[int, str]:
    """Return what is wrong with each row that can't be read or transformed by itself."""
    bad = {}
    for place in np.flatnonzero(places.sources != TOMBSTONE).tolist():
        try:
            made(Places(*(column[[place]] for column in places.columns)))
        except Exception as error:
            # A transform may raise anything; what comes of a disk, a limit or a whole shard is no row's fault.
            if is_of_the_environment(error):
                raise
            bad[place] = f"{type(error).__name__}: {error}"
    return bad


def places_of(dataset: Any, read: RowBatch) -> Places:  # noqa: ANN401  (a StreamingDataset, which imports this)
    """Return where rows that were read lie."""
    found = [dataset.where(row_id) for row_id in read.row_ids.tolist()]
    sources = [dataset.sources.index(source) for source, _ in found]
    starts = [np.cumsum(source.index.shard_rows) - source.index.shard_rows for source, _ in found]
    # Empty shards start where the next one does; the last of equals holds the row.
    shards = [int(np.searchsorted(s, row, side="right")) - 1 for s, (_, row) in zip(starts, found, strict=True)]
    rows = [row - int(s[shard]) for s, shard, (_, row) in zip(starts, shards, found, strict=True)]
    return Places(np.asarray(sources), read.epochs, np.asarray(shards), np.asarray(rows))


@contextmanager
def naming_bad_rows(dataset: Any, places: Callable[[], Places], make: Callable[[Places], object]) -> Iterator[None]:  # noqa: ANN401
    """Name the row at which something fails that a plain loader or a loop does: there nothing can be left out.

    Args:
        dataset: a StreamingDataset.
        places: returns where the rows lie.
        make: does the same with some of them.

    Raises:
        DataError: a row is bad; what is wrong with the environment, or with every row, is raised as it is.
    """
    try:
        yield
    except Exception as error:
        if is_of_the_environment(error):
            raise
        found = places()
        bad = bad_rows(found, make)
        if not bad or 1 < len(bad) == len(found.rows):
            raise
        place, reason = next(iter(bad.items()))
        msg = (
            f"{dataset.name_of(found, place)} is bad: {reason}. Mend it, or leave such rows out with on_bad_row='skip' "
            "and a StreamingLoader or a StreamingSource; a plain loader and a loop can't."
        )
        raise DataError(msg) from error


def refuse_overrides(kind: type, base: type) -> None:
    """Refuse a subclass that overrides what loaders never call.

    Raises:
        DataError: it does.
    """
    names = [name for name in _NEVER_CALLED if getattr(kind, name, None) is not getattr(base, name, None)]
    if names:
        msg = (
            f"{kind.__name__} overrides {names[0]}, which loaders don't call: rows would come without it. Override "
            "__getitem__(self, idx), which calls super().__getitem__(idx), or give transform=."
        )
        raise DataError(msg)


def positions_of(at: Any, num_rows: int) -> Any:  # noqa: ANN401  (a number, or lists of such as deep as they came)
    """Return the positions in epoch 0 that an index means: a number, or a list for a slice or a sequence.

    Raises:
        IndexError: there is no such row.
        DataError: it's no index.
    """
    if isinstance(at, slice):
        return list(range(*at.indices(num_rows)))
    if isinstance(at, np.ndarray | Tensor) and at.ndim:
        at = np.asarray(at)
        at = np.flatnonzero(at).tolist() if at.dtype == np.bool_ and at.shape == (num_rows,) else at.tolist()
    if isinstance(at, Sequence) and not isinstance(at, str | bytes):
        return [positions_of(one, num_rows) for one in at]
    try:
        position = operator.index(at)
    except TypeError as error:
        msg = f"A {type(at).__name__} is no row. Give a number, a slice, or a list of numbers."
        raise DataError(msg) from error
    if not -num_rows <= position < num_rows:
        raise IndexError(f"There is no row {position}: an epoch has {num_rows}.")
    return position % num_rows


def collated(
    rows: RowBatch | MadeRows,
    columns: Sequence[str] | None,
    transform: Callable[[RowBatch], Data] | None,
    class_names: tuple[str, ...],
) -> Batch:
    """Return a batch of tensors with lineage: by the transform, or the columns named.

    Args:
        rows: as they were read.
        columns: which; None for all.
        transform: makes tensors of them in place of this.
        class_names: that their class ids index, where the rows themselves don't say.

    Raises:
        DataError: the rows can't be tensors.
    """
    read = read_of(rows)
    if isinstance(rows, MadeRows) and not all(isinstance(row, Mapping) for row in rows):
        data = _collated_as_they_are(rows, columns, transform)
    else:
        held = _columns_of(rows) if isinstance(rows, MadeRows) else rows
        data = tensors_of(held, columns) if transform is None else transform(held)
    lineage = Lineage(
        torch.from_numpy(read.row_ids),
        torch.from_numpy(read.class_ids),
        digests=None if read.digests is None else torch.from_numpy(read.digests),
    ).by_names(read.class_names or class_names)  # Rows may be another data set's, which numbers its own.
    one = distinct(read.class_ids)
    made = Batch(data, lineage, int(one[0]) if len(one) == 1 else None)
    gone = lineage.row_ids == TOMBSTONE
    return bury(made, gone) if bool(gone.any()) else made


def _collated_as_they_are(rows: MadeRows, columns: object, transform: object) -> Data:
    kind = type(rows[0]).__name__
    if columns is not None or transform is not None:
        msg = (
            f"__getitem__ gives a {kind}, and columns= and transform= are for rows that are dictionaries. Leave them "
            "out, or give dictionaries."
        )
        raise DataError(msg)
    try:
        return default_collate(rows)
    except (TypeError, RuntimeError) as error:
        raise DataError(f"__getitem__ gives a {kind}, of which no batch can be made: {error}.") from error


def _columns_of(rows: MadeRows) -> RowBatch:
    read = rows.read
    added = set(_OWN_COLUMNS) - set(read.columns)
    names = [name for name in rows[0] if name not in added]
    if any([name for name in row if name not in added] != names for row in rows):
        raise DataError("__getitem__ gives some rows other columns than others. Give all of them the same.")
    # A row has them first, and its columns where they are.
    for place, name in enumerate(read.columns):
        if name in _OWN_COLUMNS and name in names:
            names.remove(name)
            names.insert(place, name)
    columns = {name: _stacked([row[name] for row in rows]) for name in names}
    return RowBatch(columns, read.row_ids, read.class_ids, read.epochs, read.seed, read.digests, read.class_names)


def _stacked(values: list[Any]) -> ColumnValues:
    """Return numbers and arrays of one shape as an array [rows, ...], and anything else as it is."""
    arrays = [value.numpy() if isinstance(value, Tensor) else value for value in values]
    if not all(isinstance(value, np.ndarray | np.generic | int | float | bool) for value in arrays):
        return values
    if len({(np.shape(value), np.asarray(value).dtype) for value in arrays}) != 1:
        return values
    return np.stack([np.asarray(value) for value in arrays])
