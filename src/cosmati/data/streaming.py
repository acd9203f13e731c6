"""Streamed shards in one order: each row exactly once an epoch, whatever the ranks, the workers and the crashes.

    url -> sources (index, cache, shards) -> mixture (position -> source, epoch, index) -> shard order -> rows

Everything but the reading is a pure function of the seed and the position, so the whole state is one position.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from cosmati.core.batch import TOMBSTONE, Batch, Data, bury
from cosmati.core.rng import position_key
from cosmati.data.checks import check_columns, check_options, listed_urls, refuse_their_options, refuse_twice
from cosmati.data.choosing import Choosable
from cosmati.data.faults import is_of_the_environment
from cosmati.data.graded import kind_of, numbered
from cosmati.data.opened import CacheOptions, OpenedSource, open_all
from cosmati.data.order.mixture import Group, Mixture
from cosmati.data.order.permutation import distinct
from cosmati.data.order.shards import ORDER_VERSION, ShardOrder
from cosmati.data.places import Places
from cosmati.data.row_access import (
    BadRow,
    MadeRows,
    RowHandle,
    bad_rows,
    collated,
    made_rows,
    naming_bad_rows,
    places_of,
    positions_of,
    read_of,
    refuse_overrides,
)
from cosmati.data.rows import RowBatch, concatenate
from cosmati.data.selection import Selection
from cosmati.data.shares import Span, repeats_of, stretches, visits_of
from cosmati.data.vouching import Vouches
from cosmati.errors import DataError

__all__ = ["BadRow", "Places", "Span", "StreamingDataset", "Transform"]

Transform = Callable[[RowBatch], Data]
_ROWS_AT_ONCE = 256
_BAD_IN_A_ROW = 16
"""Rows without a good one between them that are left out, before it's taken that not the rows are at fault."""


