"""People's loaders, and runs over them that stop and go on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from cosmati.core.batch import Data
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

NUM_ROWS = 24


class Rows(Dataset[Tensor]):
    """Row i is [i, noise]; the noise is drawn from whatever a user draws from."""

    def __init__(self, draw: Callable[[], float] = lambda: 0.0) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), self.draw()])


class Stream(IterableDataset[Tensor]):
    """The same rows, one after another, of no known length."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(index), 0.0]) for index in range(NUM_ROWS))


def draw_torch() -> float:
    return float(torch.rand(()))


def draw_python() -> float:
    return random.random()


def draw_numpy() -> float:
    return float(np.random.rand())  # noqa: NPY002  (what users draw from)


class KilledError(Exception):
    """What kills a run here."""


class Seen:
    """A loss that notes the rows of each step, and fails at one of them."""

    forward_caches = ("steps",)

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[list[list[float]]] = []
        self._fails_at = fails_at

    def __call__(self, model: nn.Module, data: Data) -> Tensor:
        # Without gradients it's a checkpoint's fixed microbatch, which holds random numbers.
        if torch.is_grad_enabled():
            if len(self.steps) == self._fails_at:
                raise KilledError
            self.steps.append(data.tolist())
        return model(data).square().mean()

    @property
    def ids(self) -> list[list[int]]:
        return [[int(row[0]) for row in step] for step in self.steps]


def trainer(data: Any, loss: Any, folder: Path | None = None, **config: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {"budget": "8ba", "num_threads": 1, "run_folder": folder, "checkpoint_every": "1ba", "seed": 5} | config
    return Trainer(nn.Linear(2, 1), loss, data, optimizers=[SGD(lr=1e-4)], config=RunConfig(**settings))


def _fit(data: Any, seen: Seen, folder: Path | None = None, **config: Any) -> str:
    run = trainer(data, seen, folder, **config)
    try:
        return run.fit().outcome
    except KilledError:
        return "killed"
    finally:
        assert run.feed is not None
        run.feed.close()
        _end_workers(data)


def _end_workers(data: Any) -> None:
    """End a loader's workers that live on.

    Left to the collection of a cycle, PyTorch closes their queues before it asks them to end, and waits five seconds.
    """
    if isinstance(data, DataLoader) and data._iterator is not None:
        data._iterator._shutdown_workers()  # type: ignore[attr-defined]
        data._iterator = None


def whole(make: Callable[[], Any], **config: Any) -> list[list[list[float]]]:
    """Return what the steps of a run that nobody disturbs see."""
    seen = Seen()
    assert _fit(make(), seen, **config) == "completed"
    return seen.steps


def interrupted(make: Callable[[], Any], folder: Path, *stops: int, **config: Any) -> list[list[list[float]]]:
    """Return what the steps of a run see that is killed at some steps and begun again with new loaders."""
    steps: list[list[list[float]]] = []
    for stop in stops:
        seen = Seen(fails_at=stop - len(steps))
        torch.manual_seed(100 + stop)
        random.seed(stop)
        assert _fit(make(), seen, folder, **config) == "killed"
        steps += seen.steps
    seen = Seen()
    assert _fit(make(), seen, folder, **config) == "completed"
    return steps + seen.steps
