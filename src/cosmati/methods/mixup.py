"""MixUp: convex combinations of pairs of rows (Zhang et al., 2017, arXiv 1710.09412)."""

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
from cosmati.methods.building_blocks.mixing import one_hot, pair_rows

__all__ = ["MixUp", "mixup_batch"]


def mixup_batch(
    input: Tensor,
    target: Tensor,
    mixing: float | None = None,
    alpha: float = 0.2,
    indices: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Mix each row with another one: `(1 - mixing) * input + mixing * input[indices]`.

    Args:
        input: floating point, [rows, ...].
        target: [rows, ...].
        mixing: weight of the permuted rows, in [0, 1]; None draws `min(z, 1 - z)` for z of Beta(alpha,
            alpha), so that a row's own target stays the main one.
        alpha: parameter of the Beta distribution, >= 0; 0 draws 0.
        indices: int64 [rows], which row each one is mixed with; None draws a permutation.
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        Mixed input, permuted target, mixing. The loss is then
        `(1 - mixing) * loss(output, target) + mixing * loss(output, permuted)`.

    Raises:
        BatchError: the input isn't floating point, or mixing or alpha is out of range.
    """
    if not input.is_floating_point():
        msg = f"MixUp can't mix inputs of {input.dtype}: a token has no mean. Convert images to floating point first."
        raise BatchError(msg)
    if mixing is None:
        mixing = sample_mixing(alpha, generator)
    if not 0 <= mixing <= 1:
        msg = f"mixing={mixing} is not a share. Give the weight of the permuted rows, from 0 to 1."
        raise BatchError(msg)
    if indices is None:
        indices = torch.randperm(input.shape[0], generator=generator).to(input.device)
    return (1 - mixing) * input + mixing * input[indices], target[indices], mixing


def sample_mixing(alpha: float, generator: torch.Generator | None = None) -> float:
    """Draw `min(z, 1 - z)` for z of Beta(alpha, alpha), exactly, from two uniforms.

    Student's t with 2 alpha degrees of freedom is a polar transform of two uniforms (Bailey, 1994), and a
    symmetric Beta is a transform of it (Devroye, 1996). Written so that small values keep their precision.

    Raises:
        BatchError: alpha is negative.
    """
    if alpha < 0:
        msg = f"alpha={alpha} is no parameter of a Beta distribution. Give a number >= 0; 0 doesn't mix."
        raise BatchError(msg)
    if alpha == 0:
        return 0.0
    radius, angle = torch.rand(2, dtype=torch.float64, generator=generator).tolist()
    power: float = radius ** (1 / alpha)
    # z and 1 - z are (1 +- sqrt(1 - rest)) / 2.
    rest = power / (power + (1 - power) * math.cos(2 * math.pi * angle) ** 2)
    return 0.5 * rest / (1 + math.sqrt(1 - rest))


@dataclass(frozen=True, kw_only=True)
class MixUp(Method):
    """Mix the rows of a microbatch pairwise, with one weight for all of them.

    A row whose partner is a tombstone is mixed with itself, and so is a tombstone: nobody learns from an
    empty row, and a deleted row changes no pairs but its own.

    Args:
        alpha: parameter of the Beta distribution of the weight, >= 0; 0 is off.
        interpolate_loss: interpolate two losses instead of two targets: the same for cross-entropy, without a
            probability for each class; needs a loss that reads `MixedTarget`.
    """

    stage: ClassVar[Stage] = Stage.MIX
    reads: ClassVar[frozenset[InputKind]] = frozenset({"images", "features"})

    alpha: float = 0.2
    interpolate_loss: bool = False

    def __post_init__(self) -> None:
        """Check alpha."""
        if not 0 <= self.alpha < math.inf:
            msg = f"alpha={self.alpha} is no parameter of a Beta distribution. Give a number >= 0; 0 is off."
            raise PlanError(msg)

    @property
    def couples(self) -> frozenset[Coupling]:
        """Rows: a mixed row is made of two."""
        return frozenset({"rows"} if self.alpha else ())

    @property
    def claims(self) -> frozenset[str]:
        """The interpolation of the loss, where it's interpolated."""
        return frozenset({"loss interpolation"} if self.interpolate_loss and self.alpha else ())

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch mixed: its targets are probabilities, or `MixedTarget` with `interpolate_loss`."""
        if self.alpha == 0:
            return batch
        input, target = batch.input, batch.target
        if not isinstance(input, Tensor) or not isinstance(target, Tensor):
            msg = (
                f"MixUp mixes one input tensor and one target tensor, not a {type(input).__name__} and a "
                f"{type(target).__name__}. Use one method that mixes, on batches (input, target)."
            )
            raise BatchError(msg)
        generator = at.generator("mixup")
        mixing = sample_mixing(self.alpha, generator)
        pairs = pair_rows(batch.num_rows, batch.present, generator)
        indices = pairs.to(input.device, non_blocking=True)
        if not self.interpolate_loss and not target.is_floating_point():
            target = one_hot(target, at.num_classes(target, "MixUp"), getattr(at.loss, "ignore_index", -100))
        mixed, permuted, mixing = mixup_batch(input, target, mixing, indices=indices)
        new_target: Tensor | MixedTarget
        if self.interpolate_loss:
            new_target = MixedTarget(target, permuted, torch.tensor(1 - mixing))
        else:
            new_target = (1 - mixing) * target + mixing * permuted
        return batch.replace(input=mixed, target=new_target, lineage=batch.lineage.mix(pairs))