class StreamingDataset(Choosable, Dataset[Any]):
    """Rows of one or more data sets, addressed by their position in the one order.

    As a sequence (`for`, `dataset[-1]`, a plain `DataLoader`) it's epoch 0; a `StreamingLoader` goes on from epoch to
    epoch and can be resumed: to `locate`, position p belongs to epoch `p // len(dataset)`, without an end.

    Args:
        urls: directories, here or remote, each a data set (`sources.json`) or a source (`index.json`).
        seed: keys the order and the rows' draws.
        shuffle: visit rows in keyed order; False reads as written.
        window_rows: rows are shuffled within windows of whole shards of about this many rows, and shards over the whole
            source, so that few shards are needed at a time.
        order_version: 1 for a run that began with it; its windows don't widen from one shard at the start.
        repeats: how often each class is visited in an epoch, by class path: `{"open/psf": 2.5}`; others once.
        curriculum: spans of rows with shares of their own, in place of sizes and repeats.
        columns: what a batch holds, in order; None takes all that are numeric.
        transform: makes a batch of tensors from a `RowBatch`, in place of `columns`; draws by `RowBatch.uniform`.
        cache: where fetched shards are kept, or `CacheOptions`; jobs may share it. Local data need none.
        class_path: class of all rows, where the data set doesn't say.
        on_bad_row: `raise` at a row that can't be decoded or transformed, or `skip` it: a tombstone takes its place, so
            that ranks stay in step, and it's listed in `skipped` of the process that met it, with a warning. Only what
            is wrong with a row's own bytes counts: disks, handles, permissions, memory, whole shards always raise. A
            plain DataLoader and a `for` leave nothing out, and name the row.
        allow_pickle: decode columns of the encoding `pkl`: only from who you'd let run code.
        authority: an `Authority`, who must vouch for each source, or one for each of `urls`, by that URL; None takes
            what the data say of themselves.

    Raises:
        ProvenanceError: the authority doesn't vouch for a source.
        DataError: something can't be read; the message says what, why and the mend.
    """

    def __new__(cls, *_: object, **options: object) -> Self:
        """Say what to write in place of mosaicml-streaming's arguments."""
        if cls.__init__ is StreamingDataset.__init__:
            refuse_their_options(options)
        return super().__new__(cls)

    def __init__(  # noqa: PLR0913  (each is said once, where a data set is opened)
        self,
        urls: str | Path | Sequence[str | Path],
        *,
        seed: int = 0,
        shuffle: bool = True,
        window_rows: int = 1 << 17,
        order_version: int = ORDER_VERSION,
        repeats: Mapping[str, float | Fraction] | None = None,
        curriculum: Sequence[Span] | None = None,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        cache: CacheOptions | str | Path | None = None,
        class_path: str | None = None,
        on_bad_row: Literal["raise", "skip"] = "raise",
        allow_pickle: bool = False,
        authority: Vouches | Mapping[str, Vouches] | Mapping[Path, Vouches] | None = None,
    ) -> None:
        options = cache if isinstance(cache, CacheOptions) else CacheOptions(Path(cache) if cache else None)
        check_options({"seed": seed, "window_rows": window_rows, "on_bad_row": on_bad_row, "columns": columns}, options)
        says = {"class_path": class_path, "authority": authority, "allow_pickle": allow_pickle, "options": options}
        self.sources = open_all(listed_urls(urls), **says)
        refuse_twice(self.sources)
        self._cache = options
        refuse_overrides(type(self), StreamingDataset)
        self._is_overridden = type(self).__getitem__ is not StreamingDataset.__getitem__
        if columns is not None and transform is None and not self._is_overridden:
            check_columns(self.sources, columns)
        self.seed = int(seed)
        self.columns, self.transform = columns, transform
        self.on_bad_row = on_bad_row
        self.skipped: list[BadRow] = []
        self._bad_in_a_row = 0
        self.class_names: tuple[str, ...] = tuple(sorted({source.class_path for source in self.sources}))
        self._class_of = np.asarray([self.class_names.index(source.class_path) for source in self.sources])
        self._first_row = np.cumsum([0, *(source.num_rows for source in self.sources)])
        self._first_of_shard = [np.cumsum([0, *source.index.shard_rows]) for source in self.sources]
        self.shuffle = shuffle
        self.window_rows = int(window_rows)
        self.order_version = order_version
        self._repeats = repeats_of(repeats or {}, self.class_names)
        self._curriculum = curriculum
        self._choose: Mapping[str, int] = {}
        self._epoch_size: int | None = None
        self.selections: tuple[Selection | None, ...] = (None,) * len(self.sources)
        self._arrange()

    def _arrange(self) -> None:
        """Lay out an epoch of what is visited."""
        visited = [int(self.shard_rows(number).sum()) for number in range(len(self.sources))]
        of_class = np.bincount(self._class_of, visited, len(self.class_names)).astype(np.int64).tolist()
        rows = dict(zip(self.class_names, of_class, strict=True))
        self.repeats = visits_of(self._repeats, self._choose, self._epoch_size, rows)
        self.kinds = numbered(self.sources)
        self.groups: tuple[Group, ...] = tuple(
            Group(count, int(class_id), self.repeats[source.class_path], self.kinds[kind_of(source)])
            for source, class_id, count in zip(self.sources, self._class_of, visited, strict=True)
        )
        self.phases = stretches(self._curriculum, self.groups, self.class_names)
        self._mixture = Mixture(self.groups, self.phases)
        self._orders = self.orders(self.seed)

    def __len__(self) -> int:
        return self._mixture.num_rows

    @property
    def digest(self) -> str:
        """SHA-256 of what is visited, and how, in hex: see `digest_text`."""
        return hashlib.sha256(self.digest_text.encode()).hexdigest()

    @property
    def order_facts(self) -> list[object]:
        """What the order depends on beside the rows and their repeats."""
        return [
            self.order_version,
            self.shuffle,
            self.window_rows,
            [[phase.stop, phase.weights] for phase in self.phases or ()],
        ]

    @property
    def ahead_bytes(self) -> int:
        """How much may be fetched before it's needed; 0 where nothing is remote."""
        options = self._cache
        if not any(source.is_remote for source in self.sources):
            return 0
        return min(options.ahead_bytes, options.max_bytes // 2) if options.max_bytes else options.ahead_bytes

    def needs(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return sources, epochs and indices of positions `start` to `stop - 1`."""
        return self._mixture.locate(np.arange(start, stop))

    def orders(self, seed: int, shard_rows: Sequence[NDArray[np.int64]] | None = None) -> list[ShardOrder]:
        """Return the order of each source's rows under a seed: of those visited, or so many of each shard."""
        return [
            ShardOrder(
                self.shard_rows(number) if shard_rows is None else shard_rows[number],
                seed=position_key(seed, "order", number),
                window_rows=self.window_rows,
                shuffle=self.shuffle,
                version=self.order_version,
            )
            for number in range(len(self.sources))
        ]

    def locate(self, positions: Sequence[int] | NDArray[np.int64]) -> Places:
        """Return where the rows of some positions lie, without reading them."""
        wanted = np.asarray(positions, np.int64)
        sources, epochs, indices = self._mixture.locate(np.maximum(wanted, 0))
        return self.places(np.where(wanted < 0, TOMBSTONE, sources), epochs, indices, self._orders)

    def places(
        self,
        sources: NDArray[np.int64],
        epochs: NDArray[np.int64],
        indices: NDArray[np.int64],
        orders: Sequence[ShardOrder],
    ) -> Places:
        """Turn places in sources' orders into shards and rows."""
        shards, rows = np.zeros_like(indices), np.zeros_like(indices)
        for source in distinct(sources[sources != TOMBSTONE]):
            mine = np.flatnonzero(sources == source)
            shards[mine], rows[mine] = orders[source].locate(epochs[mine], indices[mine])
            selection = self.selections[source]
            if selection is not None:
                rows[mine] = selection.locate(shards[mine], rows[mine])
        return Places(sources, epochs, shards, rows)

    def read(self, places: Places, *, seed: int | None = None, with_digests: bool = False) -> RowBatch:
        """Read rows, in the order asked for.

        Args:
            places: which; in place of a tombstone any row is read, and has the id `TOMBSTONE`.
            seed: of the rows' draws; None is the data set's own.
            with_digests: hash each row as it's encoded, too.

        Raises:
            DataError: a shard or a row can't be read; the message names it.
        """
        gone = places.sources == TOMBSTONE
        if gone.any():
            places = self._without_tombstones(places, gone)
        parts, row_ids = [], np.empty_like(places.rows)
        digests = np.empty((len(row_ids), 32), np.uint8) if with_digests else None
        for number in distinct(places.sources):
            mine = np.flatnonzero(places.sources == number)
            source, shards, rows = self.sources[number], places.shards[mine], places.rows[mine]
            wanted = None if self.transform or self._is_overridden else self.columns
            parts.append((mine, source.rows(shards, rows, wanted)))
            row_ids[mine] = self.first_ids(number, places.epochs[mine]) + self._first_of_shard[number][shards] + rows
            if digests is not None:
                digests[mine] = source.digests(shards, rows)
        row_ids[gone] = TOMBSTONE
        columns, classes = concatenate(parts, len(row_ids)), self._class_of[places.sources]
        return RowBatch(
            columns, row_ids, classes, places.epochs, self.seed if seed is None else seed, digests, self.class_names
        )

    def _without_tombstones(self, places: Places, gone: NDArray[np.bool_]) -> Places:
        if gone.all():
            source = next(number for number, group in enumerate(self.groups) if group.rows)
            zero = np.zeros(1, np.int64)
            stand_in = tuple(int(column[0]) for column in self.places(zero + source, zero, zero, self._orders).columns)
        else:
            first = int(np.flatnonzero(~gone)[0])
            stand_in = (places.sources[first], places.epochs[first], places.shards[first], places.rows[first])
        return Places(*(np.where(gone, value, column) for value, column in zip(stand_in, places.columns, strict=True)))

    def where(self, row_id: int) -> tuple[OpenedSource, int]:
        """Return the source of a row id, and the row's number in it: provenance resolved."""
        number = int(np.searchsorted(self._first_row, row_id, side="right")) - 1
        if not 0 <= row_id < self._first_row[-1]:
            raise DataError(f"There is no row {row_id}; the data have {self._first_row[-1]} rows.")
        return self.sources[number], row_id - int(self._first_row[number])

    def __getitem__(self, at: Any) -> Any:  # noqa: ANN401  (a row for a number, a list of rows for more)
        """Return a row of epoch 0 by its place in the order, counted from the end if negative; or a list of rows.

        A subclass may override this; every loader then gives what it returns, and its `at` is the row's id.

        Args:
            at: a number, a slice, a list or an array of numbers.

        Raises:
            IndexError: there is no such row.
        """
        if isinstance(at, RowHandle) and at.owner is self:
            return at.batch[at.place]
        positions = positions_of(at, len(self))
        if isinstance(positions, int):
            return self.read(self.locate([positions]))[0]
        if any(isinstance(one, list) for one in positions):
            return [StreamingDataset.__getitem__(self, one) for one in positions]
        return list(self.read(self.locate(positions)))

    def __getitems__(self, positions: Sequence[int]) -> RowBatch | MadeRows:
        """Read rows of epoch 0 together: PyTorch's DataLoader calls this with a whole batch."""
        places = self.locate(positions_of(list(positions), len(self)))
        with naming_bad_rows(self, lambda: places, self._made):
            return self._made(places)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of one epoch."""
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield from self.__getitems__(range(start, min(start + _ROWS_AT_ONCE, len(self))))

    def _made(self, places: Places, **options: Any) -> RowBatch | MadeRows:  # noqa: ANN401  (as `read` takes them)
        rows = self.read(places, **options)
        return made_rows(self, rows) if self._is_overridden else rows

    def collate(self, batch: RowBatch | MadeRows) -> Batch:
        """Return tensors and lineage; what a DataLoader takes as `collate_fn`."""
        read = read_of(batch)

        def again(places: Places) -> Batch:
            return collated(self._made(places), self.columns, self.transform, self.class_names)

        with naming_bad_rows(self, lambda: places_of(self, read), again):
            return collated(batch, self.columns, self.transform, self.class_names)

    def batch(
        self,
        places: Places,
        *,
        seed: int | None = None,
        with_digests: bool = False,
        transform: Transform | None = None,
    ) -> Batch:
        """Read rows and make tensors of them; a bad row is told, or becomes a tombstone if `on_bad_row` is `skip`.

        Args:
            places: which.
            seed: of the rows' draws; None is the data set's own.
            with_digests: hash each row as it's encoded, too.
            transform: in place of the data set's own.

        Raises:
            DataError: a row can't be read or transformed; the message names its source, shard and number.
        """

        def made(chosen: Places) -> Batch:
            rows = self._made(chosen, seed=seed, with_digests=with_digests)
            if transform is None and type(self).collate is not StreamingDataset.collate:
                return self.collate(rows)
            return collated(rows, self.columns, transform or self.transform, self.class_names)

        try:
            found = made(places)
        except Exception as error:
            if is_of_the_environment(error):
                raise
            bad = bad_rows(places, made)
            present = int((places.sources != TOMBSTONE).sum())
            if self.on_bad_row == "skip" and not present:
                return self._all_gone(len(places.rows), next(n for n, g in enumerate(self.groups) if g.rows), made)
            self._bad_in_a_row = self._bad_in_a_row + len(bad) if len(bad) == present else 0
            if not bad or (1 < present == len(bad) and (self.on_bad_row == "raise" or present > _BAD_IN_A_ROW)):
                # What is wrong with every row isn't wrong with the rows.
                raise
            place, reason = next(iter(bad.items()))
            told = self.name_of(places, place)
            if self._bad_in_a_row > _BAD_IN_A_ROW:
                msg = (
                    f"The last {self._bad_in_a_row} rows were all bad, {told} among them: {reason}. What is wrong with "
                    "every row isn't wrong with the rows: look at the transform, and at the data."
                )
                raise DataError(msg) from error
            if self.on_bad_row == "raise":
                msg = f"{told} is bad: {reason}. Mend it, or leave such rows out with on_bad_row='skip'."
                raise DataError(msg) from error
        else:
            self._bad_in_a_row = 0
            return found
        for place, reason in bad.items():
            skipped = BadRow(self.sources[places.sources[place]].url, self.name_of(places, place), reason)
            self.skipped.append(skipped)
            warnings.warn(f"left out: {skipped.row}: {reason}", stacklevel=2)
        gone = np.isin(np.arange(len(places.rows)), list(bad)) | (places.sources == TOMBSTONE)
        if not gone.all():
            return made(replace(places, sources=np.where(gone, TOMBSTONE, places.sources)))
        return self._all_gone(len(gone), int(places.sources[place]), made)

    def _all_gone(self, num_rows: int, source: int, made: Callable[[Places], Batch]) -> Batch:
        """Return tombstones alone, in the shape of a row of the same source that can be read."""
        for index in range(min(self.groups[source].rows, 2 * _BAD_IN_A_ROW)):
            sources, epochs, indices = (np.full(num_rows, value) for value in (source, 0, index))
            try:
                read = made(self.places(sources, epochs, indices, self._orders))
            except Exception as error:
                if is_of_the_environment(error):
                    raise
                continue
            lineage = replace(read.lineage, row_ids=torch.full_like(read.lineage.row_ids, TOMBSTONE))
            return bury(replace(read, lineage=lineage), lineage.row_ids == TOMBSTONE)
        msg = f"None of the first {2 * _BAD_IN_A_ROW} rows of {self.sources[source].url} can be read: look at the data."
        raise DataError(msg)

    def name_of(self, places: Places, place: int) -> str:
        """Return what messages call a row."""
        source = self.sources[places.sources[place]]
        shard = source.index.shard(int(places.shards[place])).raw.basename
        return f"{source.url}/{shard}, row {places.rows[place]}"
