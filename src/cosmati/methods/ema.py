"""Exponential moving average of the weights, to evaluate with (Polyak and Juditsky, 1992)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from cosmati.core.clock import Budget, Time
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.averaging import (
    approach,
    averages_of,
    check_times,
    interval_of,
    note_moved,
    start_averages,
    steps_of,
)

__all__ = ["EMA", "compute_ema"]


def compute_ema(model: nn.Module, ema_model: nn.Module, smoothing: float = 0.99) -> None:
    """Bring the weights of `ema_model` closer to those of `model`, in place.

    `ema = smoothing * ema + (1 - smoothing) * weight`, for parameters and floating-point buffers; other
    buffers, such as counters, are copied.

    Args:
        model: holds the latest weights.
        ema_model: holds the average; of the same architecture.
        smoothing: share of the old average, in [0, 1].

    Raises:
        PlanError: the models' parameters or buffers have other names, or smoothing isn't a share.
    """
    if not 0 <= smoothing <= 1:
        msg = f"smoothing={smoothing} is not a share. Give a number from 0 (latest weights) to 1 (no update)."
        raise PlanError(msg)
    latest = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    averages = {**dict(ema_model.named_parameters()), **dict(ema_model.named_buffers())}
    if latest.keys() != averages.keys():
        names = ", ".join(sorted(latest.keys() ^ averages.keys())[:5])
        msg = f"The two models differ in {names}. Make ema_model a copy of model: copy.deepcopy(model)."
        raise PlanError(msg)
    with torch.no_grad():
        approach(
            [tensor for tensor in averages.values() if tensor.is_floating_point()],
            [latest[name] for name, tensor in averages.items() if tensor.is_floating_point()],
            1.0 - smoothing,
        )
        for name, tensor in averages.items():
            if not tensor.is_floating_point():
                tensor.copy_(latest[name])


@dataclass(frozen=True, kw_only=True)
class EMA(Method):
    """Evaluate with an exponential moving average of the weights, which starts as a copy of them.

    Spans are dilated with the run. A parameter that hasn't moved since the last update is left out of it,
    so the half-life counts updates in which it had moved. Only parameters are averaged: BatchNorm's
    statistics for the averaged weights come from the trainer's recalibration. Averages are float32 at
    least, and updated in place.

    Args:
        half_life: time string after which a weight's share in the average has halved; `0ba` is off. None
            where `smoothing` is given.
        smoothing: share of the old average at each update, in [0, 1); 0 is off. It overrides `half_life`,
            whatever the interval.
        ema_start: time string; the average starts with the first update at or after it.
        update_interval: time string between updates; None is `1ep` for a half-life in epochs, else `1ba`.
    """

    stage: ClassVar[Stage] = Stage.AVERAGE

    half_life: str | None = "1000ba"
    smoothing: float | None = None
    ema_start: str = "0.0dur"
    update_interval: str | None = None

    def __post_init__(self) -> None:
        """Check the times."""
        if self.half_life is None and self.smoothing is None:
            msg = "EMA needs to know how long it remembers. Give half_life='1000ba', or smoothing=0.999."
            raise PlanError(msg)
        if self.smoothing is not None and not 0 <= self.smoothing < 1:
            msg = f"smoothing={self.smoothing} is not in [0, 1). Give the share of the old average; 0 is off."
            raise PlanError(msg)
        check_times("EMA", self.half_life, self.ema_start, self.update_interval)

    @property
    def claims(self) -> frozenset[str]:
        """The weights that are evaluated, unless it's off."""
        return frozenset() if self._is_off else frozenset({"evaluation weights"})

    @property
    def _is_off(self) -> bool:
        if self.smoothing is not None:
            return self.smoothing == 0
        return self.half_life is None or Time.parse(self.half_life).value == 0

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        """Return the state with the averages moved towards the weights, where an update is due."""
        if self._is_off:
            return state
        interval = self._interval(at.budget_told)
        is_due = at.clock.step % interval == 0 and at.clock.step >= steps_of(self.ema_start, at.budget_told)
        with torch.no_grad():
            if not state:
                return start_averages(weights, interval) if is_due else state
            state, chosen = note_moved(state, weights.names, learnt, is_due=is_due)
            if chosen:
                averages = averages_of(state)
                share = 1.0 - self._smoothing(at.budget_told, interval)
                approach([averages[name] for name in chosen], [weights.tensors[name] for name in chosen], share)
            return state

    def taken_from(self, budget: Budget) -> object:
        """Return interval, first step and smoothing: only what is a fraction of the run depends on its length."""
        if self._is_off:
            return None
        interval = self._interval(budget)
        return interval, math.ceil(steps_of(self.ema_start, budget)), self._smoothing(budget, interval)

    def evaluation_weights(self, state: State, at: Position) -> Mapping[str, Tensor] | None:
        """Return the averages by parameter name; None before they start."""
        return averages_of(state) or None

    def _interval(self, budget: Budget) -> int:
        default = "1ep" if self.smoothing is None and str(self.half_life).strip().endswith("ep") else "1ba"
        return interval_of(self.update_interval or default, budget)

    def _smoothing(self, budget: Budget, interval: int) -> float:
        if self.smoothing is not None:
            return self.smoothing
        assert self.half_life is not None, "checked"
        return math.pow(2.0, -interval / steps_of(self.half_life, budget))
