"""Layer freezing: layers stop learning, from the input on (Raghu et al., 2017, arXiv 1706.05806)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from cosmati.core.method import Method, Position, Stage
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.depth import layers_of

__all__ = ["LayerFreezing", "freeze_layers"]


def freeze_layers(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    current_duration: float,
    freeze_start: float = 0.5,
    freeze_level: float = 1.0,
) -> tuple[int, float]:
    """Freeze the layers that are due, for good: no optimizer has them, and they require no gradient.

    A layer is a module that holds parameters of its own; layers are ordered as the model registers them. A
    parameter that several modules share belongs to the last of them. The last layer is never frozen.

    Args:
        model: the model.
        optimizers: those that hold its parameters.
        current_duration: fraction of the run that has passed.
        freeze_start: fraction of the run after which freezing begins.
        freeze_level: fraction of the layers, the last one aside, that are frozen at the end; it grows
            linearly.

    Returns:
        Number of frozen layers, and the fraction that was due.
    """
    fraction = _fraction_due(current_duration, freeze_start, freeze_level)
    frozen = _layers_due(model, fraction)
    gone = {id(parameter) for layer in frozen for parameter in layer}
    for optimizer in [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
    for layer in frozen:
        for parameter in layer:
            parameter.requires_grad = False
    return len(frozen), fraction


@dataclass(frozen=True, kw_only=True)
class LayerFreezing(Method):
    """Freeze layers one after another, from the input to the output.

    It's a route: a frozen layer is absent from the step, `requires_grad` stays, and autograd stops where
    nothing nearer the input learns. BatchNorm's statistics still follow the data. Layers are those of
    `freeze_layers`.

    Args:
        freeze_start: fraction of the run after which freezing begins, in [0, 1]; 1 is off.
        freeze_level: fraction of the layers, the last one aside, that are frozen at the end, in [0, 1]; 0
            is off.
    """

    stage: ClassVar[Stage] = Stage.ROUTE

    freeze_start: float = 0.5
    freeze_level: float = 1.0

    def __post_init__(self) -> None:
        """Check the fractions."""
        if not (0 <= self.freeze_start <= 1 and 0 <= self.freeze_level <= 1):
            msg = (
                f"freeze_start={self.freeze_start}, freeze_level={self.freeze_level}: both are fractions. "
                "Give numbers from 0 to 1."
            )
            raise PlanError(msg)

    def frozen(self, parameters: Sequence[str], at: Position) -> frozenset[str]:
        """Return the names of the parameters whose layers are frozen in this step."""
        fraction = _fraction_due(at.elapsed, self.freeze_start, self.freeze_level)
        layers = _layers_due(at.model, fraction)
        gone = {id(parameter) for layer in layers for parameter in layer}
        if not gone:
            return frozenset()
        named = dict(at.model.named_parameters())
        return frozenset(name for name in parameters if id(named[name]) in gone)


def _fraction_due(elapsed: float, start: float, level: float) -> float:
    return level * (elapsed - start) / (1 - start) if elapsed > start else 0.0


def _layers_due(model: nn.Module, fraction: float) -> list[list[nn.Parameter]]:
    """Return the parameters of the layers that this fraction of all but the last one comes to."""
    if fraction == 0:
        return []
    layers = layers_of(model)
    # A product that rounding left just below a whole number is that number.
    return layers[: int(fraction * (len(layers) - 1) + 1e-9)]
