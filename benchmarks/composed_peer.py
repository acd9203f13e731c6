"""Composer's arms of `benchmarks.composed`, run by the interpreter of an environment in which it's installed.

Reads a line `arm side batch_size num_steps clock` and answers with the seconds of a step, until its input ends. What
Composer only imports and never calls here (torchvision, which has no build for every PyTorch; the client of a cloud)
is an empty module where it isn't installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.composed_task import Batches, Task

_ABSENT = {name for name in ("torchvision", "mcli") if importlib.util.find_spec(name) is None} | {"mcli"}


class Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyModules(MetaPathFinder, Loader):
    """Finds what is absent."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """Answer for the absent packages alone."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in _ABSENT else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return an empty module."""
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


sys.meta_path.insert(0, EmptyModules())
warnings.simplefilter("ignore")

import composer  # noqa: E402
from composer import ComposerModel, Trainer, algorithms  # noqa: E402
from composer.core import DataSpec  # noqa: E402
from composer.loss import soft_cross_entropy  # noqa: E402

ARMS: dict[str, Any] = {
    "none": list,
    "five": lambda: [
        algorithms.BlurPool(),
        algorithms.ChannelsLast(),
        algorithms.MixUp(),
        algorithms.LabelSmoothing(),
        algorithms.EMA(half_life="100ba"),
    ],
    "other five": lambda: [
        algorithms.SqueezeExcite(latent_channels=16, min_channels=32),
        algorithms.ProgressiveResizing(),
        algorithms.CutOut(),
        algorithms.CutMix(),
        algorithms.SAM(),
    ],
}


class Classifier(ComposerModel):
    """The network with soft cross-entropy, and no metrics."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits."""
        return self.network(batch[0])

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy."""
        return soft_cross_entropy(outputs, batch[1])


def train(task: Task, arm: str, batches: Batches, num_batches: int) -> None:
    model = Classifier(task.model())
    Trainer(
        model=model,
        train_dataloader=DataSpec(batches, get_num_samples_in_batch=lambda batch: len(batch[1])),
        train_dataloader_label="train",
        max_duration=f"{num_batches}ba",
        optimizers=task.sgd(model),
        algorithms=ARMS[arm](),
        device="cpu",
        precision="fp32",
        progress_bar=False,
        seed=0,
    ).fit()


def main() -> None:
    torch.set_num_threads(1)
    # Nothing but answers goes to the pipe.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(composer.__version__, torch.__version__, file=answers)
    for line in sys.stdin:
        arm, side, batch_size, num_steps, clock = line.rstrip("\n").split("\t")
        task = Task(int(side), int(batch_size), int(num_steps), clock)
        print(task.seconds_a_step(lambda b, n: train(task, arm, b, n)), file=answers)  # noqa: B023  (called at once)


if __name__ == "__main__":
    main()
