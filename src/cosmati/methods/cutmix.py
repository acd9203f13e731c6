"""CutMix: a box of each image comes from another one (Yun et al., 2019, arXiv 1905.04899)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cosmati.core.batch import Batch, InputKind
from cosmati.core.loss import MixedTarget
from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.mixing import one_hot, pair_rows, sample_dirichlet
from cosmati.methods.building_blocks.target_maps import refuse_target_map

__all__ = ["CutMix", "cutmix_batch"]

Box = tuple[int, int, int, int]
"""First row of pixels, first column, and the first ones after the box."""

_ROUNDING = 1e-9
"""0.57 x 100 is 56.999...: a side that the fraction meant to be whole isn't cut short."""


def cutmix_batch(
    input: Tensor,
    target: Tensor,
    length: float | None = None,
    alpha: float = 1.0,
    bbox: Box | None = None,
    indices: Tensor | None = None,
    uniform_sampling: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, float, Box]:
    """Paste into each image the same box of another one.

    Args:
        input: [rows, channels, height, width].
        target: [rows, ...].
        length: sides of the box as a fraction of the image's, in [0, 1], rounded down to pixels; None draws
            the box's share of the area from Beta(alpha, alpha).
        alpha: parameter of the Beta distribution, >= 0; 0 cuts nothing.
        bbox: the box itself, (top, left, bottom, right) in pixels, the last two exclusive; None draws one.
        indices: int64 [rows], whose box each row is given; None draws a permutation.
        uniform_sampling: False draws the box's centre among the pixels, as the paper does (a pixel near the
            border is cut less often); True draws among all positions that touch the image, each pixel being
            cut equally often. What lies outside the image is clipped.
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        New input, permuted target, the share of the image that is its own, and the box. The loss is then
        `share * loss(output, target) + (1 - share) * loss(output, permuted)`.

    Raises:
        BatchError: the input isn't images, the box lies outside of them or is given twice, or length or alpha is out of
            range.
    """
    if input.ndim != 4:
        msg = f"CutMix cuts images [rows, channels, height, width]; the input is {tuple(input.shape)}."
        raise BatchError(msg)
    if bbox is not None and length is not None:
        msg = f"bbox={bbox} is the box already, and length={length} would draw one. Give bbox or length."
        raise BatchError(msg)
    height, width = input.shape[2:]
    if bbox is None:
        bbox = _draw_box(height, width, length, alpha, uniform_sampling, generator)
    top, left, bottom, right = bbox
    if not (0 <= top <= bottom <= height and 0 <= left <= right <= width):
        msg = (
            f"The box {bbox} isn't inside images of {height} x {width} pixels. Give (top, left, bottom, right), the "
            "last two exclusive."
        )
        raise BatchError(msg)
    if indices is None:
        indices = torch.randperm(input.shape[0], generator=generator).to(input.device)
    mixed = input.clone()
    mixed[:, :, top:bottom, left:right] = input[:, :, top:bottom, left:right][indices]
    share = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, target[indices], share, bbox


@dataclass(frozen=True, kw_only=True)
class CutMix(Method):
    """Paste into the images of a microbatch the same box of one another, and mix the targets by area.

    A row whose partner is a tombstone keeps its own box, and so does a tombstone.

    Args:
        alpha: parameter of the Beta distribution of the box's area, >= 0; 0 is off.
        interpolate_loss: interpolate two losses instead of two targets: the same for cross-entropy, without a
            probability for each class; needs a loss that reads `MixedTarget`.
        uniform_sampling: each pixel is cut equally often (see `cutmix_batch`).
        length: sides of the box as a fraction of the image's, in place of alpha; 0 is off.
    """

    stage: ClassVar[Stage] = Stage.MIX
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images"})

    alpha: float = 1.0
    interpolate_loss: bool = False
    uniform_sampling: bool = False
    length: float | None = None

    def __post_init__(self) -> None:
        """Check the box."""
        if not 0 <= self.alpha < math.inf or not 0 <= (self.length or 0) <= 1:
            msg = (
                f"CutMix can't draw a box of alpha={self.alpha}, length={self.length}. Give alpha >= 0 (0 is off), "
                "or a fraction of the image's sides from 0 to 1."
            )
            raise PlanError(msg)

    @property
    def is_off(self) -> bool:
        """Whether no box is ever cut."""
        return self.length == 0 if self.length is not None else self.alpha == 0

    @property
    def couples(self) -> frozenset[Coupling]:
        """Rows: a mixed row is made of two."""
        return frozenset(() if self.is_off else {"rows"})

    @property
    def claims(self) -> frozenset[str]:
        """The interpolation of the loss, where it's interpolated."""
        return frozenset({"loss interpolation"} if self.interpolate_loss and not self.is_off else ())

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch mixed: its targets are probabilities, or `MixedTarget` with `interpolate_loss`."""
        if self.is_off:
            return batch
        input, target = batch.input, batch.target
        if not isinstance(input, Tensor) or not isinstance(target, Tensor):
            msg = (
                f"CutMix mixes one input tensor and one target tensor, not a {type(input).__name__} and a "
                f"{type(target).__name__}. Use one method that mixes, on batches (input, target)."
            )
            raise BatchError(msg)
        refuse_target_map(
            batch,
            "CutMix mixes targets by area, whatever part of the images it cuts",
            "Leave it out, or use ColOut, CutOut or MixUp.",
        )
        generator = at.generator("cutmix")
        pairs = pair_rows(batch.num_rows, batch.present, generator)
        indices = pairs.to(input.device, non_blocking=True)
        if not self.interpolate_loss and not target.is_floating_point():
            target = one_hot(target, at.num_classes(target, "CutMix"), getattr(at.loss, "ignore_index", -100))
        mixed, permuted, share, _ = cutmix_batch(
            input, target, self.length, self.alpha, None, indices, self.uniform_sampling, generator=generator
        )
        new_target: Tensor | MixedTarget
        if self.interpolate_loss:
            new_target = MixedTarget(target, permuted, torch.tensor(share))
        else:
            new_target = share * target + (1 - share) * permuted
        return batch.replace(input=mixed, target=new_target, lineage=batch.lineage.mix(pairs))


def _draw_box(
    height: int,
    width: int,
    length: float | None,
    alpha: float,
    uniform_sampling: bool,
    generator: torch.Generator | None,
) -> Box:
    if not 0 <= alpha < math.inf or not 0 <= (length or 0) <= 1:
        msg = (
            f"Can't draw a box of length={length}, alpha={alpha}. Give a fraction of the image's sides from 0 to 1, "
            "or alpha >= 0."
        )
        raise BatchError(msg)
    if length is None:
        length = math.sqrt(float(sample_dirichlet(alpha, 2, generator)[0])) if alpha else 0.0
    places = torch.rand(2, dtype=torch.float64, generator=generator).tolist()
    top, bottom = _span(places[0], height, length, uniform_sampling)
    left, right = _span(places[1], width, length, uniform_sampling)
    return top, left, bottom, right


def _span(place: float, size: int, length: float, uniform_sampling: bool) -> tuple[int, int]:
    """Return the pixels of the box along one axis, clipped to the image."""
    side = int(size * length + _ROUNDING)
    start = int(place * size) - side // 2
    if uniform_sampling and side:
        start = int(place * (size + side - 1)) - (side - 1)
    return max(0, start), min(size, start + side)
