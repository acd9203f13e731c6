"""Weights and gradients as the loop gives them to a method, to test a method by itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from cosmati.core.pieces import Pieces


def weights_of(model: nn.Module, regions: Mapping[str, int] | None = None) -> Pieces:
    """Return a model's trainable parameters.

    Args:
        model: any.
        regions: index of each parameter's region; None puts all into one.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return Pieces(named, regions or dict.fromkeys(named, 0))


def gradients_of(model: nn.Module, regions: Mapping[str, int] | None = None) -> Pieces:
    """Return copies of the gradients that a model's parameters hold; a parameter that holds none is absent."""
    weights = weights_of(model, regions)
    held = {name: tensor.grad for name, tensor in weights.tensors.items() if tensor.grad is not None}
    return weights.having(held).copied()
