"""Layers whose weight gradients can be taken from some tokens only, and how: for `token_masks.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv1d_weight

Formula = Callable[[Tensor, Tensor, "Read"], Tensor]
"""Gradient of a parameter, from that of the output, weighted by token, and the layer's input."""


class TokenMask(NamedTuple):
    """What each token of a microbatch may teach one region.

    Attributes:
        admits: bool [rows, tokens].
        scale: weights [rows, tokens]; None where all are 0 or 1.
    """

    admits: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(cls, weights: Tensor) -> TokenMask:
        """Return the mask of weights [rows, tokens]."""
        admits = weights != 0
        is_plain = bool((weights == admits).all())
        return cls(admits, None if is_plain else weights)

    def to(self, device: torch.device) -> TokenMask:
        """Move it."""
        return TokenMask(self.admits.to(device), None if self.scale is None else self.scale.to(device))

    def chosen(self, own: Tensor, other: Tensor, axis: int) -> Tensor:
        """Return the first at admitted tokens, and the second at denied ones, both [rows, tokens, ...] as in `over`."""
        shape = [1] * own.ndim
        shape[0], shape[axis] = self.admits.shape
        return torch.where(self.admits.view(shape), own, other)

    def over(self, gradient: Tensor, axis: int) -> Tensor:
        """Return each token's gradient times its weight; 0 for denied tokens, even where theirs isn't finite.

        Args:
            gradient: [rows, tokens, ...], or with the tokens elsewhere.
            axis: the dimension of the tokens.
        """
        shape = [1] * gradient.ndim
        shape[0], shape[axis] = self.admits.shape
        found = torch.where(self.admits.view(shape), gradient, 0.0)
        return found if self.scale is None else found.mul_(self.scale.to(found.dtype).view(shape))


class Read(NamedTuple):
    """How a layer has read a masked parameter, for when its gradient is due.

    Attributes:
        size: shape of the parameter.
        mask: of its region.
        options: the layer's arguments that aren't tensors, by name.
        formula: of the gradient.
        shape: of the layer's output.
        axis: dimension of the tokens in it.
    """

    size: torch.Size
    mask: TokenMask
    options: Mapping[str, Any]
    formula: Formula
    shape: torch.Size
    axis: int


def _linear(gradient: Tensor, tokens: Tensor, _: Read) -> Tensor:
    return gradient.flatten(0, -2).t() @ tokens.flatten(0, -2).to(gradient.dtype)


def _table(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    # An accelerator sums in an order that follows from how often each index comes: a denied token's mustn't count.
    admits, padding = read.mask.admits, read.options.get("padding_idx")
    indices = tokens.masked_fill(~admits.view(*admits.shape, *[1] * (tokens.ndim - 2)), 0)
    place = -1 if padding is None else padding % read.size[0]
    found: Tensor = torch.ops.aten.embedding_dense_backward(
        gradient, indices, read.size[0], place, scale_grad_by_freq=False
    )
    return found


def _layer_scale(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    tokens = tokens.to(gradient.dtype)
    plain = F.layer_norm(tokens, read.options["normalized_shape"], eps=read.options.get("eps", _LAYER_NORM_EPSILON))
    return (gradient * plain).sum_to_size(read.size)


def _rms_scale(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    plain = F.rms_norm(tokens.to(gradient.dtype), read.options["normalized_shape"], eps=read.options.get("eps"))
    return (gradient * plain).sum_to_size(read.size)


def _kernel(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    options = {name: value for name, value in read.options.items() if name != "bias"}
    found: Tensor = conv1d_weight(tokens.to(gradient.dtype), read.size, gradient, **options)
    return found


def _channels(gradient: Tensor, _: Tensor, __: Read) -> Tensor:
    return gradient.sum((0, 2))


def _summed(gradient: Tensor, _: Tensor, read: Read) -> Tensor:
    return gradient.sum_to_size(read.size)


def _product(gradient: Tensor, tokens: Tensor, read: Read) -> Tensor:
    return (gradient * tokens).sum_to_size(read.size)


_LAYER_NORM_EPSILON = 1e-5
"""PyTorch's own."""


class Layer(NamedTuple):
    """A function that reads tokens with parameters.

    Attributes:
        names: of its arguments, in order; the first are the tokens.
        formulas: of each parameter's gradient.
        unknown: arguments with which its gradients follow from other tokens too.
        axis: dimension of the tokens in its output.
    """

    names: tuple[str, ...]
    formulas: Mapping[str, Formula]
    unknown: tuple[str, ...] = ()
    axis: int = 1


LAYERS: dict[Callable[..., Any], Layer] = {
    F.linear: Layer(("input", "weight", "bias"), {"weight": _linear, "bias": _summed}),
    F.embedding: Layer(
        ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        {"weight": _table},
        ("max_norm", "scale_grad_by_freq", "sparse"),
    ),
    F.layer_norm: Layer(
        ("input", "normalized_shape", "weight", "bias", "eps"),
        {"weight": _layer_scale, "bias": _summed},
    ),
    F.rms_norm: Layer(("input", "normalized_shape", "weight", "eps"), {"weight": _rms_scale}),
    F.conv1d: Layer(
        ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
        {"weight": _kernel, "bias": _channels},
        axis=2,
    ),
}
_PRODUCT = torch.mul, Layer(("input", "other"), {"other": _product})
_SUM = torch.add, Layer(("input", "other"), {"other": _summed})
OPERATORS: dict[Callable[..., Any], tuple[Callable[..., Any], Layer]] = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _PRODUCT),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _SUM),
}


class _Tap(torch.autograd.Function):
    """Leaves a layer's output alone; backward, it gives a parameter its gradient and hands the output's on."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _: Tensor, tokens: Tensor, read: Read) -> Tensor:  # noqa: ANN401
        """Take an output, the parameter, what the layer has read, and how."""
        ctx.mark_dirty(output)  # Not a view of it: what comes behind may work in place.
        ctx.save_for_backward(tokens)
        ctx.read = read
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        (tokens,) = ctx.saved_tensors
        with torch._C.DisableTorchFunction():  # noqa: SLF001  (nothing to look at here, and looking takes time)
            own = ctx.read.mask.over(gradient.reshape(ctx.read.shape), ctx.read.axis)
            return gradient, ctx.read.formula(own, tokens, ctx.read), None, None


TAP: type = _Tap._backward_cls  # noqa: SLF001  (a tap in a graph)


def behind(output: Tensor, parameter: Tensor, tokens: Tensor, read: Read) -> Tensor:
    """Tap an output; of one that is a view, what it's a view of, since that one is the layer's own."""
    own = output
    if (base := output._base) is not None:  # noqa: SLF001
        own = base if base.numel() == output.numel() else output.clone()
    tapped: Tensor = _Tap.apply(own, parameter, tokens, read)  # type: ignore[no-untyped-call]
    return tapped.view(read.shape) if tapped.shape != read.shape else tapped
