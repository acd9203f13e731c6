"""Two ranks that see unlike things after a resume, or are given data that end apart; rank 0 prints the outcome."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

from cosmati import RunConfig, Trainer
from cosmati.errors import CosmatiError
from cosmati.optim import SGD

RANK = int(os.environ.get("RANK", "0"))
STOPS = (1, 2, 3, 5, 6, 7)
"""Steps at which a run stopped; the one that goes on looks at this step first."""


@cache
def mask(length: int) -> Tensor:
    return torch.tril(torch.ones(length, length))


def trimmed(model: nn.Module, data: Any) -> Tensor:
    """Cut rows to the longest of the microbatch, and use a mask that's cached by length."""
    rows, lengths, targets = data
    longest = int(lengths.max())
    return mse_loss(model((mask(longest) @ rows[:, :longest]).mean(1)), targets)


def longer_at(step: int) -> list[tuple[Tensor, ...]]:
    """Return 12 batches; in one step the rows of rank 1 are longer."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(8, 9, 4, generator=generator),
            torch.tensor([5] * 4 + [8 if i == step else 5] * 4),
            torch.randn(8, 1, generator=generator),
        )
        for i in range(12)
    ]


def plain(model: nn.Module, data: Any) -> Tensor:
    return mse_loss(model(data[0]), data[1])


def plain_mean(model: nn.Module, data: Any) -> Tensor:
    return mse_loss(model(data[0]).mean(1), data[2])


class ShortOnFirst:
    """Rank 1 changes its rows in place, and then rank 0 has no room."""

    forward_caches = ("num_calls",)

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, model: nn.Module, data: Any) -> Tensor:
        self.num_calls += 1
        if os.environ.get("RANK") == "1":
            data[1].add_(1)  # which this loss doesn't read: ranks that compute another loss are refused
        elif self.num_calls == 2:
            raise torch.OutOfMemoryError("out of memory")
        return plain_mean(model, data)


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that says how long it is about; a rank skips what it couldn't read."""

    def __init__(self, of_each_rank: tuple[int, int]) -> None:
        self.num_rows = of_each_rank[RANK]

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.num_rows):
            yield torch.randn(4, generator=generator), torch.randn(1, generator=generator)


class Once:
    """Batches that can be read once, and say how many they are."""

    def __init__(self, of_each_rank: tuple[int, int]) -> None:
        self._batches = iter(DataLoader(Rows(of_each_rank), 8))

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


def run(data: Any, budget: str, loss: Callable[..., Tensor] = plain, folder: Path | None = None) -> str:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    change = ("budget",) if folder else ()
    config = RunConfig(budget=budget, num_microbatches=2, num_threads=1, run_folder=folder, change=change)
    trainer = Trainer(model, loss, data, optimizers=[SGD(lr=0.1)], config=config)
    try:
        result = trainer.fit()
    except CosmatiError as error:
        return f"{type(error).__name__}: {error}"
    return f"{result.outcome} after {trainer.clock.step}: {float(model.weight.detach().double().sum())}"


def main(folder: Path) -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {}
    for stop_at in STOPS:
        data = longer_at(stop_at)
        found[f"{stop_at} whole"] = run(data, "12ba", trimmed)
        run(data, f"{stop_at}ba", trimmed, folder / str(stop_at))
        # So that only rank 1's look finds a mask which wasn't there.
        mask.cache_clear()
        mask(5)
        found[f"{stop_at} again"] = run(data, "12ba", trimmed, folder / str(stop_at))
    surrounded = folder / "surrounded"
    run(longer_at(12), "3ba", plain_mean, surrounded)
    with torch.backends.mkldnn.flags(enabled=RANK == 0):
        found["other surroundings on one rank"] = run(longer_at(12), "12ba", plain_mean, surrounded)
    if dist.is_initialized():
        found["changed by one rank"] = run(longer_at(12), "4ba", ShortOnFirst())
    for name, of_each_rank in {"alike": (64, 64), "apart": (64, 40), "within a batch": (64, 60)}.items():
        found[f"loader, {name}"] = run(DataLoader(Rows(of_each_rank), 8), "12ba")
        found[f"once, {name}"] = run(Once(of_each_rank), "12ba")
    if RANK == 0:
        sys.stdout.write(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
