"""Streamed rows as the Trainer's source: canonical microbatches, read ahead."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from cosmati.core.batch import Batch
from cosmati.core.later import later
from cosmati.core.source import ImageSize
from cosmati.data.image_rows import DecodeImages
from cosmati.data.order.interleave import Ints, Stretch
from cosmati.data.order.mixture import Group
from cosmati.data.order.plan import RoutePlan, Tail, rows_each
from cosmati.data.parcel import in_worker, out_of_worker
from cosmati.data.read_ahead import ReadAhead, fetch_from_here
from cosmati.data.streaming import StreamingDataset
from cosmati.data.vouching import vouched_data, vouched_sources
from cosmati.data.worker import WorkerStart, ending_in_cycles
from cosmati.provenance.voucher import VouchedData

_END_SECONDS = 1.0


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
        sort_by_class: under a policy, sort each step's microbatches by class and kind of rows, so that ranks run alike
            ones at a time. It's another order, and so another run.
    """

    dataset: StreamingDataset
    rows_per_step: int
    tail: Tail = "carry"
    num_workers: int = 0
    steps_ahead: int = 2
    sort_by_class: bool = later(default=False)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that lineage's class ids index."""
        return self.dataset.class_names

    @property
    def digest(self) -> str:
        """Hex digest of the content, its classes and repeats."""
        return self.dataset.digest

    @property
    def kinds(self) -> frozenset[tuple[int, int]]:
        """Class id of each source, and the number of its kind (see `measured`)."""
        return frozenset((group.class_id, group.band) for group in self.dataset.groups)

    @property
    def measured(self) -> dict[int, tuple[int, dict[str, str]]]:
        """Band and grades of the rows that batches call by a number: without grades, the band's."""
        return {number: (band, dict(grades)) for (band, grades), number in self.dataset.kinds.items()}

    @property
    def vouched(self) -> VouchedData | None:
        """Who vouched for the sources; None where nobody was asked."""
        return vouched_data(vouched_sources(self))

    def order(
        self, *, seed: int, num_microbatches: int, route_pure: bool, classes: Collection[int] | None = None
    ) -> StreamingOrder:
        """Fix the order for a run.

        Raises:
            DataError: V doesn't divide the rows of a step, or no step can be filled.
        """
        groups = [
            group if classes is None or group.class_id in classes else replace(group, rows=0)
            for group in self.dataset.groups
        ]
        plan = RoutePlan(
            groups,
            rows=rows_each(self.rows_per_step, num_microbatches),
            num_microbatches=num_microbatches,
            route_pure=route_pure,
            tail=self.tail,
            phases=_offered_only(self.dataset.phases, groups),
            sort_by_class=self.sort_by_class,
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


class Microbatches(Dataset[Any]):
    """Microbatches by their number, counted over all steps."""

    def __init__(self, dataset: StreamingDataset, plan: RoutePlan, seed: int, *, with_digests: bool) -> None:
        self.dataset, self.plan, self.seed, self.with_digests = dataset, plan, seed, with_digests
        self.size_at: Callable[[int], ImageSize] | None = None
        self.orders = dataset.orders(seed)

    def __getitem__(self, number: int) -> Any:  # noqa: ANN401  (Dataset's name; a parcel in a worker)
        return in_worker(self.microbatch(number))

    def microbatch(self, number: int) -> Batch:
        """Read a microbatch."""
        step, index = divmod(number, self.plan.num_microbatches)
        rows = self.plan.microbatch(step, index)
        transform = None
        if self.size_at is not None and isinstance(self.dataset.transform, DecodeImages):
            transform = partial(self.dataset.transform, image_size=self.size_at(step))
        places = self.dataset.places(rows.sources, rows.epochs, rows.indices, self.orders)
        batch = self.dataset.batch(places, seed=self.seed, with_digests=self.with_digests, transform=transform)
        return Batch(batch.data, batch.lineage, rows.class_id, rows.band)

    def needs(self, number: int) -> tuple[Ints, Ints, Ints]:
        """Return sources, epochs and indices of a microbatch's rows."""
        rows = self.plan.microbatch(*divmod(number, self.plan.num_microbatches))
        return rows.sources, rows.epochs, rows.indices


class _Numbers(Sampler[int]):
    """Numbers of this rank's microbatches from a step on, without an end."""

    def __init__(self, step: int, indices: Sequence[int], num_microbatches: int) -> None:
        self._step, self._indices, self._num_microbatches = step, tuple(indices), num_microbatches

    def __iter__(self) -> Iterator[int]:
        for step in itertools.count(self._step):
            yield from (step * self._num_microbatches + index for index in self._indices)


class _Readers:
    """Threads that read microbatches ahead.

    As daemons they don't hold up a process that ends while a server hangs, as an executor's threads do.
    """

    def __init__(self, read: Callable[[int], Batch]) -> None:
        self._queue: SimpleQueue[tuple[Future[Batch], int] | None] = SimpleQueue()
        # Reading is copying out of mapped files, which leaves the interpreter free; two keep up with a disk.
        self._threads = [
            threading.Thread(target=_read, args=(self._queue, read), daemon=True, name="cosmati-read") for _ in range(2)
        ]
        for thread in self._threads:
            thread.start()
        _readers.add(self)

    def submit(self, number: int) -> Future[Batch]:
        future: Future[Batch] = Future()
        self._queue.put((future, number))
        return future

    def close(self) -> None:
        """Let the threads end once they've read what is asked for."""
        for _ in self._threads:
            self._queue.put(None)

    def end(self) -> None:
        """Give what is being read a moment, so that no thread is amid PyTorch's code when the interpreter ends."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        self.close()
        until = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _read(queue: SimpleQueue[tuple[Future[Batch], int] | None], read: Callable[[int], Batch]) -> None:
    while (asked := queue.get()) is not None:
        future, number = asked
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(read(number))
            except BaseException as error:  # noqa: BLE001  (handed to whoever asks for the microbatch)
                future.set_exception(error)
        del asked, future  # they would hold what was read until the next is asked for


_readers: weakref.WeakSet[_Readers] = weakref.WeakSet()


@atexit.register
def _end_readers() -> None:
    for readers in list(_readers):
        readers.end()


class StreamingOrder:
    """The order of a run (see `cosmati.core.source.Order`); reads ahead once it's told what is wanted.

    Reading ahead changes nothing but the time: each microbatch is a function of its number.
    """

    def __init__(self, source: StreamingSource, plan: RoutePlan, reader: Microbatches) -> None:
        self._source, self._plan, self._reader = source, plan, reader
        self.steps_per_epoch: int = plan.steps_per_epoch
        self.rows_per_step: int = source.rows_per_step
        self._ahead: dict[int, Future[Batch]] = {}
        self._readers: _Readers | None = None
        self._read_ahead: ReadAhead | None = None
        self._stream: Iterator[Any] | None = None
        self._next = -1

    def __del__(self) -> None:
        """Let the threads that fetch ahead end."""
        if self._read_ahead is not None:
            self._read_ahead.close()
        self._forget_ahead()
        if self._readers is not None:
            self._readers.close()

    def _forget_ahead(self) -> None:
        """Drop what was read ahead, and read none of it that wasn't begun."""
        ahead, self._ahead = self._ahead, {}
        for future in ahead.values():
            future.cancel()

    def class_id(self, step: int, index: int) -> int | None:
        """Return the class of a microbatch, without reading its rows."""
        return self._plan.class_of(step, index)

    def band(self, step: int, index: int) -> int:
        """Return the band of a microbatch, without reading its rows."""
        return self._plan.band_of(step, index)

    @property
    def image_size(self) -> ImageSize | None:
        """Size of the images, where the data set's transform can decode them in another."""
        transform = self._reader.dataset.transform
        return transform.image_size if isinstance(transform, DecodeImages) else None

    def resize(self, size_at: Callable[[int], ImageSize]) -> None:
        """Decode the images of each step in the size that this function says; what was read ahead is read anew."""
        self._reader.size_at = size_at
        self._forget_ahead()
        self._stream, self._next = None, -1

    def microbatch(self, step: int, index: int) -> Batch:
        """Return a microbatch: rows / V rows, tombstones where the epoch's tail is padded."""
        number = step * self._plan.num_microbatches + index
        if self._stream is not None and number == self._next:
            # After an error the workers stand elsewhere than this counts: whoever tries again has new ones.
            stream, self._stream, self._next = self._stream, None, -1
            try:
                batch: Batch = out_of_worker(next(stream))
            except BaseException as error:
                # The error's frames hold the old workers: they end here, and not in new ones that are forked.
                traceback.clear_frames(error.__traceback__)
                del stream
                raise
            self._stream, self._next = stream, next(self._numbers)
            return batch
        future = self._ahead.pop(number, None)
        try:
            return self._reader.microbatch(number) if future is None else future.result()
        except BaseException:
            # What failed with it may be mended when it's tried again.
            self._forget_ahead()
            raise

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
            self._fetch_ahead(step, indices)
            return
        if not steps:
            return
        if self._readers is None:
            self._readers = _Readers(self._reader.microbatch)
        wanted = [s * v + i for s in range(step, step + steps + 1) for i in indices]
        for number in [number for number in self._ahead if not wanted[0] <= number <= wanted[-1]]:
            self._ahead.pop(number).cancel()
        for number in wanted:
            if number not in self._ahead:
                self._ahead[number] = self._readers.submit(number)
        self._fetch_ahead(step, indices)

    def _fetch_ahead(self, step: int, indices: Sequence[int]) -> None:
        """Have the shards fetched that this rank's microbatches need from a step on."""
        dataset, reader, num_microbatches = self._reader.dataset, self._reader, self._plan.num_microbatches
        if self._read_ahead is None and dataset.ahead_bytes:

            def needs(part: int) -> tuple[Ints, Ints, Ints]:
                # Not of this object: the threads would hold it, and it's its end that ends them.
                which, index = divmod(part, len(indices))
                return reader.needs(which * num_microbatches + indices[index])

            self._read_ahead = ReadAhead(
                dataset.sources,
                self._reader.orders,
                needs,
                max_bytes=dataset.ahead_bytes,
                max_parts=self.steps_per_epoch * len(indices),
            )
        if self._read_ahead is not None:
            self._read_ahead.go_on(step * len(indices))

    def _start_workers(self, numbers: _Numbers, num_ahead: int) -> None:
        if self._read_ahead is not None:
            self._read_ahead.close()
            self._read_ahead.wait()
            self._read_ahead = None
        if self._reader.dataset.ahead_bytes:
            fetch_from_here(self._reader.dataset.sources)
        loader = DataLoader(
            self._reader,
            sampler=numbers,
            batch_size=None,
            num_workers=self._source.num_workers,
            prefetch_factor=max(1, -(-num_ahead // self._source.num_workers)),
            worker_init_fn=WorkerStart(),
        )
        self._stream, self._numbers = ending_in_cycles(iter(loader)), iter(numbers)
        self._next = next(self._numbers)
