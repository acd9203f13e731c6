"""Factorization: a large layer becomes two small ones of low rank (Denil et al., 2013, arXiv 1306.0543)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from cosmati.core.method import Method, Stage
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.surgery import (
    Optimizers,
    replace_in_groups,
    replace_modules,
    shared_parameters,
    warn_unchanged,
)

__all__ = ["Factorize", "FactorizedConv2d", "FactorizedLinear", "apply_factorization"]


class FactorizedLinear(nn.Module):
    """Two linear layers in the place of one: `in_features` to `latent_features` to `out_features`.

    Args:
        in_features: of the input.
        out_features: of the output.
        bias: add one to the output.
        latent_features: in between, an integer; a fraction of the smaller side if below 1.

    Raises:
        PlanError: the two layers would be no smaller than the one.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, latent_features: float = 0.25) -> None:
        super().__init__()
        rank = latent_size(latent_features, in_features, out_features)
        _check_smaller("latent_features", rank, out_features, in_features)
        self.reduce = nn.Linear(in_features, rank, bias=False)
        self.expand = nn.Linear(rank, out_features, bias=bias)

    @property
    def in_features(self) -> int:
        """Features of the input, as of `nn.Linear`."""
        return self.reduce.in_features

    @property
    def out_features(self) -> int:
        """Features of the output, as of `nn.Linear`."""
        return self.expand.out_features

    @property
    def latent_features(self) -> int:
        """Features between the two layers: the rank."""
        return self.reduce.out_features

    @property
    def weight(self) -> Tensor:
        """The product, [out_features, in_features], for code that reads a linear layer's weight."""
        return self.expand.weight @ self.reduce.weight

    @property
    def bias(self) -> Tensor | None:
        """The output's bias."""
        return self.expand.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the output [..., out_features] of an input [..., in_features]."""
        output: Tensor = self.expand(self.reduce(input))
        return output

    @classmethod
    def of(cls, layer: nn.Linear, rank: int) -> FactorizedLinear:
        """Return the best approximation of a layer at a rank; the bias is the same parameter."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        reduce, expand = best_factors(layer.weight, rank)
        new.reduce = _linear(reduce, None, layer.weight)
        new.expand = _linear(expand, layer.bias, layer.weight)
        return new


class FactorizedConv2d(nn.Module):
    """A convolution to `latent_channels`, and a 1 x 1 convolution from there, in the place of one convolution.

    Args:
        in_channels: of the input.
        out_channels: of the output.
        kernel_size: of the first convolution.
        stride: of the first convolution.
        padding: of the first convolution.
        dilation: of the first convolution.
        bias: add one to the output.
        latent_channels: in between, an integer; a fraction of the smaller side if below 1.

    Raises:
        PlanError: the two convolutions would be no smaller than the one.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        latent_channels: float = 0.25,
    ) -> None:
        super().__init__()
        rank = latent_size(latent_channels, in_channels, out_channels)
        _check_smaller("latent_channels", rank, out_channels, in_channels * math.prod(_pair(kernel_size)))
        self.reduce = nn.Conv2d(in_channels, rank, kernel_size, stride, padding, dilation, bias=False)
        self.expand = nn.Conv2d(rank, out_channels, 1, bias=bias)

    @property
    def in_channels(self) -> int:
        """Channels of the input, as of `nn.Conv2d`."""
        return self.reduce.in_channels

    @property
    def out_channels(self) -> int:
        """Channels of the output, as of `nn.Conv2d`."""
        return self.expand.out_channels

    @property
    def latent_channels(self) -> int:
        """Channels between the two convolutions: the rank."""
        return self.reduce.out_channels

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of an input [rows, in_channels, height, width]."""
        output: Tensor = self.expand(self.reduce(input))
        return output

    @classmethod
    def of(cls, layer: nn.Conv2d, rank: int) -> FactorizedConv2d:
        """Return the best approximation of a layer at a rank; the bias is the same parameter."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        reduce, expand = best_factors(layer.weight.flatten(1), rank)
        size: Any = layer.kernel_size
        stride: Any = layer.stride
        padding: Any = layer.padding
        dilation: Any = layer.dilation
        mode: Any = layer.padding_mode
        # On no device: the weights are put in at once, and none are drawn.
        new.reduce = nn.Conv2d(
            layer.in_channels, rank, size, stride, padding, dilation, bias=False, padding_mode=mode, device="meta"
        )
        new.expand = nn.Conv2d(rank, layer.out_channels, 1, bias=False, device="meta")
        new.reduce.weight = _parameter(reduce.view(rank, *layer.weight.shape[1:]), layer.weight)
        new.expand.weight = _parameter(expand[:, :, None, None], layer.weight)
        new.expand.register_parameter("bias", cast("nn.Parameter | None", layer.bias))
        return new


def best_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors [rank, columns] and [rows, rank] whose product is nearest to a matrix [rows, columns].

    It's the truncated singular value decomposition (Eckart and Young, 1936), in float64 on CPU; both factors have
    the same singular values.
    """
    left, values, right = torch.linalg.svd(matrix.detach().cpu().double(), full_matrices=False)
    roots = values[:rank].sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def latent_size(latent: float, inputs: int, outputs: int) -> int:
    """Return a latent size as a whole number: a fraction of the smaller side if below 1.

    Raises:
        PlanError: it isn't positive.
    """
    if not 0 < latent < math.inf:
        msg = f"A latent size of {latent} is none. Give a whole number, or a fraction of the smaller side below 1."
        raise PlanError(msg)
    return max(1, int(latent * min(inputs, outputs))) if latent < 1 else int(latent)


