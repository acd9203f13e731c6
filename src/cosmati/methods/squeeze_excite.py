"""Squeeze-and-excitation: channels are weighted by what the whole image holds (Hu et al., 2017, arXiv 1709.01507)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.method import Method, Stage
from cosmati.core.rng import position_generator
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.surgery import Optimizers, join_groups, warn_unchanged

__all__ = ["SqueezeExcite", "SqueezeExcite2d", "SqueezeExciteConv2d", "apply_squeeze_excite"]


class SqueezeExcite2d(nn.Module):
    """Multiply each channel by a weight from 0 to 1 that a small network computes of all channels' means.

    Args:
        num_features: channels.
        latent_channels: width of the network; a fraction of the channels if below 1.
        generator: of the CPU, for the weights (He et al., 2015, as `nn.Linear`); None is PyTorch's default one.
    """

    def __init__(
        self, num_features: int, latent_channels: float = 0.125, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        width = _width(latent_channels, num_features)
        self.squeeze = nn.Parameter(_uniform(width, num_features, generator))
        self.excite = nn.Parameter(_uniform(num_features, width, generator))

    def forward(self, input: Tensor) -> Tensor:
        """Return the input [rows, channels, height, width], weighted."""
        latent = F.relu(F.linear(input.mean(dim=(2, 3)), self.squeeze))
        return input * F.linear(latent, self.excite).sigmoid()[:, :, None, None]

    def extra_repr(self) -> str:
        """Show both sizes."""
        width, num_features = self.squeeze.shape
        return f"{num_features}, latent_channels={width}"


class SqueezeExciteConv2d(nn.Conv2d):
    """A convolution whose output is weighted by its child `squeeze_excite`; its own weights keep their names."""

    squeeze_excite: SqueezeExcite2d

    def forward(self, input: Tensor) -> Tensor:
        """Return the weighted convolution of the input [rows, channels, height, width]."""
        weighted: Tensor = self.squeeze_excite(super().forward(input))
        return weighted


def apply_squeeze_excite(
    model: nn.Module,
    latent_channels: float = 64,
    min_channels: int = 128,
    optimizers: Optimizers = None,
    *,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Add squeeze-and-excitation after every `nn.Conv2d` that's wide enough, in place.

    Each layer stays the same object with the same parameters, hooks and names, and gets two new parameters.
    Subclasses and parametrized layers are left alone, since their function isn't known.

    Args:
        model: the model.
        latent_channels: width of the small network; a fraction of a layer's output channels if below 1.
        min_channels: fewest channels, of a layer's input and of its output, for a layer to be changed.
        optimizers: the new parameters join the groups that hold the convolution's weight.
        generator: of the CPU, for the new weights; None is PyTorch's default generator.

    Returns:
        The same model.

    Warns:
        UserWarning: no layer is wide enough.
    """
    found = any(isinstance(module, SqueezeExciteConv2d) for module in model.modules())
    changed = 0
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Conv2d or min(module.in_channels, module.out_channels) < min_channels:
            continue
        weight = module.weight
        extra = SqueezeExcite2d(module.out_channels, latent_channels, generator=generator)
        extra.to(weight.device, weight.dtype).train(module.training)
        module.__class__ = SqueezeExciteConv2d
        module.add_module("squeeze_excite", extra)
        prefix = f"{name}.squeeze_excite" if name else "squeeze_excite"
        join_groups(optimizers, weight, dict(extra.named_parameters(prefix)))
        changed += 1
    if not changed and not found:
        msg = (
            f"SqueezeExcite changes nothing: {type(model).__name__} has no Conv2d of {min_channels} channels or more, "
            "in and out. Lower min_channels, or leave it out."
        )
        warn_unchanged(msg, model, nn.Conv2d)
    return model


@dataclass(frozen=True, kw_only=True)
class SqueezeExcite(Method):
    """Weight the channels of convolutions by what the whole image holds.

    Args:
        latent_channels: width of the small network behind each convolution; a fraction of its channels if below 1.
        min_channels: fewest channels, in and out, of a convolution that's changed.
        seed: of the new weights.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    latent_channels: float = 64
    min_channels: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the sizes."""
        if not 0 < self.latent_channels < math.inf or (self.min_channels != 0 and not self.min_channels >= 1):
            msg = (
                f"SqueezeExcite can't use latent_channels={self.latent_channels}, min_channels={self.min_channels}. "
                "Give a width >= 1 or a fraction of the channels, and a whole count >= 0."
            )
            raise PlanError(msg)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with squeeze-and-excitation."""
        generator = position_generator(self.seed, "squeeze_excite")
        return apply_squeeze_excite(model, self.latent_channels, self.min_channels, optimizers, generator=generator)


def _width(latent_channels: float, num_features: int) -> int:
    if not 0 < latent_channels < math.inf:
        msg = f"latent_channels={latent_channels} is no width. Give a number >= 1, or a fraction of the channels."
        raise PlanError(msg)
    return max(1, int(latent_channels * num_features)) if latent_channels < 1 else int(latent_channels)


def _uniform(out_features: int, in_features: int, generator: torch.Generator | None) -> Tensor:
    bound = 1 / math.sqrt(in_features)
    return torch.empty(out_features, in_features).uniform_(-bound, bound, generator=generator)
