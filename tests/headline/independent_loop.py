"""What both independent loops share: a schedule and a loop, of PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Settings = Mapping[str, Any]


def trapezoid(step: int, num_steps: int, warmup: float, decay: float, final: float = 0.0) -> float:
    """Return a step's share of the learning rate.

    It rises over the first share of the run, as far as where the step ends, and falls to `final` over the last share,
    as far as where the step starts.
    """
    risen = min(1.0, (step + 1) / (warmup * num_steps)) if warmup else 1.0
    fallen = max(0.0, 1 - (1 - step / num_steps) / decay) if decay else 0.0
    return risen * (1 - (1 - final) * fallen)


def descend(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    share: Callable[[int], float],
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
    clipping: str,
) -> None:
    """Train on each batch once; `clipping` is a bound of the common norm of all gradients, or `off`."""
    schedules = [LambdaLR(optimizer, share) for optimizer in optimizers]
    model.train()
    for batch in batches:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(batch)
        loss.backward()
        if clipping != "off":
            clip_grad_norm_(model.parameters(), float(clipping))
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


def matrices_and_vectors(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups of which only the first decays."""
    found = list(parameters)
    return [
        {"params": [p for p in found if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in found if p.ndim < 2], "weight_decay": 0.0},
    ]
