"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.errors import PlanError


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Parameters are named `layers.N`; initialisation is PyTorch's default.

    Args:
        widths: of the input, the hidden layers and the output; two at least.

    Raises:
        PlanError: fewer than two widths.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        if len(widths) < 2:
            msg = f"widths={tuple(widths)} has no layer in it. Give the width of the input and of the output."
            raise PlanError(msg)
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs [rows, widths[-1]] of inputs [rows, ...], which are flattened."""
        hidden = inputs.flatten(1)
        for index, layer in enumerate(self.layers):
            hidden = layer(F.relu(hidden) if index else hidden)
        return hidden
