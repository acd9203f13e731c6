"""Streamed rows as the Trainer's source: canonical microbatches, read ahead."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.data.order.interleave import Stretch
from cosmati.data.order.mixture import Group
from cosmati.data.order.plan import RoutePlan, Tail
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError


@dataclass(frozen=True, eq=False)
class StreamingSource:
    """Rows of a `StreamingDataset` in steps (see `cosmati.core.source.Source`).

    Args:
        dataset: the rows; its seed is replaced by the run's.
        rows_per_step: rows in a step, over all its microbatches.
        tail: `carry` goes on from epoch to epoch without a gap, and no class starves; `pad` visits each row exactly
            once an epoch and fills with tombstones; `drop` leaves the rest of an epoch out.
        num_workers: processes that read and transform; 0 uses threads, which suffice unless `transform` is slow.
        steps_ahead: steps to read ahead.
    """

    dataset: StreamingDataset
    rows_per_step: int
    tail: Tail = "carry"
    num_workers: int = 0
    steps_ahead: int = 2

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that lineage's class ids index."""
        return self.dataset.class_names

    @property
    def digest(self) -> str:
        """Hex digest of the content, its classes and repeats."""
        return self.dataset.digest

    def order(
        self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Collection[int] | None = None
    ) -> StreamingOrder:
        """Fix the order for a run.

        Raises:
            DataError: V doesn't divide the rows of a step, or no step can be filled.
        """
        if self.rows_per_step % num_microbatches:
            msg = (
                f"{self.rows_per_step} rows a step can't be split into V = {num_microbatches} microbatches of one "
                f"shape. Use a multiple of {num_microbatches}, or another num_microbatches."
            )
            raise DataError(msg)
        groups = [
            group if classes is None or group.class_id in classes else replace(group, rows=0)
            for group in self.dataset.groups
        ]
        rows = self.rows_per_step // num_microbatches
        plan = RoutePlan(
            groups,
            rows=rows,
            num_microbatches=num_microbatches,
            route_pure=route_pure,
            tail=self.tail,
            phases=_offered_only(self.dataset.phases, groups),
        )
        reader = Microbatches(self.dataset, plan, seed, with_digests=route_pure)
        return StreamingOrder(self, plan, reader)


def _offered_only(phases: Sequence[Stretch] | None, groups: Sequence[Group]) -> list[Stretch] | None:
    """Take the weight from sources that aren't offered."""
    if phases is None:
        return None
    return [
        replace(p, weights=tuple(w if g.rows else 0 for w, g in zip(p.weights, groups, strict=True))) for p in phases
    ]


