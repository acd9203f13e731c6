"""The plain PyTorch loop that `parity` is measured against, written as one would write it by hand.

No tree class, no regions, no feed: a recursion adds the microbatches' gradients pairwise, and BatchNorm keeps its own
statistics. It shares the seeding rule with the trainer, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cosmati.core.loss import Loss
from cosmati.core.rng import DefaultGenerators, position_key


def bare_loop(
    model: nn.Module,
    loss_function: Callable[[nn.Module, Any], Tensor | Loss],
    steps: Sequence[Sequence[Any]],
    optimizer: torch.optim.Optimizer,
    *,
    seed: int = 0,
) -> list[float]:
    """Train a model in place, and return the loss of each step.

    Args:
        model: in training mode.
        loss_function: as the Trainer takes it.
        steps: for each step, the data of its V microbatches.
        optimizer: over the model's parameters; its rates stay as they are.
        seed: as in `RunConfig`.
    """
    losses = []
    generators = DefaultGenerators(next(model.parameters()).device)
    for step, microbatches in enumerate(steps):
        if len(microbatches) == 1:
            generators.seed(position_key(seed, "forward", step, 0))
            result = loss_function(model, microbatches[0])
            loss = result.mean() if isinstance(result, Loss) else result
            loss.backward()
            losses.append(loss.item())
        else:
            keys = [position_key(seed, "forward", step, index) for index in range(len(microbatches))]
            losses.append(_accumulate(model, loss_function, microbatches, keys, generators))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _accumulate(
    model: nn.Module,
    loss_function: Callable[[nn.Module, Any], Tensor | Loss],
    microbatches: Sequence[Any],
    keys: Sequence[int],
    generators: DefaultGenerators,
) -> float:
    gradients: list[list[Tensor | None]] = []
    total, weight = 0.0, 0.0
    for key, data in zip(keys, microbatches, strict=True):
        generators.seed(key)
        result = loss_function(model, data)
        loss = result if isinstance(result, Loss) else Loss(result, 1.0)
        objective = loss.sum
        for term in loss.aux.values():
            objective = objective + term * loss.weight
        objective.backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        total += float(objective.detach())
        weight += float(torch.as_tensor(loss.weight).detach())
    for parameter, gradient in zip(model.parameters(), _pairwise(gradients), strict=True):
        parameter.grad = None if gradient is None else gradient / torch.tensor(weight)
    return total / weight


def _pairwise(leaves: list[list[Tensor | None]]) -> list[Tensor | None]:
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return [
        b if a is None else a if b is None else a + b
        for a, b in zip(_pairwise(leaves[:half]), _pairwise(leaves[half:]), strict=True)
    ]