def apply_factorization(
    model: nn.Module,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: float = 0.25,
    min_features: int = 512,
    latent_features: float = 0.25,
    optimizers: Optimizers = None,
) -> nn.Module:
    """Put two layers of low rank in the place of each large `nn.Conv2d` and `nn.Linear`, in place.

    The new layers compute the nearest thing to what the old one did, and have its hooks and its very bias. Left
    alone are layers that wouldn't get smaller, grouped convolutions, tied weights, subclasses and parametrized
    layers, whose function isn't known.

    Args:
        model: the model; the root itself may be replaced.
        factorize_convs: factorize convolutions.
        factorize_linears: factorize linear layers.
        min_channels: fewest channels, of input and output, of a convolution that's factorized.
        latent_channels: between its two parts; a fraction of the smaller side if below 1.
        min_features: fewest features, of input and output, of a linear layer that's factorized.
        latent_features: between its two parts; a fraction of the smaller side if below 1.
        optimizers: new weights take the old one's place in their parameter groups.

    Returns:
        The model, or the layer that replaces it.

    Raises:
        PlanError: a size that isn't positive.

    Warns:
        UserWarning: there's nothing to factorize.
    """
    factorized = [module for module in model.modules() if isinstance(module, FactorizedLinear | FactorizedConv2d)]
    parts = {part for module in factorized for part in module.children()}
    tied = shared_parameters(model)
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in list(model.named_modules()):
        if layer in parts or any(id(parameter) in tied for parameter in layer.parameters(recurse=False)):
            continue
        new: FactorizedConv2d | FactorizedLinear | None = None
        if type(layer) is nn.Conv2d and factorize_convs and layer.groups == 1:
            rank = latent_size(latent_channels, layer.in_channels, layer.out_channels)
            if min(layer.in_channels, layer.out_channels) >= min_channels and _is_smaller(layer.weight, rank):
                new = FactorizedConv2d.of(layer, rank)
        if type(layer) is nn.Linear and factorize_linears:
            rank = latent_size(latent_features, layer.in_features, layer.out_features)
            if min(layer.in_features, layer.out_features) >= min_features and _is_smaller(layer.weight, rank):
                new = FactorizedLinear.of(layer, rank)
        if new is not None:
            replaced[layer] = new
            weights = {n: p for n, p in new.named_parameters(name) if n.endswith("weight")}
            replace_in_groups(optimizers, layer.weight, weights)
    if not replaced and not factorized:
        msg = (
            f"Factorize changes nothing: {type(model).__name__} has no Conv2d of {min_channels} channels or Linear of "
            f"{min_features} features or more, in and out, that would get smaller. Lower the bounds, or leave it out."
        )
        warn_unchanged(msg, model, *[nn.Conv2d] * factorize_convs, *[nn.Linear] * factorize_linears)
    return replace_modules(model, replaced)


@dataclass(frozen=True, kw_only=True)
class Factorize(Method):
    """Replace large layers by two of low rank each: fewer operations, and usually some loss of quality.

    Args:
        factorize_convs: factorize convolutions.
        factorize_linears: factorize linear layers. Neither is off.
        min_channels: fewest channels, of input and output, of a convolution that's factorized.
        latent_channels: between its two parts; a fraction of the smaller side if below 1.
        min_features: fewest features, of input and output, of a linear layer that's factorized.
        latent_features: between its two parts; a fraction of the smaller side if below 1.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    factorize_convs: bool = True
    factorize_linears: bool = True
    min_channels: int = 256
    latent_channels: float = 0.25
    min_features: int = 256
    latent_features: float = 128

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("min_channels", "min_features", "latent_channels", "latent_features"):
            value = getattr(self, name)
            is_wrong = 0 < value < 1 if name.startswith("min") else value == 0
            if is_wrong or not 0 <= value < math.inf:
                msg = (
                    f"Factorize can't use {name}={value}. Give a positive size: a latent one below 1 is a fraction, "
                    "and a smallest one may be 0, which leaves no layer out."
                )
                raise PlanError(msg)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its large layers factorized."""
        if not (self.factorize_convs or self.factorize_linears):
            return model
        return apply_factorization(
            model,
            self.factorize_convs,
            self.factorize_linears,
            self.min_channels,
            self.latent_channels,
            self.min_features,
            self.latent_features,
            optimizers,
        )


def _is_smaller(weight: Tensor, rank: int) -> bool:
    return rank < _break_even(weight.shape[0], weight[0].numel())


def _break_even(rows: int, columns: int) -> float:
    """Return the rank at which two factors are as large as the matrix."""
    return rows * columns / (rows + columns)


def _check_smaller(name: str, rank: int, rows: int, columns: int) -> None:
    limit = _break_even(rows, columns)
    if rank >= limit:
        msg = (
            f"{name}={rank} makes two layers that are no smaller than one of {rows} x {columns} weights, and that can "
            f"do less. Give fewer than {limit:.4g}, or keep the layer whole."
        )
        raise PlanError(msg)


def _linear(weight: Tensor, bias: nn.Parameter | None, like: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = _parameter(weight, like)
    layer.register_parameter("bias", bias)
    return layer


def _parameter(values: Tensor, like: Tensor) -> nn.Parameter:
    # A copy of its own: factors are views into a decomposition, and products' bits follow strides.
    values = values.contiguous().to(like.device, like.dtype, copy=True)
    return nn.Parameter(values, requires_grad=like.requires_grad)
