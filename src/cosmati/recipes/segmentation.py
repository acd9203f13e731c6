"""Segmentation by a small U-Net: which pixels belong to which of ten kinds of items, and which to none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.method import Method
from cosmati.corpora.placed_items import NUM_KINDS, ItemKind, PlacedItems, PlacedItemsPlan, load_placed_items
from cosmati.data.in_memory import InMemory
from cosmati.errors import BatchError, PlanError
from cosmati.models.unet import UNet, UNetConfig
from cosmati.optim import WSD, AdamW, Optimizer
from cosmati.recipes.recipe import Recipe
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy, batches

NUM_CLASSES = NUM_KINDS + 1
PLAN = PlacedItemsPlan()
MODEL = UNetConfig(num_classes=NUM_CLASSES, widths=(16, 32, 64))


class MeanIoU:
    """Mean intersection over union: of each class its right pixels over those that are or are taken for it.

    The mean is over the classes that there are, in targets or predictions, of counts over all batches (Everingham et
    al., 2015, doi:10.1007/s11263-014-0733-5, section 4.3).

    Args:
        num_classes: classes, the background among them.
        ignore_index: target of pixels that don't count.
    """

    def __init__(self, num_classes: int, ignore_index: int = -100) -> None:
        self._num_classes, self._ignored = num_classes, ignore_index
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._counts = torch.zeros(self._num_classes, self._num_classes, dtype=torch.int64)

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Count the pixels of a batch.

        Args:
            logits: [rows, classes, ...].
            target: int64 [rows, ...].

        Raises:
            BatchError: the shapes don't fit.
        """
        if logits.ndim < 3 or logits.shape[1] != self._num_classes or target.shape != logits[:, 0].shape:
            msg = (
                f"Logits {tuple(logits.shape)} and targets {tuple(target.shape)} give no intersection over union of "
                f"{self._num_classes} classes. Give [rows, classes, height, width] and [rows, height, width]."
            )
            raise BatchError(msg)
        counted = target != self._ignored
        pairs = target[counted] * self._num_classes + logits.argmax(1)[counted]
        found = torch.bincount(pairs, minlength=self._num_classes**2)
        self._counts += found.view(self._num_classes, -1).cpu()

    def compute(self) -> float:
        """Return the mean, in [0, 1]."""
        right = self._counts.diagonal().double()
        union = self._counts.sum(0) + self._counts.sum(1) - right
        return float((right[union > 0] / union[union > 0]).mean())


@dataclass(frozen=True, kw_only=True)
class SegmentationRows:
    """Makes the source of the training images.

    Args:
        items: what lies in them.
        rows_per_step: images in a step.
        plan: how many images, and how large.
        folder: of Fashion-MNIST's files; None is where Debian's package puts them.
    """

    items: ItemKind
    rows_per_step: int = 8
    plan: PlacedItemsPlan = PLAN
    folder: str | Path | None = None

    def __call__(self) -> InMemory:
        """Return the source."""
        made = _images(self.items, self.plan, self.folder)
        rows = made.train
        return InMemory(
            (rows.images, rows.targets),
            self.rows_per_step,
            class_ids=rows.class_ids,
            class_names=made.class_names,
            row_ids=rows.row_ids,
            row_digests=rows.row_digests,
        )


@dataclass(frozen=True, kw_only=True)
class SegmentationEvaluation:
    """Makes the evaluation: mean intersection over union and pixel accuracy, on images of items kept for it.

    Args:
        items: what lies in the images.
        rows: `selection`, to choose settings on, or `reported`.
        plan: how many images, and how large.
        folder: of Fashion-MNIST's files; None is where Debian's package puts them.
    """

    items: ItemKind
    rows: Literal["selection", "reported"] = "reported"
    plan: PlacedItemsPlan = PLAN
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        if self.rows not in ("selection", "reported"):
            msg = f"rows={self.rows!r} is unknown. Measure on the 'selection' images, or on the 'reported' ones."
            raise PlanError(msg)

    def __call__(self) -> Evaluation:
        """Return the evaluation."""
        made = _images(self.items, self.plan, self.folder)
        part = made.reported if self.rows == "reported" else made.selection
        return Evaluation(
            batches((part.images, part.targets), 100),
            {"mean_iou": MeanIoU(NUM_CLASSES), "pixel_accuracy": accuracy},
        )


@dataclass(frozen=True)
class BuildUNet:
    """Makes a U-Net of a configuration."""

    config: UNetConfig

    def __call__(self) -> nn.Module:
        """Return the model."""
        return UNet(self.config)


def segmentation_unet(
    *,
    items: ItemKind,
    num_steps: int = 600,
    seed: int = 0,
    rows_per_step: int = 8,
    model: UNetConfig = MODEL,
    optimizers: tuple[Optimizer, ...] = (),
    methods: tuple[Method, ...] = (),
    rows: Literal["selection", "reported"] = "reported",
    plan: PlacedItemsPlan = PLAN,
) -> Recipe:
    """Return a U-Net of 16 to 64 channels, with AdamW unless other optimizers are given. No setting was searched.

    Methods that move pixels without their targets, or mix targets by area, refuse to run on it: AugMix, CropAndFlip,
    CutMix and RandAugment; so do ProgressiveResizing without `resize_targets` and SelectiveBackprop that scores smaller
    images.

    Args:
        items: what lies in the images, `fashion` or `digits`; `items_at_hand()` says which ones are here.
        num_steps: budget; the schedule is dilated with it.
        seed: keys every draw of the run; the images have a seed of their own, in their plan.
        rows_per_step: images in a step.
        model: shape of the U-Net; it has 11 classes.
        optimizers: in place of AdamW.
        methods: on top.
        rows: on which images it's measured.
        plan: how many images, and how large.
    """
    adam = AdamW(lr=1e-2, weight_decay=0.01, decay_vectors=False, schedule=WSD(warmup="0.1dur", decay="0.9dur"))
    return Recipe(
        name="segmentation-unet",
        model=BuildUNet(model),
        loss=Classification(num_classes=NUM_CLASSES),
        data=SegmentationRows(items=items, rows_per_step=rows_per_step, plan=plan),
        optimizers=optimizers or (adam,),
        methods=methods,
        evaluation=SegmentationEvaluation(items=items, rows=rows, plan=plan),
        config=RunConfig(budget=f"{num_steps}ba", seed=seed),
        task=f"Which item each pixel shows: {items} placed in images of {plan.size} pixels a side",
    )


@lru_cache(maxsize=2)
def _images(items: ItemKind, plan: PlacedItemsPlan, folder: str | Path | None) -> PlacedItems:
    return load_placed_items(items, plan, folder=folder)
