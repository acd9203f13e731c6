"""AugMix: a mixture of several chains of operations (Hendrycks et al., 2019, arXiv 1912.02781)."""

from __future__ import annotations

import math
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
from cosmati.methods.building_blocks.mixing import NUM_GAMMA_DRAWS, log_gamma_of_uniforms
from cosmati.methods.building_blocks.target_maps import refuse_target_map

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["AugMix", "augmix_image"]

AnyImage = TypeVar("AnyImage", bound="Tensor | Image")

_MAX_RANDOM_DEPTH = 3


def augmix_image(
    img: AnyImage,
    severity: int = 3,
    depth: int = -1,
    width: int = 3,
    alpha: float = 1.0,
    augmentation_set: AugmentationSet = "all",
    *,
    generator: torch.Generator | None = None,
) -> AnyImage:
    """Mix an image, or each of several, with a mixture of chains of random operations.

    `(1 - m) * image + m * sum of w_i * chain_i(image)`, where m is of Beta(alpha, alpha) and the weights w of the
    symmetric Dirichlet distribution.

    Args:
        img: a PIL image (L or RGB), or a tensor [channels, height, width] or [rows, channels, height, width], of bytes
            or floating point in [0, 1].
        severity: strength of the operations, 0 to 10; each draws its own from 0.1 to this. 0 changes nothing.
        depth: operations of a chain; below 0, one to three.
        width: number of chains.
        alpha: parameter of both distributions, > 0.
        augmentation_set: "all", "safe" or "original" (see `operation_names`).
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        What was given, changed.

    Raises:
        BatchError: no image, or an option out of range.
    """
    _check(severity, depth, width, alpha, augmentation_set, BatchError)
    if not severity or not depth:
        return img
    images, back = as_batch(img, "AugMix")
    draws = torch.rand(len(images), _num_draws(depth, width), dtype=torch.float64, generator=generator)
    change = partial(_mixed, severity, depth, width, alpha, augmentation_set)
    return cast("AnyImage", back(change_images(images, draws, change, "AugMix")))


@dataclass(frozen=True, kw_only=True)
class AugMix(Method):
    """Mix each image with a mixture of chains of random operations on it.

    The paper's loss that keeps predictions on different mixtures together isn't part of it.

    Args:
        severity: strength of the operations, 0 to 10; 0 is off.
        depth: operations of a chain; below 0, one to three; 0 is off.
        width: number of chains.
        alpha: parameter of the distributions of the weights, > 0.
        augmentation_set: "all", "safe" or "original" (see `operation_names`).
        value_range: of the pixels, black to white. Images that are normalised channel by channel aren't in one:
            normalise them in the model.
    """

    stage: ClassVar[Stage] = Stage.PERTURB
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images"})

    severity: int = 3
    depth: int = -1
    width: int = 3
    alpha: float = 1.0
    augmentation_set: AugmentationSet = "all"
    value_range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        """Check the options."""
        _check(self.severity, self.depth, self.width, self.alpha, self.augmentation_set, PlanError)
        low, high = self.value_range
        if not low < high:
            msg = f"value_range={self.value_range} has no white. Give (black, white) with black below white."
            raise PlanError(msg)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with its images mixed, each by draws that belong to it."""
        if not self.severity or not self.depth:
            return batch
        input = batch.input
        if not isinstance(input, Tensor) or input.ndim != 4:
            found = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            msg = f"AugMix changes images [rows, channels, height, width]; the input is {found}. Leave it out."
            raise BatchError(msg)
        refuse_target_map(batch, "AugMix turns and moves images", "Leave it out, or use ColOut, CutOut or MixUp.")
        images, _ = as_batch(input, "AugMix")
        draws = at.row_uniform("augmix", batch, _num_draws(self.depth, self.width))
        change = partial(_mixed, self.severity, self.depth, self.width, self.alpha, self.augmentation_set)
        return batch.replace(input=change_images(images, draws, change, "AugMix", self.value_range))


def _num_draws(depth: int, width: int) -> int:
    """Return how many uniforms a row takes: lengths and operations of the chains, weights, and the mixture's share."""
    longest = depth if depth > 0 else _MAX_RANDOM_DEPTH
    return width * (1 + longest * NUM_DRAWS) + (width + 2) * NUM_GAMMA_DRAWS


def _mixed(
    severity: int,
    depth: int,
    width: int,
    alpha: float,
    augmentation_set: AugmentationSet,
    images: Tensor,
    draws: Tensor,
) -> Tensor:
    images = images.clamp(0, 1)
    longest = depth if depth > 0 else _MAX_RANDOM_DEPTH
    lengths, operations, rest = draws.split([width, width * longest * NUM_DRAWS, (width + 2) * NUM_GAMMA_DRAWS], dim=1)
    # Logarithms of gamma variates: their softmax is Dirichlet, and of two it is Beta distributed.
    logs = log_gamma_of_uniforms(alpha, rest.reshape(len(images), width + 2, NUM_GAMMA_DRAWS))
    shares, mixture = logs[:, :width].softmax(1), logs[:, width:].softmax(1)
    sum_of_chains = torch.zeros_like(images)
    chains = operations.view(len(images), width, longest, NUM_DRAWS)
    for index in range(width):
        length = torch.full((len(images),), depth) if depth > 0 else 1 + (lengths[:, index] * longest).long()
        chain = augment(images.clone(), chains[:, index, 0], severity, augmentation_set)
        for step in range(1, longest):
            going = torch.nonzero(length > step).flatten()
            rows = going.to(images.device, non_blocking=True)
            chain[rows] = augment(chain[rows], chains[going, index, step], severity, augmentation_set)
        sum_of_chains.addcmul_(_column(shares[:, index], images), chain)
    share = _column(mixture[:, 0], images)
    return torch.lerp(images, sum_of_chains, share).clamp_(0, 1)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device, like.dtype, non_blocking=True).view(-1, 1, 1, 1)


def _check(
    severity: int, depth: int, width: int, alpha: float, augmentation_set: AugmentationSet, error: type[CosmatiError]
) -> None:
    operation_names(augmentation_set, error)
    if not (0 <= severity <= MAX_SEVERITY and width >= 1 and 0 < alpha < math.inf and depth >= -1):
        msg = (
            f"AugMix can't use severity={severity}, depth={depth}, width={width}, alpha={alpha}. Give a severity from "
            f"0 (off) to {MAX_SEVERITY}, a depth >= 0 or -1, at least one chain, and alpha > 0."
        )
        raise error(msg)
