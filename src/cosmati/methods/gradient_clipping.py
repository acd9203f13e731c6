"""Gradient clipping: by norm, by value, or adaptive by unit (Brock et al., 2021, arXiv 2102.06171)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError

__all__ = ["GradientClipping", "apply_gradient_clipping"]

ClippingType = Literal["norm", "value", "adaptive"]

_ADDED_TO_NORM = 1e-6
_SMALLEST_UNIT_NORM = 1e-3


def apply_gradient_clipping(
    model: nn.Module, clipping_type: ClippingType, clipping_threshold: float, fsdp_enabled: bool = False
) -> None:
    """Clip the gradients that the model's parameters hold.

    Args:
        model: after the backward pass.
        clipping_type: `norm` scales all gradients so that their common norm is at most the threshold.
            `value` clamps each element to [-threshold, threshold]. `adaptive` scales the gradient of each
            unit (row of a matrix, output channel of a convolution, whole vector) so that its norm is at
            most threshold times the norm of the unit's weights, or times 0.001 where that is larger, so
            that weights of zero can learn.
        clipping_threshold: >= 0.
        fsdp_enabled: the parameters are shards (`DTensor`s of `fully_shard`).

    Raises:
        PlanError: an unknown type, a negative threshold, or `adaptive` on shards, which cut units.
    """
    _check(clipping_type, clipping_threshold)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if clipping_type == "adaptive":
        if fsdp_enabled:
            msg = "Adaptive clipping needs whole units, and shards cut them. Use 'norm' or 'value' with FSDP."
            raise PlanError(msg)
        for parameter in parameters:
            parameter.grad = _clip_units(cast("Tensor", parameter.grad), parameter.detach(), clipping_threshold)
    elif clipping_type == "norm":
        # PyTorch's own functions know shards.
        torch.nn.utils.clip_grad_norm_(parameters, clipping_threshold)
    else:
        torch.nn.utils.clip_grad_value_(parameters, clipping_threshold)


@dataclass(frozen=True, kw_only=True)
class GradientClipping(Method):
    """Clip the step's gradients, after all microbatches were summed.

    The norm over everything couples regions: a class that may not write to a region still scales what
    others write there. `per_region` takes each region's own norm.

    Args:
        clipping_type: `norm`, `value` or `adaptive` (see `apply_gradient_clipping`).
        clipping_threshold: >= 0; infinity is off.
        per_region: clip each region by its own norm; for `norm` only, since the others look at no more than
            a unit.
    """

    stage: ClassVar[Stage] = Stage.GRADIENT

    clipping_type: ClippingType
    clipping_threshold: float
    per_region: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        _check(self.clipping_type, self.clipping_threshold)
        if self.per_region and self.clipping_type != "norm":
            msg = f"per_region=True means nothing for {self.clipping_type!r}, which couples none. Leave it out."
            raise PlanError(msg)

    @property
    def couples(self) -> frozenset[Coupling]:
        """Regions, where one norm is taken over all of them."""
        is_common = self.clipping_type == "norm" and not self.per_region and self.clipping_threshold < math.inf
        return frozenset({"regions"} if is_common else ())

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        """Return the gradients clipped; what is absent stays absent. The host doesn't wait for the device."""
        threshold = self.clipping_threshold
        if threshold == math.inf or not gradients:
            return gradients
        if self.clipping_type == "value":
            return gradients.map(lambda gradient: gradient.clamp(-threshold, threshold))
        if self.clipping_type == "adaptive":
            return gradients.map_whole(lambda g, weight: _clip_units(g, weight.detach(), threshold), weights)
        if self.per_region:
            return gradients.scaled({region: self._share(norm) for region, norm in gradients.norm_by_region().items()})
        return gradients.scaled(self._share(gradients.norm()))

    def _share(self, norm: Tensor) -> Tensor:
        return (self.clipping_threshold / (norm + _ADDED_TO_NORM)).clamp(max=1)


def _check(clipping_type: str, threshold: float) -> None:
    if clipping_type not in get_args(ClippingType):
        msg = f"clipping_type={clipping_type!r} is not known. Use 'norm', 'value' or 'adaptive'."
        raise PlanError(msg)
    if not threshold >= 0:
        msg = f"clipping_threshold={threshold} is no bound. Give a number >= 0; infinity clips nothing."
        raise PlanError(msg)


def _clip_units(gradient: Tensor, weight: Tensor, threshold: float) -> Tensor:
    largest = threshold * _unit_norms(weight.to(gradient.dtype)).clamp(min=_SMALLEST_UNIT_NORM)
    # A gradient of zero stays zero, with a threshold of zero too.
    norms = _unit_norms(gradient).clamp(min=torch.finfo(gradient.dtype).tiny)
    return gradient * (largest / norms).clamp(max=1)


def _unit_norms(tensor: Tensor) -> Tensor:
    """Return the norm of each unit, in a shape that multiplies the tensor."""
    dims = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
    return norms
