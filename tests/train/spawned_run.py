"""A script that trains by itself, or in a process that multiprocessing spawned, as `mp.spawn` does for ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from cosmati import RunConfig, Trainer
from cosmati.errors import CheckpointError
from cosmati.optim import SGD


@dataclass
class Settings:
    """Of which a loss reads one."""

    scale: float = 1.0


class Scaled(nn.Module):
    """A layer of the script's own."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * SETTINGS.scale


class Net(nn.Module):
    """Holds functions, classes and objects of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scaled = nn.Linear(4, 3), Scaled()
        self.act = halved

    def forward(self, inputs: Tensor) -> Tensor:
        return self.act(self.scaled(self.layer(inputs)))


def halved(inputs: Tensor) -> Tensor:
    return inputs / 2


SETTINGS = Settings()
# More than are kept one by one: a digest stands for them.
TABLE = [(halved, Settings(index)) for index in range(40)]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return TABLE[0][0](nn.functional.mse_loss(model(batch[0]), batch[1]))


def train(_: int, folder: str, budget: str) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randn(8, 3)) for _ in range(4)]
    config = RunConfig(budget=budget, num_microbatches=2, num_threads=1, change=("budget",), run_folder=folder)
    try:
        result = Trainer(Net(), loss, data, optimizers=[SGD(lr=0.1)], config=config).fit()
    except CheckpointError as error:
        sys.stdout.write(f"{error}\n")
    else:
        sys.stdout.write(f"{result.outcome} {result.clock.step}\n")


if __name__ == "__main__":
    for how, budget in zip(sys.argv[2:], ("2ba", "4ba", "6ba"), strict=False):
        if how == "spawned":
            mp.spawn(train, (sys.argv[1], budget), nprocs=1)
        else:
            train(0, sys.argv[1], budget)
