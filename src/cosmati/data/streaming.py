"""Streamed shards in one order: each row exactly once an epoch, whatever the ranks, the workers and the crashes.

    url -> sources (index, cache, shards) -> mixture (position -> source, epoch, index) -> shard order -> rows

Everything but the reading is a pure function of the seed and the position, so the whole state is one position.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from cosmati.core.batch import TOMBSTONE, Batch, Data, Lineage, bury
from cosmati.core.rng import position_key
from cosmati.data.opened import CacheOptions, OpenedSource, open_sources
from cosmati.data.order.interleave import Stretch
from cosmati.data.order.mixture import Group, Mixture, whole_weights
from cosmati.data.order.shards import ShardOrder
from cosmati.data.rows import RowBatch, concatenate, tensors_of
from cosmati.data.shards.cache import DamagedRemoteError
from cosmati.data.shards.remote import RemoteError
from cosmati.errors import DataError, MissingExtraError

Transform = Callable[[RowBatch], Data]


@dataclass(frozen=True)
class BadRow:
    """A row that was left out because `on_bad_row="skip"` asks for that."""

    source: str
    row: str
    reason: str


@dataclass(frozen=True)
class Span:
    """A span of a curriculum.

    Args:
        shares: parts of the classes, by class path, in any unit; classes that aren't named have none.
        stop_rows: where it ends, in rows since the start; None for the last.
    """

    shares: Mapping[str, float | Fraction]
    stop_rows: int | None = None


ORDER_VERSION = 1
"""Changes whenever the same seed gives another order, so that a state from before is refused."""


class StreamingDataset(Dataset[dict[str, Any]]):
    """Rows of one or more data sets, addressed by their position in the one order.

    Position p belongs to epoch `p // len(dataset)`, and positions have no end: a plain `DataLoader(dataset,
    batch_size=...)` reads epoch 0; `dataset.loader(...)` goes on from epoch to epoch and can be resumed.

    Args:
        urls: directories, here or remote, each a data set (`sources.json`) or a source (`index.json`).
        seed: keys the order and the rows' draws.
        shuffle: visit rows in keyed order; False reads as written.
        window_rows: rows are shuffled within windows of whole shards of about this many rows, and shards over the whole
            source, so that few shards are needed at a time.
        repeats: how often each class is visited in an epoch, by class path: `{"open/psf": 2.5}`; others once.
        curriculum: spans of rows with shares of their own, in place of sizes and repeats.
        columns: what a batch holds, in order; None takes all that are numeric.
        transform: makes a batch of tensors from a `RowBatch`, in place of `columns`; draws by `RowBatch.uniform`.
        cache: where fetched shards are kept, or `CacheOptions`; jobs may share it. Local data need none.
        class_path: class of all rows, where the data set doesn't say.
        on_bad_row: `raise` at a row that can't be read or transformed, or `skip` it: a tombstone takes its place, so
            that ranks stay in step, and it's listed in `skipped` of the process that met it, with a warning.
        allow_pickle: decode columns of the encoding `pkl`: only from who you'd let run code.

    Raises:
        DataError: something can't be read; the message says what, why and the mend.
    """

    def __init__(
        self,
        urls: str | Path | Sequence[str | Path],
        *,
        seed: int = 0,
        shuffle: bool = True,
        window_rows: int = 1 << 17,
        repeats: Mapping[str, float | Fraction] | None = None,
        curriculum: Sequence[Span] | None = None,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        cache: CacheOptions | str | Path | None = None,
        class_path: str | None = None,
        on_bad_row: Literal["raise", "skip"] = "raise",
        allow_pickle: bool = False,
    ) -> None:
        options = cache if isinstance(cache, CacheOptions) else CacheOptions(Path(cache) if cache else None)
        listed = [urls] if isinstance(urls, str | Path) else list(urls)
        self.sources: list[OpenedSource] = [
            source
            for url in listed
            for source in open_sources(url, class_path=class_path, options=options, allow_pickle=allow_pickle)
        ]
        self.seed = seed
        self.columns = columns
        self.transform = transform
        self.on_bad_row = on_bad_row
        self.skipped: list[BadRow] = []
        self.class_names: tuple[str, ...] = tuple(sorted({source.class_path for source in self.sources}))
        self._class_of = np.asarray([self.class_names.index(source.class_path) for source in self.sources])
        self._first_row = np.cumsum([0, *(source.num_rows for source in self.sources)])
        self._first_of_shard = [np.cumsum([0, *source.index.shard_rows]) for source in self.sources]
        self.repeats = _repeats(repeats or {}, self.class_names)
        self.groups: tuple[Group, ...] = tuple(
            Group(source.num_rows, int(class_id), self.repeats[source.class_path], source.band)
            for source, class_id in zip(self.sources, self._class_of, strict=True)
        )
        self.shuffle = shuffle
        self.window_rows = window_rows
        self.phases = _phases(curriculum, self.groups, self.class_names)
        self._mixture = Mixture(self.groups, self.phases)
        self._orders = self.orders(seed)

    def __len__(self) -> int:
        return self._mixture.num_rows

    @property
    def digest(self) -> str:
        """SHA-256 of what is visited, and how: every index, its class, its repeats, and the order's options."""
        facts = [
            [source.index.digest, source.class_path, source.band, str(self.repeats[source.class_path])]
            for source in self.sources
        ]
        phases = [[phase.stop, phase.weights] for phase in self.phases or ()]
        order = [ORDER_VERSION, self.shuffle, self.window_rows, phases]
        return hashlib.sha256(json.dumps([facts, order]).encode()).hexdigest()

    def orders(self, seed: int) -> list[ShardOrder]:
        """Return the order of each source's rows under a seed."""
        return [
            ShardOrder(
                source.index.shard_rows,
                seed=position_key(seed, "order", number),
                window_rows=self.window_rows,
                shuffle=self.shuffle,
            )
            for number, source in enumerate(self.sources)
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
        for source in np.unique(sources[sources != TOMBSTONE]):
            mine = np.flatnonzero(sources == source)
            shards[mine], rows[mine] = orders[source].locate(epochs[mine], indices[mine])
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
        for number in np.unique(places.sources):
            mine = np.flatnonzero(places.sources == number)
            source, shards, rows = self.sources[number], places.shards[mine], places.rows[mine]
            parts.append((mine, source.rows(shards, rows, None if self.transform else self.columns)))
            row_ids[mine] = self._first_row[number] + self._first_of_shard[number][shards] + rows
            if digests is not None:
                digests[mine] = source.digests(shards, rows)
        row_ids[gone] = TOMBSTONE
        columns = concatenate(parts, len(row_ids))
        own = self.seed if seed is None else seed
        return RowBatch(columns, row_ids, self._class_of[places.sources], places.epochs, own, digests)

    def _without_tombstones(self, places: Places, gone: NDArray[np.bool_]) -> Places:
        if gone.all():
            source = next(number for number, source in enumerate(self.sources) if source.num_rows)
            stand_in = (source, 0, int(np.flatnonzero(self.sources[source].index.shard_rows)[0]), 0)
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

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> RowBatch:
        """Read rows by position, together: PyTorch's DataLoader calls this with a whole batch."""
        return self.read(self.locate(positions))

    def collate(self, batch: RowBatch) -> Batch:
        """Return tensors and lineage; what a DataLoader takes as `collate_fn`."""
        return tensors_with_lineage(batch, self.columns, self.transform)

    def batch(self, places: Places, *, seed: int | None = None, with_digests: bool = False) -> Batch:
        """Read rows and make tensors of them; a bad row is told, or becomes a tombstone if `on_bad_row` is `skip`.

        Raises:
            DataError: a row can't be read or transformed; the message names its source, shard and number.
        """

        def made(chosen: Places) -> Batch:
            return self.collate(self.read(chosen, seed=seed, with_digests=with_digests))

        try:
            return made(places)
        except (RemoteError, DamagedRemoteError, MissingExtraError):
            raise
        except Exception as error:
            bad = self._bad_rows(places, made)
            if not bad or 1 < len(places.rows) == len(bad):
                # What is wrong with every row isn't wrong with the rows.
                raise
            place, reason = next(iter(bad.items()))
            told = self._name(places, place)
            if self.on_bad_row == "raise" or len(bad) == len(places.rows):
                msg = f"{told} is bad: {reason}. Mend it, or leave such rows out with on_bad_row='skip'."
                raise DataError(msg) from error
        for place, reason in bad.items():
            skipped = BadRow(self.sources[places.sources[place]].url, self._name(places, place), reason)
            self.skipped.append(skipped)
            warnings.warn(f"left out: {skipped.row}: {reason}", stacklevel=2)
        gone = np.isin(np.arange(len(places.rows)), list(bad))
        return made(replace(places, sources=np.where(gone, TOMBSTONE, places.sources)))

    def _bad_rows(self, places: Places, made: Callable[[Places], Batch]) -> dict[int, str]:
        """Return what is wrong with each row that can't be read or transformed by itself."""
        bad = {}
        for place in np.flatnonzero(places.sources != TOMBSTONE).tolist():
            try:
                made(Places(*(column[[place]] for column in places.columns)))
            except Exception as error:  # noqa: BLE001  (a transform may raise anything)
                bad[place] = f"{type(error).__name__}: {error}"
        return bad

    def _name(self, places: Places, place: int) -> str:
        source = self.sources[places.sources[place]]
        shard = source.index.shard(int(places.shards[place])).raw.basename
        return f"{source.url}/{shard}, row {places.rows[place]}"


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows lie.

    Attributes:
        sources: int64 [rows], index of the source.
        epochs: int64 [rows], which visit of the source.
        shards: int64 [rows].
        rows: int64 [rows], within the shard.
    """

    sources: NDArray[np.int64]
    epochs: NDArray[np.int64]
    shards: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """All four, in order."""
        return self.sources, self.epochs, self.shards, self.rows


def tensors_with_lineage(batch: RowBatch, columns: Sequence[str] | None, transform: Transform | None) -> Batch:
    """Return a batch of tensors: by the transform, or the columns named."""
    data = tensors_of(batch, columns) if transform is None else transform(batch)
    lineage = Lineage(
        torch.from_numpy(batch.row_ids),
        torch.from_numpy(batch.class_ids),
        digests=None if batch.digests is None else torch.from_numpy(batch.digests),
    )
    one = np.unique(batch.class_ids)
    made = Batch(data, lineage, int(one[0]) if len(one) == 1 else None)
    gone = lineage.row_ids == TOMBSTONE
    return bury(made, gone) if bool(gone.any()) else made


def _phases(
    curriculum: Sequence[Span] | None, groups: Sequence[Group], classes: Sequence[str]
) -> tuple[Stretch, ...] | None:
    """Share each class's part of a span among its sources, by rows."""
    if curriculum is None:
        return None
    phases = []
    for span in curriculum:
        unknown = sorted(set(span.shares) - set(classes))
        if unknown:
            raise DataError(f"The curriculum names {', '.join(unknown)}, and the data have {', '.join(classes)}.")
        of_class = [Fraction(span.shares.get(name, 0)).limit_denominator(1000) for name in classes]
        rows = [sum(group.rows for group in groups if group.class_id == class_id) for class_id in range(len(classes))]
        shares = [of_class[g.class_id] * Fraction(g.rows, max(1, rows[g.class_id])) for g in groups]
        phases.append(Stretch(span.stop_rows, whole_weights(shares)))
    return tuple(phases)


def _repeats(given: Mapping[str, float | Fraction], classes: Sequence[str]) -> dict[str, Fraction]:
    unknown = sorted(set(given) - set(classes))
    if unknown:
        raise DataError(f"repeats= names {', '.join(unknown)}, and the data have the classes {', '.join(classes)}.")
    return {name: Fraction(given.get(name, 1)).limit_denominator(1000) for name in classes}