class Microbatches(Dataset[tuple[int, Batch]]):
    """Microbatches by their number, counted over all steps."""

    def __init__(self, dataset: StreamingDataset, plan: RoutePlan, seed: int, *, with_digests: bool) -> None:
        self.dataset, self.plan, self.seed, self.with_digests = dataset, plan, seed, with_digests
        self.orders = dataset.orders(seed)

    def __getitem__(self, number: int) -> tuple[int, Batch]:
        rows = self.plan.microbatch(*divmod(number, self.plan.num_microbatches))
        places = self.dataset.places(rows.sources, rows.epochs, rows.indices, self.orders)
        batch = self.dataset.batch(places, seed=self.seed, with_digests=self.with_digests)
        return number, Batch(batch.data, batch.lineage, rows.class_id, rows.band)

    def shards_after(self, number: int, fetched: set[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """Return the shards that come next after a microbatch and must be fetched, and remember them as fetched.

        Each source is looked at a window ahead, and no further than half its cache.
        """
        rows = self.plan.microbatch(*divmod(number, self.plan.num_microbatches))
        if len(fetched) > 4 * sum(source.index.num_shards for source in self.dataset.sources):
            # Epochs long gone; to ask for a shard again that is there costs nothing.
            fetched.clear()
        found = []
        for source in np.unique(rows.sources[rows.sources != TOMBSTONE]):
            opened = self.dataset.sources[source]
            if not opened.is_remote:
                continue
            last = int(np.flatnonzero(rows.sources == source)[-1])
            epoch, start = int(rows.epochs[last]), int(rows.indices[last])
            stop = min(start + self.dataset.window_rows, opened.num_rows)
            for shard in self.orders[source].shards_of(epoch, start, stop)[: opened.shards_ahead]:
                key = (int(source), epoch, int(shard))
                if key not in fetched:
                    fetched.add(key)
                    found.append((int(source), int(shard)))
        return found


class _Numbers(Sampler[int]):
    """Numbers of this rank's microbatches from a step on, without an end."""

    def __init__(self, step: int, indices: Sequence[int], num_microbatches: int) -> None:
        self._step, self._indices, self._num_microbatches = step, tuple(indices), num_microbatches

    def __iter__(self) -> Iterator[int]:
        for step in itertools.count(self._step):
            yield from (step * self._num_microbatches + index for index in self._indices)


class StreamingOrder:
    """The order of a run (see `cosmati.core.source.Order`); reads ahead once it's told what is wanted.

    Reading ahead changes nothing but the time: each microbatch is a function of its number.
    """

    def __init__(self, source: StreamingSource, plan: RoutePlan, reader: Microbatches) -> None:
        self._source, self._plan, self._reader = source, plan, reader
        self.steps_per_epoch: int = plan.steps_per_epoch
        self.rows_per_step: int = source.rows_per_step
        self._ahead: dict[int, Future[Batch]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._fetched: set[tuple[int, int, int]] = set()
        self._stream: Iterator[tuple[int, Batch]] | None = None
        self._next = -1

    def class_id(self, step: int, index: int) -> int | None:
        """Return the class of a microbatch, without reading its rows."""
        return self._plan.class_of(step, index)

    def microbatch(self, step: int, index: int) -> Batch:
        """Return a microbatch: rows / V rows, tombstones where the epoch's tail is padded."""
        number = step * self._plan.num_microbatches + index
        if self._stream is not None and number == self._next:
            _, batch = next(self._stream)
            self._next = next(self._numbers)
            return batch
        future = self._ahead.pop(number, None)
        return self._reader[number][1] if future is None else future.result()

    def expect(self, step: int, indices: Sequence[int]) -> None:
        """Read ahead: these microbatches are wanted in each step from `step` on.

        Args:
            step: the next one.
            indices: of the microbatches that this rank will ask for.
        """
        v, steps = self._plan.num_microbatches, self._source.steps_ahead
        if self._source.num_workers:
            if self._next != step * v + indices[0]:
                self._start_workers(_Numbers(step, indices, v), len(indices) * max(1, steps))
            return
        if not steps:
            return
        if self._threads is None:
            # Reading is copying out of mapped files, which leaves the interpreter free; two keep up with a disk.
            self._threads = ThreadPoolExecutor(2, thread_name_prefix="cosmati-read")
        wanted = [s * v + i for s in range(step, step + steps + 1) for i in indices]
        for number in [number for number in self._ahead if not wanted[0] <= number <= wanted[-1]]:
            self._ahead.pop(number).cancel()
        for number in wanted:
            if number not in self._ahead:
                self._ahead[number] = self._threads.submit(lambda n: self._reader[n][1], number)
        for source, shard in self._reader.shards_after(wanted[-1], self._fetched):
            self._threads.submit(self._reader.dataset.sources[source].fetch, shard)

    def _start_workers(self, numbers: _Numbers, num_ahead: int) -> None:
        loader = DataLoader(
            self._reader,
            sampler=numbers,
            batch_size=None,
            num_workers=self._source.num_workers,
            prefetch_factor=max(1, -(-num_ahead // self._source.num_workers)),
        )
        self._stream, self._numbers = iter(loader), iter(numbers)
        self._next = next(self._numbers)
