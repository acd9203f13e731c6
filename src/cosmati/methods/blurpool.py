"""BlurPool: a low-pass filter before every downsampling (Zhang, 2019, arXiv 1904.11486)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from cosmati.core.method import Method, Stage
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.surgery import Optimizers, replace_modules, warn_unchanged

__all__ = ["BlurConv2d", "BlurMaxPool2d", "BlurPool", "BlurPool2d", "apply_blurpool"]

Size = int | tuple[int, int]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


@torch.fx.wrap
def blur_2d(input: Tensor, stride: Size = 1, kernel: Tensor | None = None) -> Tensor:
    """Filter with [1, 2, 1] x [1, 2, 1] / 16, and keep every `stride`-th position.

    The edges are reflected, so a constant image stays constant (to rounding). A side of length 1 is its own
    reflection.

    Args:
        input: [rows, channels, height, width].
        stride: along both sides, or (along height, along width).
        kernel: [1 or channels, 1, 3, 3], the filter if it's already on the input's device; None makes it.

    Returns:
        [rows, channels, ceil(height / stride), ceil(width / stride)].
    """
    kernel = _binomial_kernel(input.device) if kernel is None else kernel
    channels = input.shape[1]
    weight = kernel.to(input.dtype).expand(channels, 1, 3, 3)
    return F.conv2d(_reflected(input), weight, stride=stride, groups=channels)


class BlurPool2d(nn.Module):
    """Blur and downsample.

    Args:
        stride: along both sides, or (along height, along width).
    """

    blur_kernel: Tensor

    def __init__(self, stride: Size = 2) -> None:
        super().__init__()
        self.stride = stride
        _register_kernel(self)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input [rows, channels, height, width] blurred and downsampled."""
        return blur_2d(input, self.stride, self.blur_kernel)

    def extra_repr(self) -> str:
        """Show the stride."""
        return f"stride={self.stride}"


class BlurMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` whose output is blurred before it's downsampled; the output's shape is the same."""

    blur_kernel: Tensor

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)
        _register_kernel(self)

    def forward(self, input: Tensor) -> Tensor:
        """Return the maxima of the neighbourhoods, blurred and downsampled."""
        dense = F.max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation)
        stride = _pair(self.stride)
        if not self.ceil_mode:
            return blur_2d(dense, stride, self.blur_kernel)
        return _blur_to_ceil(input, dense, stride, _pair(self.padding), self.blur_kernel)


class BlurConv2d(nn.Conv2d):
    """A strided `nn.Conv2d` with the blur before or after it; the output's shape is the same.

    Args:
        blur_first: blur, then convolve with the stride: cheap. False convolves densely, then blurs with the
            stride, as the paper has it: a stride of 2 costs four times the convolution.
    """

    blur_kernel: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 2,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        blur_first: bool = True,
        padding_mode: PaddingMode = "zeros",
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        self.blur_first = blur_first
        _register_kernel(self, in_channels if blur_first else out_channels)

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of the input [rows, channels, height, width]."""
        if self.blur_first:
            blurred: Tensor = self._conv_forward(blur_2d(input, 1, self.blur_kernel), self.weight, self.bias)
            return blurred
        padding = cast("tuple[int, int] | str", self.padding)
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        dense = F.conv2d(input, self.weight, self.bias, 1, padding, self.dilation, self.groups)
        return blur_2d(dense, cast("tuple[int, int]", self.stride), self.blur_kernel)


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: Optimizers = None,  # noqa: ARG001
) -> nn.Module:
    """Put blurred layers in the place of strided `nn.Conv2d` and `nn.MaxPool2d`, in place.

    A new layer holds the very parameters, hooks and names of the old one, so optimizers, checkpoints and
    policies still fit. Subclasses, parametrized layers and pools that return indices are left alone, since
    their function isn't known.

    Args:
        model: the model; the root itself may be replaced.
        replace_convs: replace strided convolutions.
        replace_maxpools: replace strided max-pools.
        blur_first: see `BlurConv2d`.
        min_channels: fewest input channels of a convolution that's replaced.
        optimizers: needs no change; taken so that calls of the functional interface fit.

    Returns:
        The model, or the layer that replaces it.

    Warns:
        UserWarning: there's nothing to blur.
    """
    found = any(isinstance(module, BlurConv2d | BlurMaxPool2d) for module in model.modules())
    replaced: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if not isinstance(module, nn.Conv2d | nn.MaxPool2d) or max(_pair(module.stride)) == 1:
            continue
        if type(module) is nn.Conv2d and replace_convs and module.in_channels >= min_channels:
            replaced[module] = _adopt(BlurConv2d, module, blur_first=blur_first)
        if type(module) is nn.MaxPool2d and replace_maxpools and not module.return_indices:
            replaced[module] = _adopt(BlurMaxPool2d, module)
    if not replaced and not found and (replace_convs or replace_maxpools):
        kinds = [f"Conv2d of {min_channels} channels or more"] * replace_convs + ["MaxPool2d"] * replace_maxpools
        msg = f"BlurPool changes nothing: {type(model).__name__} has no strided {' or '.join(kinds)}."
        warn_unchanged(msg, model, *[nn.Conv2d] * replace_convs, *[nn.MaxPool2d] * replace_maxpools)
    return replace_modules(model, replaced)


@dataclass(frozen=True, kw_only=True)
class BlurPool(Method):
    """Blur before every downsampling.

    Args:
        replace_convs: blur strided convolutions.
        replace_maxpools: blur strided max-pools. Neither is off.
        blur_first: blur before the convolution, not after it (see `BlurConv2d`).
        min_channels: fewest input channels of a convolution that's blurred.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    replace_convs: bool = True
    replace_maxpools: bool = True
    blur_first: bool = True
    min_channels: int = 16

    def __post_init__(self) -> None:
        """Check the number of channels."""
        if self.min_channels != 0 and not self.min_channels >= 1:
            msg = f"min_channels={self.min_channels} counts no channels. Use 0 to blur all."
            raise PlanError(msg)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its downsampling layers blurred."""
        return apply_blurpool(
            model, self.replace_convs, self.replace_maxpools, self.blur_first, self.min_channels, optimizers
        )


def _adopt(kind: type[nn.Module], module: nn.Module, **attributes: object) -> nn.Module:
    """Return a layer of another kind that shares everything with the old one."""
    layer = kind.__new__(kind)
    # The hooks' dictionaries themselves are shared, so handles that the user holds still remove their hooks.
    layer.__dict__ = {**module.__dict__, **attributes}
    layer._buffers = dict(module._buffers)  # noqa: SLF001
    layer._non_persistent_buffers_set = set(module._non_persistent_buffers_set)  # noqa: SLF001
    channels = 1
    if isinstance(layer, BlurConv2d):
        channels = layer.in_channels if layer.blur_first else layer.out_channels
    _register_kernel(layer, channels, next(module.parameters(), None))
    return layer


def _register_kernel(module: nn.Module, channels: int = 1, like: Tensor | None = None) -> None:
    # One copy for each channel, where their number is known: a tenth less than to have each call expand the one.
    kernel = _binomial_kernel(None if like is None else like.device).repeat(channels, 1, 1, 1)
    module.register_buffer("blur_kernel", kernel, persistent=False)


def _binomial_kernel(device: torch.device | None) -> Tensor:
    row = torch.tensor([1.0, 2.0, 1.0], device=device) / 4
    return (row[:, None] * row)[None, None]


def _reflected(input: Tensor) -> Tensor:
    """Extend both sides by one position at each end."""
    # The native kernel takes half the time on CPU; on accelerators its gradient isn't deterministic.
    if input.device.type == "cpu" and min(input.shape[2:]) > 1:
        return F.pad(input, (1, 1, 1, 1), mode="reflect")
    for dim in (-2, -1):
        size = input.shape[dim]
        inner = min(1, size - 1)
        input = torch.cat([input.narrow(dim, inner, 1), input, input.narrow(dim, size - 1 - inner, 1)], dim)
    return input


@torch.fx.wrap
def _blur_to_ceil(
    input: Tensor, dense: Tensor, stride: tuple[int, int], padding: tuple[int, int], kernel: Tensor
) -> Tensor:
    """Blur the dense maxima of an input, with as many positions as `ceil_mode` gives. Only a run knows the shapes."""
    sizes = [_ceil_size(input, dense, side, stride[side], padding[side]) for side in (0, 1)]
    for side, size in enumerate(sizes):
        dim = side - 2
        missing = max(0, (size - 1) * stride[side] + 1 - dense.shape[dim])
        last = dense.narrow(dim, dense.shape[dim] - 1, 1)
        dense = torch.cat([dense, *[last] * missing], dim)
    return blur_2d(dense, stride, kernel)[..., : sizes[0], : sizes[1]]


def _ceil_size(input: Tensor, dense: Tensor, side: int, stride: int, padding: int) -> int:
    """Return the size of a max-pool's output with `ceil_mode`, from that of the dense one."""
    size = -(-(dense.shape[side + 2] - 1) // stride) + 1
    # A last window that starts beyond the input is left out.
    return size - 1 if (size - 1) * stride >= input.shape[side + 2] + padding else size
