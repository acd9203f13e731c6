"""Streamed rows for a loop of one's own: a DataLoader whose whole state is one position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.data.streaming import StreamingDataset
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
        position = self.position
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
        self._rows = rows

    def __getitems__(self, positions: list[int]) -> Any:  # noqa: ANN401  (DataLoader's name; it says a list)
        return self._rows.batch(self._rows.locate(positions))


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401  (what the data set returns)
    return batch


class StreamingLoader(DataLoader[Batch]):
    """Batches of a `StreamingDataset` on this rank, epoch after epoch, each `for` one epoch.

    The state is the position of the next global batch. It may be loaded with any number of ranks and workers: they read
    other slices of the same global batches.

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
        self._batches = GlobalBatches(len(dataset), batch_size, rank, world, tail)
        self._rows: StreamingDataset = dataset
        super().__init__(_Batches(dataset), batch_sampler=self._batches, collate_fn=_as_it_is, **options)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # Workers read ahead, so the position counts what was handed out, not what was asked for.
        for batch in super().__iter__():
            self._batches.position = self._batches.after(self._batches.position)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state: where the next global batch starts, and of what."""
        return {"position": self._batches.position, "digest": self._rows.digest, "seed": self._rows.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, whatever ranks and workers it was saved with.

        Raises:
            DataError: it's the state of other data, or of another seed.
        """
        for name, own in (("digest", self._rows.digest), ("seed", self._rows.seed)):
            if state[name] != own:
                msg = (
                    f"The state was saved with the {name} {state[name]}, and the data have {own}: to go on would "
                    "repeat some rows and leave out others. Load it with the same data, classes, repeats and seed."
                )
                raise DataError(msg)
        self._batches.position = int(state["position"])
