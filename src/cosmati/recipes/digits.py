"""Handwritten digits with few labels: a small ResNet with SGD, and methods on top of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from cosmati.core.batch import Data, input_of, target_of
from cosmati.core.loss import Classification, Loss
from cosmati.core.method import Method
from cosmati.corpora.digits import Digits, load_digits_images
from cosmati.data.in_memory import InMemory
from cosmati.methods import CutOut, LabelSmoothing, MixUp
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import SGD, Cosine
from cosmati.recipes.recipe import Recipe
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy, batches


@dataclass(frozen=True, kw_only=True)
class DigitsTask:
    """Which digits, in batches of how many.

    Args:
        size: pixels a side.
        label_fraction: fraction of the training labels that are used; fewer make a harder task.
        rows_per_step: rows in a step.
        widths: channels of the ResNet's stages.
    """

    size: int = 16
    label_fraction: float = 0.3
    rows_per_step: int = 64
    widths: tuple[int, ...] = (16, 32, 64)

    @property
    def in_words(self) -> str:
        """What is learnt from what."""
        return f"Handwritten digits, {self.label_fraction:.0%} of the training labels, {self.size} pixels a side"

    def digits(self) -> Digits:
        """Return the images; read once a process."""
        return _digits(self.size, self.label_fraction)

    def data(self) -> InMemory:
        """Return the training rows."""
        digits = self.digits()
        rows = digits.train
        return InMemory(
            (rows.images, rows.targets),
            self.rows_per_step,
            class_ids=rows.class_ids,
            class_names=digits.class_names,
            row_ids=rows.row_ids,
            row_digests=rows.row_digests,
        )

    def evaluation(self) -> Evaluation:
        """Return cross-entropy and accuracy on the held-out images."""
        rows = self.digits().validation
        metrics = {"cross_entropy": cross_entropy, "accuracy": accuracy}
        return Evaluation(batches((rows.images, rows.targets), 256), metrics)

    def model(self) -> nn.Module:
        """Return the ResNet."""
        return ResNet(ResNetConfig(widths=self.widths))


@lru_cache(maxsize=2)
def _digits(size: int, label_fraction: float) -> Digits:
    return load_digits_images(size, label_fraction=label_fraction)


def cross_entropy(model: nn.Module, data: Data) -> Loss:
    """Return the cross-entropy of the plain targets, in nats, weighted by rows."""
    return Classification(num_classes=10).compare(model(input_of(data)), target_of(data))


def digits_baseline(task: DigitsTask | None = None, *, num_steps: int = 120, seed: int = 0, lr: float = 0.1) -> Recipe:
    """Return the baseline: SGD with Nesterov momentum, weight decay on matrices, warm-up and a cosine to zero."""
    task = task or DigitsTask()
    schedule = Cosine(warmup="0.1dur")
    return Recipe(
        name="digits-baseline",
        model=task.model,
        loss=Classification(num_classes=10),
        data=task.data,
        optimizers=(
            SGD(lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4, decay_vectors=False, schedule=schedule),
        ),
        evaluation=task.evaluation,
        config=RunConfig(budget=f"{num_steps}ba", seed=seed, evaluate_every="0.5dur"),
        task=task.in_words,
    )


SMOOTHING = LabelSmoothing(smoothing=0.05)
MIXUP = MixUp(alpha=0.2)
CUTOUT = CutOut(length=0.3)
ARM_METHODS: Mapping[str, tuple[Method, ...]] = {
    "label smoothing": (SMOOTHING,),
    "mixup": (MIXUP,),
    "cutout": (CUTOUT,),
    "composition": (CUTOUT, SMOOTHING),
}
"""What each arm of the study adds to the baseline."""


def digits_with(
    methods: tuple[Method, ...],
    task: DigitsTask | None = None,
    *,
    num_steps: int = 120,
    seed: int = 0,
    name: str = "digits",
) -> Recipe:
    """Return the baseline with methods on top."""
    return dataclasses.replace(digits_baseline(task, num_steps=num_steps, seed=seed), name=name, methods=methods)
