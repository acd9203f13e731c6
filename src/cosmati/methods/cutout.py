"""CutOut: square holes in images (DeVries and Taylor, 2017, arXiv 1708.04552)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from cosmati.core.batch import Batch, InputKind
from cosmati.core.method import Method, Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.image_operations import as_batch

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CutOut", "cutout_batch"]

AnyImage = TypeVar("AnyImage", bound="Tensor | Image")

_IMAGE_DIMENSIONS = (3, 4)
_ROUNDING = 1e-9
"""0.57 x 100 is 56.999...: a side that the fraction meant to be whole isn't cut short."""


def cutout_batch(
    input: AnyImage,
    num_holes: int = 1,
    length: float = 0.5,
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> AnyImage:
    """Fill square holes of each image with zeros; every image has holes of its own.

    Args:
        input: one image [channels, height, width] or several [rows, channels, height, width], or a PIL image.
        num_holes: holes in each image; they may overlap.
        length: side of a hole as a fraction of the shorter side of the image, in [0, 1], rounded down to
            pixels.
        uniform_sampling: False draws the centre among the pixels, as the paper does (a pixel near the border
            is cut less often); True draws among all positions that touch the image, each pixel being cut
            equally often.
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        What was given, with holes: a new tensor of the same shape and type, or an image.

    Raises:
        BatchError: the input isn't an image or images, or num_holes or length is out of range.
    """
    if not isinstance(input, Tensor):
        pixels, back = as_batch(input, "CutOut")
        holed = cutout_batch(pixels, num_holes, length, uniform_sampling, generator=generator)
        return cast("AnyImage", back(holed))
    _check(input, num_holes, length)
    images = input if input.ndim > 3 else input[None]
    draws = torch.rand(len(images), 2 * num_holes, dtype=torch.float64, generator=generator)
    return cast("AnyImage", _cut(images, draws, length, uniform_sampling).view_as(input))


@dataclass(frozen=True, kw_only=True)
class CutOut(Method):
    """Cut square holes into every image; a row's holes are its own, wherever in the batch it stands.

    Args:
        num_holes: holes in each image; 0 is off.
        length: side of a hole as a fraction of the shorter side of the image, in [0, 1]; 0 is off.
        uniform_sampling: each pixel is cut equally often (see `cutout_batch`).
    """

    stage: ClassVar[Stage] = Stage.PERTURB
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images"})

    num_holes: int = 1
    length: float = 0.5
    uniform_sampling: bool = False

    def __post_init__(self) -> None:
        """Check the holes."""
        if not self.num_holes >= 0 or not 0 <= self.length <= 1:
            msg = (
                f"CutOut can't cut num_holes={self.num_holes} of length={self.length}. Give a count >= 0, "
                "and the side as a fraction of the image's shorter side, from 0 to 1."
            )
            raise PlanError(msg)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with holes in its input."""
        if self.num_holes == 0 or self.length == 0:
            return batch
        input = batch.input
        if not isinstance(input, Tensor) or input.ndim != max(_IMAGE_DIMENSIONS):
            found = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            msg = f"CutOut cuts images [rows, channels, height, width]; the input is {found}. Leave CutOut out."
            raise BatchError(msg)
        draws = at.row_uniform("cutout", batch, 2 * self.num_holes)
        return batch.replace(input=_cut(input, draws, self.length, self.uniform_sampling))


def _check(input: Tensor, num_holes: int, length: float) -> None:
    if input.ndim not in _IMAGE_DIMENSIONS or num_holes < 0 or not 0 <= length <= 1:
        msg = (
            f"Can't cut num_holes={num_holes} of length={length} into {tuple(input.shape)}. Give images "
            "[channels, height, width] or [rows, channels, height, width], a count >= 0, and a fraction of "
            "the shorter side from 0 to 1."
        )
        raise BatchError(msg)


def _cut(images: Tensor, draws: Tensor, length: float, uniform_sampling: bool) -> Tensor:
    """Cut holes where uniforms [rows, 2 x holes] say: vertical, horizontal, vertical, ..."""
    side = int(min(images.shape[-2:]) * length + _ROUNDING)
    inside = []
    for axis, size in enumerate(images.shape[-2:]):
        start = _starts(draws[:, axis::2], size, side, uniform_sampling).to(images.device, non_blocking=True)
        offset = torch.arange(size, device=images.device) - start[..., None]
        inside.append((offset >= 0) & (offset < side))
    vertical, horizontal = inside
    hole = torch.zeros(len(images), 1, *images.shape[-2:], dtype=torch.bool, device=images.device)
    for index in range(draws.shape[1] // 2):
        hole |= vertical[:, index, None, :, None] & horizontal[:, index, None, None, :]
    return images.clone().masked_fill_(hole, 0)  # A clone keeps the memory format, masked_fill does not.


def _starts(draws: Tensor, size: int, side: int, uniform_sampling: bool) -> Tensor:
    """Return the first pixel of each hole along one axis, int64 [rows, holes]; may lie outside the image."""
    if uniform_sampling and side:
        return (draws * (size + side - 1)).long() - (side - 1)
    return (draws * size).long() - side // 2
