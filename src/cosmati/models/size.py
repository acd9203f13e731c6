"""How large a model is."""

from __future__ import annotations

from torch import nn


def count_parameters(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Count parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad or not trainable_only)
