"""RandAugment: a few random operations on each image (Cubuk et al., 2019, arXiv 1909.13719)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from cosmati.core.batch import Batch, InputKind
from cosmati.core.method import Method, Position, Stage
from cosmati.errors import BatchError, CosmatiError, PlanError
from cosmati.methods.building_blocks.image_operations import (
    MAX_SEVERITY,
    NUM_DRAWS,
    AugmentationSet,
    as_batch,
    augment,
    change_images,
    operation_names,
)
from cosmati.methods.building_blocks.target_maps import refuse_target_map

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["RandAugment", "randaugment_image"]

AnyImage = TypeVar("AnyImage", bound="Tensor | Image")


def randaugment_image(
    img: AnyImage,
    severity: int = 9,
    depth: int = 2,
    augmentation_set: AugmentationSet = "all",
    *,
    generator: torch.Generator | None = None,
) -> AnyImage:
    """Apply random operations to an image, or to each of several.

    Args:
        img: a PIL image (L or RGB), or a tensor [channels, height, width] or [rows, channels, height, width], of bytes
            or floating point in [0, 1].
        severity: strength of the operations, 0 to 10; each draws its own from 0.1 to this. 0 changes nothing.
        depth: how many operations, one after another.
        augmentation_set: "all", "safe" or "original" (see `operation_names`).
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        What was given, changed.

    Raises:
        BatchError: no image, or an option out of range.
    """
    _check(severity, depth, augmentation_set, BatchError)
    if not severity or not depth:
        return img
    images, back = as_batch(img, "RandAugment")
    draws = torch.rand(len(images), depth * NUM_DRAWS, dtype=torch.float64, generator=generator)
    change = partial(_augmented, severity, depth, augmentation_set)
    return cast("AnyImage", back(change_images(images, draws, change, "RandAugment")))


@dataclass(frozen=True, kw_only=True)
class RandAugment(Method):
    """Apply a few random operations to each image.

    Args:
        severity: strength of the operations, 0 to 10; 0 is off.
        depth: how many operations, one after another; 0 is off.
        augmentation_set: "all", "safe" or "original" (see `operation_names`).
        value_range: of the pixels, black to white. Images that are normalised channel by channel aren't in one:
            normalise them in the model.
    """

    stage: ClassVar[Stage] = Stage.PERTURB
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images"})

    severity: int = 9
    depth: int = 2
    augmentation_set: AugmentationSet = "all"
    value_range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        """Check the options."""
        _check(self.severity, self.depth, self.augmentation_set, PlanError)
        low, high = self.value_range
        if not low < high:
            msg = f"value_range={self.value_range} has no white. Give (black, white) with black below white."
            raise PlanError(msg)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with its images changed, each by draws that belong to it."""
        if not self.severity or not self.depth:
            return batch
        input = batch.input
        if not isinstance(input, Tensor) or input.ndim != 4:
            found = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            msg = f"RandAugment changes images [rows, channels, height, width]; the input is {found}. Leave it out."
            raise BatchError(msg)
        refuse_target_map(batch, "RandAugment turns and moves images", "Leave it out, or use ColOut, CutOut or MixUp.")
        images, _ = as_batch(input, "RandAugment")
        draws = at.row_uniform("randaugment", batch, self.depth * NUM_DRAWS)
        change = partial(_augmented, self.severity, self.depth, self.augmentation_set)
        return batch.replace(input=change_images(images, draws, change, "RandAugment", self.value_range))


def _augmented(severity: int, depth: int, augmentation_set: AugmentationSet, images: Tensor, draws: Tensor) -> Tensor:
    images = images.clamp(0, 1)
    for step in draws.view(len(images), depth, NUM_DRAWS).unbind(1):
        images = augment(images, step, severity, augmentation_set)
    return images


def _check(severity: int, depth: int, augmentation_set: AugmentationSet, error: type[CosmatiError]) -> None:
    operation_names(augmentation_set, error)
    if not 0 <= severity <= MAX_SEVERITY or not depth >= 0:
        msg = (
            f"RandAugment can't use severity={severity}, depth={depth}. Give a severity from 0 (off) to "
            f"{MAX_SEVERITY}, and a number of operations >= 0."
        )
        raise error(msg)
