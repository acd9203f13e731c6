"""Progressive resizing: small images first, full size at the end (fastai; Howard, 2018, DAWNBench)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cosmati.core.batch import Batch, InputKind
from cosmati.core.clock import Budget
from cosmati.core.method import Method, Position, Stage
from cosmati.core.source import ImageSize
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.target_maps import refuse_target_map

__all__ = ["ProgressiveResizing", "resize_batch"]

Mode = Literal["crop", "resize"]

_MODES = ("crop", "resize")
_ROUNDING = 1e-6
"""A scale of 20/28 times 28 pixels may be a hair under 20: it isn't cut to 19."""


def resize_batch(
    input: Tensor,
    target: Tensor,
    scale_factor: float,
    mode: Mode = "resize",
    resize_targets: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Make images smaller by one factor, by interpolation or by one random crop for all of them.

    Args:
        input: [rows, channels, height, width].
        target: anything; with `resize_targets`, [rows, height, width] or [rows, channels, height, width], in
            the input's resolution or a multiple or fraction of it.
        scale_factor: new side over old side, > 0; sides are rounded down to pixels and at least 1. From 1 on,
            nothing changes.
        mode: "resize" takes the nearest neighbour (so that class indices stay class indices), "crop" cuts a window.
        resize_targets: do the same to the targets, where they are maps.
        generator: of the CPU, for the crop's place; None is PyTorch's default generator.

    Returns:
        Input and target, resized.

    Raises:
        BatchError: the tensors aren't images, the mode is unknown or the factor isn't positive.
    """
    if mode not in _MODES or not scale_factor > 0:
        msg = f"Can't resize by mode={mode!r}, scale_factor={scale_factor}. Use one of {_MODES}, a positive factor."
        raise BatchError(msg)
    _check_images(input, target if resize_targets else None)
    if scale_factor >= 1:
        return input, target
    height, width = (max(1, _scale(side, scale_factor)) for side in input.shape[2:])
    small, small_target = _resize(input, target if resize_targets else None, (height, width), mode, generator)
    return small, target if small_target is None else small_target


@dataclass(frozen=True, kw_only=True)
class ProgressiveResizing(Method):
    """Train on small images first, and let them grow linearly to their full size.

    The width follows the schedule in multiples of `size_increment`; the height keeps the shape, in multiples
    too. The full size is the images' own, multiple or not. No side is ever less than 1.

    A `StreamingSource` whose transform is `DecodeImages` decodes them in the size of the step, so that the decoder
    has less to do as well; they're scaled with antialiasing then. "crop" and `resize_targets` need them whole.

    Args:
        mode: "resize" interpolates (nearest neighbour), "crop" cuts one window, in each microbatch at another place.
        initial_scale: scale at the start, in (0, 1]; 1 is off.
        finetune_fraction: fraction of the run, at its end, at full size.
        delay_fraction: fraction of the run, at its start, at the initial scale.
        size_increment: pixels between one size and the next, > 0.
        resize_targets: resize the targets too, where they are maps.
        image_width: width of the images, which the plan doesn't know, for counting shapes before a compiled
            run. None counts a shape for each step of the growth.
    """

    stage: ClassVar[Stage] = Stage.SHAPE
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images"})

    mode: Mode = "resize"
    initial_scale: float = 0.5
    finetune_fraction: float = 0.2
    delay_fraction: float = 0.5
    size_increment: int = 4
    resize_targets: bool = False
    image_width: int | None = None

    def __post_init__(self) -> None:
        """Check the schedule."""
        if self.mode not in _MODES:
            msg = f"mode={self.mode!r} is unknown. Use one of {_MODES}."
            raise PlanError(msg)
        if not 0 < self.initial_scale <= 1 or not self.size_increment >= 1:
            msg = (
                f"initial_scale={self.initial_scale} with size_increment={self.size_increment} gives no "
                "size. Give a scale above 0, up to 1, and at least 1 pixel."
            )
            raise PlanError(msg)
        delay, finetune = self.delay_fraction, self.finetune_fraction
        if not (delay >= 0 and finetune >= 0 and delay + finetune <= 1):
            msg = (
                f"delay_fraction={delay} and finetune_fraction={finetune} don't fit into a run. Give "
                "fractions whose sum is at most 1."
            )
            raise PlanError(msg)

    def scale(self, elapsed: float) -> float:
        """Return the scale, in [initial_scale, 1], after a fraction of the run."""
        if elapsed >= 1 - self.finetune_fraction:
            return 1.0
        if elapsed <= self.delay_fraction:
            return self.initial_scale
        growth = (elapsed - self.delay_fraction) / (1 - self.finetune_fraction - self.delay_fraction)
        return min(1.0, self.initial_scale + (1 - self.initial_scale) * growth)

    def size(self, height: int, width: int, scale: float) -> tuple[int, int]:
        """Return height and width, in pixels, at a scale."""
        if scale >= 1:
            return height, width
        new_width = self._pinned(width * scale, width)
        return (height if new_width == width else self._pinned(height * new_width / width, height)), new_width

    def _pinned(self, side: float, limit: int) -> int:
        multiple = math.floor(side / self.size_increment + 0.5) * self.size_increment
        return min(limit, max(self.size_increment, multiple))

    def shapes(self, budget: Budget) -> int:
        """Return a bound of the number of sizes that the run will see.

        Raises:
            PlanError: neither the image's width nor the run's number of steps is known.
        """
        if self.initial_scale == 1:
            return 1
        num_steps = budget.num_steps
        growth = 1 - self.finetune_fraction - self.delay_fraction
        sizes = [] if num_steps is None else [math.ceil(growth * num_steps) + 2]
        if self.image_width is not None:
            first = self.size(self.image_width, self.image_width, self.initial_scale)[1]
            sizes.append(math.ceil((self.image_width - first) / self.size_increment) + 1)
        if not sizes:
            msg = "ProgressiveResizing can't count its sizes: the run's steps aren't known ahead. Give image_width=."
            raise PlanError(msg)
        return min(sizes)

    def image_size(self, full: ImageSize, elapsed: float) -> ImageSize:
        """Return the size of a step; a crop, and targets resized alike, need the image whole."""
        if self.mode == "crop" or self.resize_targets:
            return full
        return self.size(*full, self.scale(elapsed))

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with smaller images, where they didn't come so from their decoder."""
        scale = self.scale(at.elapsed)
        if scale == 1:
            return batch
        input, target = batch.input, batch.target if self.resize_targets else None
        _check_images(input, target)
        shape = input.shape[2], input.shape[3]
        height, width = at.image_size or shape
        size = self.size(height, width, scale)
        if size == shape:
            return batch
        if not self.resize_targets:
            refuse_target_map(
                batch,
                "ProgressiveResizing makes images smaller",
                "Use ProgressiveResizing(resize_targets=True).",
                size=(height, width),
            )
        generator = at.generator("progressive_resizing")
        input, target = _resize(input, target, size, self.mode, generator)
        return batch.replace(input=input) if target is None else batch.replace(input=input, target=target)


def _check_images(input: object, target: object | None) -> None:
    if not isinstance(input, Tensor) or input.ndim != 4:
        found = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
        msg = f"ProgressiveResizing needs images [rows, channels, height, width]; found {found}. Stack them first."
        raise BatchError(msg)
    if target is not None and (not isinstance(target, Tensor) or target.ndim not in (3, 4)):
        found = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        msg = (
            "resize_targets=True needs maps [rows, height, width] or [rows, channels, height, width]; found "
            f"{found}. Leave it out where the targets aren't maps."
        )
        raise BatchError(msg)


def _resize(
    input: Tensor,
    target: Tensor | None,
    size: tuple[int, int],
    mode: Mode,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    """Resize the input to a size, and a target map in proportion; crops of both show the same part."""
    corner: tuple[int, int] | None = None
    if mode == "crop":
        room = input.shape[2] - size[0], input.shape[3] - size[1]
        corner = _draw(room[0], generator), _draw(room[1], generator)
    if target is not None:
        vertical, horizontal = target.shape[-2] / input.shape[2], target.shape[-1] / input.shape[3]
        target_corner = corner and (_scale(corner[0], vertical), _scale(corner[1], horizontal))
        target_size = max(1, _scale(size[0], vertical)), max(1, _scale(size[1], horizontal))
        target = _fit(target, target_size, target_corner)
    return _fit(input, size, corner), target


def _draw(room: int, generator: torch.Generator | None) -> int:
    return int(torch.randint(room + 1, (), generator=generator))


def _scale(pixels: int, ratio: float) -> int:
    return int(pixels * ratio + _ROUNDING)


def _fit(images: Tensor, size: tuple[int, int], corner: tuple[int, int] | None) -> Tensor:
    """Crop at a corner, or interpolate where there is none."""
    if corner is not None:
        (top, left), (height, width) = corner, size
        return images[..., top : top + height, left : left + width].clone()
    maps = images if images.ndim > 3 else images[:, None]
    if not images.is_floating_point():
        maps = maps.double()  # Holds every class index; interpolation has no kernel for integers.
    return F.interpolate(maps, size, mode="nearest").to(images.dtype).reshape(*images.shape[:-2], *size)
