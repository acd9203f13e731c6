"""How large a model is, and what a token costs."""

from __future__ import annotations

from torch import nn

from cosmati.models.gpt import GPT


def count_parameters(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Count parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad or not trainable_only)


def flops_per_token(model: GPT) -> int:
    """Estimate floating point operations of a training step for one token (forward and backward).

    Six for each weight that multiplies an activation, and 12 * blocks * width * length for attention's
    scores and sums, without the saving of a causal mask (Chowdhery et al., 2022, arXiv 2204.02311, appendix
    B). Norms, activations and the lookup of embeddings aren't counted.
    """
    config = model.config
    linears = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    return 6 * linears + 12 * config.num_blocks * config.width * config.sequence_length
