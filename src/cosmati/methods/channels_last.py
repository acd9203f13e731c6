"""Channels last: image weights in memory as [rows, height, width, channels], as tensor cores read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from cosmati.core.method import Method, Stage

__all__ = ["ChannelsLast", "apply_channels_last"]


def apply_channels_last(model: nn.Module) -> nn.Module:
    """Lay out every parameter and buffer of four dimensions with channels last, in place.

    Shapes, values and the parameters themselves stay: an optimizer built before is still right.
    Convolutions then give activations of the same layout, so the inputs need no change.

    Args:
        model: the model.

    Returns:
        The same model.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        # nn.Module.to would refuse five dimensions.
        if tensor.ndim == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return model


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Method):
    """Lay out image weights with channels last: the same function, by other kernels and with other bits."""

    stage: ClassVar[Stage] = Stage.CAST

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with its weights laid out anew."""
        return apply_channels_last(model)
