"""Crops of padded images and of their mirror images, as usual for CIFAR (He et al., 2015, 1512.03385, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cosmati.core.batch import Batch, InputKind
from cosmati.core.method import Method, Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.target_maps import refuse_target_map

__all__ = ["CropAndFlip", "crop_and_flip_batch"]


def crop_and_flip_batch(
    input: Tensor, padding: int = 4, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    """Move each image by up to `padding` pixels, with zeros where there was nothing, and mirror some of them.

    Args:
        input: [rows, channels, height, width]; zero is what's outside, so normalised images get their mean there.
        padding: pixels by which an image moves at most, vertically and horizontally, >= 0.
        p: probability that an image is mirrored left to right, in [0, 1].
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        A new tensor of the same shape, type and memory format.

    Raises:
        BatchError: the input isn't images, the padding is negative, or p is no probability.
    """
    if not isinstance(input, Tensor) or input.ndim != 4 or padding < 0 or not 0 <= p <= 1:
        found = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
        msg = (
            f"Can't crop and flip {found} by padding={padding}, p={p}. Give images [rows, channels, height, width], "
            "pixels >= 0 and a probability from 0 to 1."
        )
        raise BatchError(msg)
    return _crop_and_flip(input, padding, p, torch.rand(len(input), 3, dtype=torch.float64, generator=generator))


@dataclass(frozen=True, kw_only=True)
class CropAndFlip(Method):
    """Move and mirror images at random; a row's move is its own, wherever in the batch it stands.

    Args:
        padding: pixels by which an image moves at most, with zeros where there was nothing; 0 is off.
        p: probability that an image is mirrored left to right, in [0, 1]; 0 is off.
    """

    stage: ClassVar[Stage] = Stage.PERTURB
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images"})

    padding: int = 4
    p: float = 0.5

    def __post_init__(self) -> None:
        """Check padding and probability."""
        if not self.padding >= 0 or not 0 <= self.p <= 1:
            msg = (
                f"CropAndFlip can't use padding={self.padding}, p={self.p}. Give pixels >= 0 and a probability from 0 "
                "to 1; 0 is off."
            )
            raise PlanError(msg)

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with its images moved and mirrored."""
        if self.padding == 0 and self.p == 0:
            return batch
        input = batch.input
        if not isinstance(input, Tensor) or input.ndim != 4:
            found = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            msg = f"CropAndFlip moves images [rows, channels, height, width]; the input is {found}. Leave it out."
            raise BatchError(msg)
        refuse_target_map(
            batch, "CropAndFlip moves and mirrors images", "Leave it out, or use ColOut, CutOut or MixUp."
        )
        draws = at.row_uniform("crop and flip", batch, 3)
        return batch.replace(input=_crop_and_flip(input, self.padding, self.p, draws))


def _crop_and_flip(images: Tensor, padding: int, p: float, draws: Tensor) -> Tensor:
    """Move and mirror where uniforms [rows, 3] say: top, left, mirrored."""
    rows, channels, height, width = images.shape
    device = images.device
    top, left = ((draws[:, i] * (2 * padding + 1)).long().to(device)[:, None] for i in (0, 1))
    down = top + torch.arange(height, device=device)
    along = torch.arange(width, device=device).expand(rows, width)
    across = left + torch.where((draws[:, 2:] < p).to(device), along.flip(1), along)
    padded = F.pad(images, (padding,) * 4)
    row, channel = torch.arange(rows, device=device), torch.arange(channels, device=device)
    picked = padded[row[:, None, None, None], channel[:, None, None], down[:, None, :, None], across[:, None, None, :]]
    return picked.contiguous(
        memory_format=torch.channels_last if _is_channels_last(images) else torch.contiguous_format
    )


def _is_channels_last(images: Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
