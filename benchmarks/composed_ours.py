"""This library's arms of `benchmarks.composed`, in a process of their own: a run changes how memory is freed."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.composed_task import NUM_CLASSES, Batches, Task, serve
from cosmati import Classification, RunConfig, Trainer
from cosmati import methods as m
from cosmati.core.method import Method

ARMS: dict[str, tuple[Method, ...]] = {
    "none": (),
    "five": (m.BlurPool(), m.ChannelsLast(), m.MixUp(), m.LabelSmoothing(), m.EMA(half_life="100ba")),
    "other five": (
        m.SqueezeExcite(latent_channels=16, min_channels=32),
        m.ProgressiveResizing(),
        m.CutOut(),
        m.CutMix(),
        m.SAM(),
    ),
}


def train(task: Task, batches: Batches, num_batches: int, methods: tuple[Method, ...]) -> None:
    model = task.model()
    config = RunConfig(budget=f"{num_batches}ba")
    loss = Classification(NUM_CLASSES)
    Trainer(model, loss, batches, optimizers=[task.sgd(model)], methods=methods, config=config).fit()


if __name__ == "__main__":
    serve({name: partial(train, methods=methods) for name, methods in ARMS.items()}, f"PyTorch {torch.__version__}")
