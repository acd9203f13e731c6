"""Streamed rows for a loop of one's own: a DataLoader whose whole state is one position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.data.checks import check_loader
from cosmati.data.parcel import in_worker, out_of_worker
from cosmati.data.read_ahead import ReadAhead, fetch_from_here
from cosmati.data.states import Growth, check_state, state_of
from cosmati.data.streaming import StreamingDataset
from cosmati.data.worker import WorkerStart, ending_in_cycles
from cosmati.errors import DataError

LoaderTail = Literal["keep", "drop", "carry"]


class GlobalBatches(Sampler[list[int]]):
    """This rank's share of each global batch of one epoch.

    A global batch is a run of positions; rank r of W takes positions r, r + W, ... of it. Nothing has to divide
    anything: ranks differ by one row at most.

    Args:
        num_rows: rows of an epoch.
        batch_size: rows of a global batch.
        rank: of this process.
        world: number of ranks.
        tail: `keep` ends an epoch with a shorter batch, `drop` without it, `carry` never ends a batch early: it goes on
            into the next epoch.
    """

    def __init__(self, num_rows: int, batch_size: int, rank: int, world: int, tail: LoaderTail) -> None:
        if batch_size < world:
            msg = f"A global batch of {batch_size} rows leaves some of {world} ranks without any. Give {world} or more."
            raise DataError(msg)
        if tail == "drop" and num_rows < batch_size:
            msg = f"{num_rows} rows don't fill a batch of {batch_size} with tail='drop'. Use fewer, or another tail."
            raise DataError(msg)
        self.num_rows, self.batch_size, self.tail = num_rows, batch_size, tail
        self.rank, self.world = rank, world
        self.position = 0

    def __len__(self) -> int:
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole + (1 if rest and self.tail == "keep" else 0) or 1

    def __iter__(self) -> Iterator[list[int]]:
        return self._from(self.position)

    def _from(self, position: int) -> Iterator[list[int]]:
        for _ in range(self.batches_left(position)):
            stop = self.after(position)
            mine = list(range(position + self.rank, self.end_of(position), self.world))
            # Ranks stay in step: one that the epoch's last rows don't reach gets a row that weighs nothing.
            yield mine or [TOMBSTONE]
            position = stop

    def end_of(self, position: int) -> int:
        """Return where the global batch ends that starts at a position."""
        if self.tail == "carry":
            return position + self.batch_size
        end_of_epoch = (position // self.num_rows + 1) * self.num_rows
        return min(position + self.batch_size, end_of_epoch)

    def after(self, position: int) -> int:
        """Return where the next global batch starts."""
        end = self.end_of(position)
        left = -end % self.num_rows
        return end + left if self.tail == "drop" and left < self.batch_size else end

    def batches_left(self, position: int) -> int:
        """Return how many global batches the epoch still has, from a position on."""
        if self.tail == "carry":
            return len(self) - (position // self.batch_size) % len(self)
        left = self.num_rows - position % self.num_rows
        return left // self.batch_size + (1 if left % self.batch_size and self.tail == "keep" else 0)


class _Batches(Dataset[Batch]):
    """Whole batches by their positions, tensors already."""

    def __init__(self, rows: StreamingDataset) -> None:
        self.dataset = rows
        self.growth: Growth | None = None

    def __getitems__(self, positions: list[int]) -> Any:  # noqa: ANN401  (DataLoader's name; it says a list)
        growth = self.growth
        if growth is not None:
            return in_worker(growth.rows.batch(growth.locate(self.dataset, positions)))
        return in_worker(self.dataset.batch(self.dataset.locate(positions)))


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401  (what the data set returns)
    return batch


class StreamingLoader(DataLoader[Batch]):
    """Batches of a `StreamingDataset` on this rank, epoch after epoch, each `for` one epoch.

    The state is the position of the next global batch. It may be loaded with any number of ranks and workers: they read
    other slices of the same global batches.

    Each `for` begins where the loader stands when it begins, and goes to that epoch's end at a position of its own; the
    loader stands where the latest one does.

    Args:
        dataset: what to read.
        batch_size: rows of a global batch, over all ranks.
        rank: of this process; None asks the process group, and is 0 without one.
        world: number of ranks; likewise.
        tail: `keep`, `drop` or `carry` (see `GlobalBatches`).
        options: anything else that DataLoader takes: `num_workers`, `prefetch_factor`, `pin_memory`, ...
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        batch_size: int,
        *,
        rank: int | None = None,
        world: int | None = None,
        tail: LoaderTail = "keep",
        **options: Any,  # noqa: ANN401  (DataLoader's own options)
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        rank = (dist.get_rank() if grouped else 0) if rank is None else rank
        world = (dist.get_world_size() if grouped else 1) if world is None else world
        check_loader(batch_size, rank, world, tail, get_args(LoaderTail), options)
        self._batches = GlobalBatches(len(dataset), int(batch_size), rank, world, tail)
        self._rows: StreamingDataset = dataset
        self._ahead: ReadAhead | None = None
        self._latest: object = None
        self._reader = _Batches(dataset)
        if options.get("num_workers"):
            options["worker_init_fn"] = WorkerStart(options.get("worker_init_fn"))
        super().__init__(self._reader, batch_sampler=self._batches, collate_fn=_as_it_is, **options)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        if self.num_workers:
            if self._ahead is not None and self._ahead.is_closed:
                self._ahead.wait()  # before workers are forked
            if self._may_read_ahead(self._batches.position):
                fetch_from_here(self._rows.sources)
        # Begun here, not at the first batch: two that are begun together read the same epoch.
        self._latest = begun = object()
        batches = super().__iter__()
        if self.num_workers:
            ending_in_cycles(batches)
        return self._handed_out(batches, self._batches.position, begun)

    def first_epoch(self) -> Iterator[Batch]:
        """Yield the batches of the first epoch, wherever the loader stands; it stands there again afterwards.

        What is evaluated is the same each time then, however far others have read.
        """
        position, latest = self._batches.position, self._latest
        self._batches.position = 0
        try:
            yield from self
        finally:
            self._batches.position = position
            if not self.persistent_workers:  # these have been taken from who was reading, and he's told so
                self._latest = latest

    def _handed_out(self, batches: Iterator[Any], position: int, begun: object) -> Iterator[Batch]:
        # At the first batch: an iterator that is dropped before it would leave the threads behind.
        self._ahead = ahead = self._read_ahead(position)
        try:
            # Workers read ahead, so the position counts what was handed out, not what was asked for.
            for batch in map(out_of_worker, batches):
                position = self._batches.after(position)
                if self._latest is begun:
                    self._batches.position = position
                if ahead is not None:
                    ahead.go_on(position // self._batches.batch_size)
                yield batch
                if self.persistent_workers and self._latest is not begun:
                    msg = (
                        "A later iterator of this loader has taken its persistent workers over, so this one can't go "
                        "on. Finish one before the next, or leave persistent_workers out."
                    )
                    raise DataError(msg)
        finally:
            if ahead is not None:
                ahead.close()

    def _may_read_ahead(self, position: int) -> bool:
        growth = self._reader.growth
        # An epoch that is finished as it was planned has other positions.
        return bool(self._rows.ahead_bytes) and (growth is None or position >= growth.stop)

    def _read_ahead(self, position: int) -> ReadAhead | None:
        rows, size = self._rows, self._batches.batch_size
        if not self._may_read_ahead(position):
            return None
        ahead = ReadAhead(
            rows.sources,
            rows.orders(rows.seed),
            lambda part: rows.needs(part * size, (part + 1) * size),
            max_bytes=rows.ahead_bytes,
            max_parts=-(-len(rows) // size),
        )
        ahead.go_on(position // size)
        return ahead

    def state_dict(self) -> dict[str, Any]:
        """Return the state: where the next global batch starts, and of what."""
        state = state_of(self._rows, self._batches.position)
        growth = self._reader.growth
        return state | {"grown": growth.facts} if growth and state["position"] < growth.stop else state

    def load_state_dict(self, state: Mapping[str, Any], *, grown: bool = False) -> None:
        """Go on from a state, whatever ranks and workers it was saved with.

        Args:
            state: as `state_dict` returned it.
            grown: shards or sources were added to the data since: finish the epoch as it was planned, without repeating
                a row, with the row ids and draws of then, and visit all rows from the next one on. The state says so
                until then.

        Raises:
            DataError: it's the state of other data, or of another seed.
        """
        growth = Growth(self._rows, state) if grown else None
        self._batches.position = growth.position if growth else check_state(self._rows, state)
        self._reader.growth = growth
        # Workers that persist hold the data as they were.
        self._iterator = None
        self._latest = None  # what is still being read no longer moves the position
