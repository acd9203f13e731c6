"""Weight standardisation: every filter has mean 0 and variance 1 (Qiao et al., 2019, arXiv 1903.10520)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from cosmati.core.method import Method, Stage
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.surgery import Graft, graft

__all__ = ["WeightStandardization", "apply_weight_standardization"]

_EPSILON = 1e-10


def standardize_weight(weight: Tensor) -> Tensor:
    """Return filters [out_channels, ...], each of mean 0 and variance 1; a constant filter becomes zero."""
    variance, mean = torch.var_mean(weight, dim=tuple(range(1, weight.ndim)), correction=0, keepdim=True)
    return (weight - mean) * (variance + _EPSILON).rsqrt()


class StandardizedWeight(Graft):
    """A convolution that reads its weight standardised.

    The parameter itself keeps its name, and is what optimizers, checkpoints and policies see.
    """

    prefix = "Standardized"

    @property
    def weight(self) -> Tensor:
        """The filters that the convolution uses."""
        weight = self._parameters["weight"]
        assert weight is not None, "a convolution has a weight"
        return standardize_weight(weight)


def apply_weight_standardization(module: nn.Module, n_last_layers_ignore: int = 0) -> nn.Module:
    """Let convolutions of one, two and three dimensions standardise their filters, in place.

    Layers stay the same objects with the same parameters, hooks and names. Subclasses are meant too, those of other
    surgery included (use this after it). Left alone are transposed and parametrized convolutions, and those with
    one weight in each filter, which would be zero.

    Args:
        module: the model; the root itself may be a convolution.
        n_last_layers_ignore: how many of the last convolutions to leave alone, >= 0.

    Returns:
        The same model.

    Raises:
        PlanError: the number is negative.

    Warns:
        UserWarning: there's no convolution to standardise.
    """
    _check(n_last_layers_ignore)
    layers: list[nn.Module] = [
        layer for layer in module.modules() if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    layers = layers[: max(0, len(layers) - n_last_layers_ignore)]
    found = False
    for layer in layers:
        if not isinstance(layer, StandardizedWeight):
            weight = layer._parameters.get("weight")  # noqa: SLF001  (a parametrized weight isn't a parameter)
            if weight is None or weight[0].numel() == 1:
                continue
            graft(layer, StandardizedWeight)
        found = True
    if not found:
        msg = (
            f"WeightStandardization changes nothing: {type(module).__name__} has no convolution besides the last "
            f"n_last_layers_ignore={n_last_layers_ignore}. Leave it out, or ignore fewer."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    return module


@dataclass(frozen=True, kw_only=True)
class WeightStandardization(Method):
    """Standardise the filters of convolutions. Name it after other methods that rebuild convolutions.

    Args:
        n_last_layers_ignore: how many of the last convolutions to leave alone, >= 0.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    n_last_layers_ignore: int = 0

    def __post_init__(self) -> None:
        """Check the number."""
        _check(self.n_last_layers_ignore)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its filters standardised."""
        return apply_weight_standardization(model, self.n_last_layers_ignore)


def _check(n_last_layers_ignore: int) -> None:
    if not n_last_layers_ignore >= 0:
        msg = f"n_last_layers_ignore={n_last_layers_ignore} counts no layers. Give 0 to standardise all of them."
        raise PlanError(msg)
