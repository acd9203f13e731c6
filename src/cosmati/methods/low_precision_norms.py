"""Normalisation in the precision of autocast, where PyTorch would go to float32 (MosaicML Composer, 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.method import Method, Stage
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.surgery import Optimizers, warn_unchanged

__all__ = [
    "GroupNormInAutocast",
    "LayerNormInAutocast",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
]

_PRECISIONS: dict[object, torch.dtype | None] = {
    None: None,
    "amp_fp16": torch.float16,
    "amp_bf16": torch.bfloat16,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
}
_FULL: tuple[object, ...] = ("fp32", "float32", torch.float32)


class LayerNormInAutocast(nn.LayerNorm):
    """`nn.LayerNorm` that computes in autocast's type where autocast is on; elsewhere it's the native layer."""

    low_precision: torch.dtype | None = None
    """Another type than autocast's."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input [..., *normalized_shape] normalised."""
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.low_precision)


class GroupNormInAutocast(nn.GroupNorm):
    """`nn.GroupNorm` that computes in autocast's type where autocast is on; elsewhere it's the native layer."""

    low_precision: torch.dtype | None = None
    """Another type than autocast's."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input [rows, channels, ...] normalised."""
        return _group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.low_precision)


NormPrecision = str | torch.dtype | None


def apply_low_precision_layernorm(
    model: nn.Module,
    precision: NormPrecision = None,
    optimizers: Optimizers = None,  # noqa: ARG001
) -> nn.Module:
    """Let every `nn.LayerNorm` compute in the precision of autocast, in place.

    Layers stay the same objects with the same parameters, hooks and names. Subclasses are left alone, since their
    function isn't known; so are `nn.RMSNorm` and other norms. Without autocast, no bit changes.

    Args:
        model: the model; the root itself may be a norm.
        precision: "amp_bf16", "amp_fp16" or the type itself; None takes autocast's; "fp32" changes nothing.
        optimizers: needs no change; taken so that calls of the functional interface fit.

    Returns:
        The same model.

    Raises:
        PlanError: an unknown precision.

    Warns:
        UserWarning: the precision is float32, or the model has no LayerNorm.
    """
    return _apply(model, nn.LayerNorm, LayerNormInAutocast, "LowPrecisionLayerNorm", precision)


def apply_low_precision_groupnorm(
    model: nn.Module,
    precision: NormPrecision = None,
    optimizers: Optimizers = None,  # noqa: ARG001
) -> nn.Module:
    """Let every `nn.GroupNorm` compute in the precision of autocast, in place.

    The rest is as in `apply_low_precision_layernorm`.
    """
    return _apply(model, nn.GroupNorm, GroupNormInAutocast, "LowPrecisionGroupNorm", precision)


@dataclass(frozen=True, kw_only=True)
class LowPrecisionLayerNorm(Method):
    """Compute layer normalisation in the precision of the run: `RunConfig(precision="bfloat16")`, say.

    In float32 it changes nothing.
    """

    stage: ClassVar[Stage] = Stage.CAST

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its LayerNorms in the precision of autocast."""
        return apply_low_precision_layernorm(model, None, optimizers)


@dataclass(frozen=True, kw_only=True)
class LowPrecisionGroupNorm(Method):
    """Compute group normalisation in the precision of the run: `RunConfig(precision="bfloat16")`, say.

    In float32 it changes nothing.
    """

    stage: ClassVar[Stage] = Stage.CAST

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its GroupNorms in the precision of autocast."""
        return apply_low_precision_groupnorm(model, None, optimizers)


def _apply(
    model: nn.Module, native: type[nn.Module], own: type[nn.Module], method: str, precision: NormPrecision
) -> nn.Module:
    why = f"{type(model).__name__} has no {native.__name__}"
    found = False
    if precision in _FULL:
        why = f"precision={precision} is what norms are computed in anyway"
    elif precision not in _PRECISIONS:
        msg = f"{method} knows no precision={precision!r}. Use 'amp_bf16', 'amp_fp16' or None, which is autocast's."
        raise PlanError(msg)
    else:
        for module in model.modules():
            if type(module) is native:
                module.__class__ = own
            if isinstance(module, own):
                module.__dict__["low_precision"] = _PRECISIONS[precision]
                found = True
    if not found:
        warn_unchanged(f"{method} changes nothing: {why}. Leave it out.", model, native, stacklevel=4)
    return model


# torch.fx writes the two calls down as they are: only a run knows whether autocast is on.
@torch.fx.wrap
def _layer_norm(
    input: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float, own: torch.dtype | None
) -> Tensor:
    dtype = _autocast_type(input, own)
    if dtype is None:
        return F.layer_norm(input, shape, weight, bias, eps)
    with torch.autocast(input.device.type, enabled=False):
        return F.layer_norm(input.to(dtype), shape, _cast(weight, dtype), _cast(bias, dtype), eps)


@torch.fx.wrap
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float, own: torch.dtype | None
) -> Tensor:
    dtype = _autocast_type(input, own)
    if dtype is None:
        return F.group_norm(input, num_groups, weight, bias, eps)
    with torch.autocast(input.device.type, enabled=False):
        return F.group_norm(input.to(dtype), num_groups, _cast(weight, dtype), _cast(bias, dtype), eps)


def _autocast_type(input: Tensor, own: torch.dtype | None) -> torch.dtype | None:
    """Return the type to compute in; None where autocast is off, or has nothing to cast."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind) or not input.is_floating_point() or input.dtype is torch.float64:
        return None
    return own or torch.get_autocast_dtype(kind)


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)
