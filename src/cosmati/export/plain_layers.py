"""What surgery adds and PyTorch has no layer for, written with PyTorch alone: its source travels with an export."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SqueezeExcitation(nn.Module):
    """Multiply each channel by a weight from 0 to 1 that follows from all channels' means.

    Args:
        num_features: channels.
        width: of the small network.
        dtype: of the weights.
    """

    def __init__(self, num_features: int, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.squeeze = nn.Parameter(torch.zeros(width, num_features, dtype=dtype))
        self.excite = nn.Parameter(torch.zeros(num_features, width, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Return the input [rows, channels, height, width], weighted."""
        latent = F.relu(F.linear(input.mean(dim=(2, 3)), self.squeeze))
        return input * F.linear(latent, self.excite).sigmoid()[:, :, None, None]


class KeptShare:
    """A forward hook: a residual block counts by a share, as stochastic depth evaluates it.

    Args:
        share: of the block, in (0, 1]; the rest is its input, where the shapes are equal.
    """

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ANN401, ARG002
        """Return `input + share * (output - input)`."""
        input: Tensor = args[0] if args else next(iter(kwargs.values()))
        if isinstance(output, tuple):
            return (self._mean(input, output[0]), *output[1:])
        return self._mean(input, output)

    def _mean(self, input: Tensor, output: Tensor) -> Tensor:
        if output.shape != input.shape:
            return output
        dtype = torch.promote_types(input.dtype, output.dtype)
        weight = torch.tensor(self.share, dtype=input.dtype, device=input.device).to(dtype)
        return torch.lerp(input.to(dtype), output.to(dtype), weight.view(-1, *[1] * (output.ndim - 1)))
