"""What every arm of `benchmarks.composed` trains, and how its steps are timed: this library's arms and its peer's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cosmati.models.resnet import ResNet, ResNetConfig

NUM_CLASSES = 10
NUM_BATCHES = 4
WARM_UP = 3
"""Steps that aren't timed at the start of each run: lazy buffers, the first look at every shape."""
CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}


@dataclass(frozen=True)
class Task:
    """Images and a network for them.

    Args:
        side: of the images.
        batch_size: rows a step.
        num_steps: timed steps of a run.
        clock: `cpu`, seconds of this thread, or `wall`.
    """

    side: int
    batch_size: int
    num_steps: int
    clock: str

    def model(self) -> nn.Module:
        """Return a fresh network, always the same one."""
        torch.manual_seed(0)
        return ResNet(ResNetConfig(in_channels=3 if self.side == 32 else 1))

    def sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that all arms use."""
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def seconds_a_step(self, train: Callable[[Batches, int], object]) -> float:
        """Let a loop train, and return the seconds of a step, from its taking one batch to its taking the next.

        Args:
            train: is given an endless iterable of batches, and how many to take of it.
        """
        batches = Batches(self)
        train(batches, WARM_UP + self.num_steps + 1)
        return (batches.taken[-1] - batches.taken[WARM_UP]) / self.num_steps


class Batches:
    """Batches in memory, one after another without end; notes the time at which each one is taken."""

    def __init__(self, task: Task) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (task.batch_size, 3 if task.side == 32 else 1, task.side, task.side)
        self._data = [
            (
                torch.randn(shape, generator=generator),
                torch.randint(0, NUM_CLASSES, (task.batch_size,), generator=generator),
            )
            for _ in range(NUM_BATCHES)
        ]
        self.batch_size = task.batch_size  # Composer asks for it.
        self._now = CLOCKS[task.clock]
        self.taken: list[float] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the next batch."""
        while True:
            images, labels = self._data[len(self.taken) % NUM_BATCHES]
            self.taken.append(self._now())
            yield images, labels
