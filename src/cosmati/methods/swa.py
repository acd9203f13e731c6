"""Stochastic weight averaging: the mean of weights late in the run (Izmailov et al., 2018, arXiv 1803.05407)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from cosmati.core.clock import Budget, Time, Unit
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

__all__ = ["SWA"]

AnnealStrategy = Literal["linear", "cos"]

_COUNTS = "counts"


@dataclass(frozen=True, kw_only=True)
class SWA(Method):
    """Evaluate with the plain mean of the weights at regular moments near the end of the run.

    The model itself trains on to the end; its own weights aren't replaced. BatchNorm's statistics for the mean come
    from the trainer's recalibration, so no part of the run is spent on them. A parameter that hasn't moved since the
    last moment is left out of it. Means are float32 at least. Spans are dilated with the run.

    Args:
        swa_start: time string, from which on weights are taken; `1dur` is off.
        swa_end: time string after which none is taken any more.
        update_interval: time string between two moments.
        schedule_swa_lr: bring the learning rate to `swa_lr` from `swa_start` on, whatever the schedule says.
        anneal_strategy: how it's brought there, "linear" or "cos".
        anneal_steps: how many intervals it takes; 0 goes there at once.
        swa_lr: the learning rate; None holds what the schedule gives at `swa_start`.
    """

    stage: ClassVar[Stage] = Stage.AVERAGE

    swa_start: str = "0.7dur"
    swa_end: str = "0.97dur"
    update_interval: str = "1ep"
    schedule_swa_lr: bool = False
    anneal_strategy: AnnealStrategy = "linear"
    anneal_steps: int = 10
    swa_lr: float | None = None

    def __post_init__(self) -> None:
        """Check times and rates."""
        check_times("SWA", self.swa_start, self.swa_end, self.update_interval)
        start, end = Time.parse(self.swa_start), Time.parse(self.swa_end)
        if start.unit is end.unit and start.value >= end.value and not self.is_off:
            msg = f"SWA from {self.swa_start!r} to {self.swa_end!r} takes no weights. End after the start."
            raise PlanError(msg)
        if self.anneal_strategy not in get_args(AnnealStrategy) or not self.anneal_steps >= 0:
            msg = (
                f"SWA can't anneal with anneal_strategy={self.anneal_strategy!r}, anneal_steps={self.anneal_steps}. "
                "Use 'linear' or 'cos', and a count of intervals >= 0."
            )
            raise PlanError(msg)
        if self.swa_lr is not None and not (self.schedule_swa_lr and 0 <= self.swa_lr < math.inf):
            msg = f"swa_lr={self.swa_lr} needs schedule_swa_lr=True, and to be a number >= 0."
            raise PlanError(msg)

    @property
    def is_off(self) -> bool:
        """Whether no weights are ever taken."""
        start = Time.parse(self.swa_start)
        return start.unit is Unit.FRACTION and start.value >= 1

    @property
    def claims(self) -> frozenset[str]:
        """The weights that are evaluated, and with `schedule_swa_lr` the learning rate's end."""
        if self.is_off:
            return frozenset()
        return frozenset({"evaluation weights"} | ({"learning rate"} if self.schedule_swa_lr else set()))

    def learning_rate(self, scheduled: Callable[[float], float], elapsed: float, budget: Budget) -> float:
        """Return the learning rate of the step that starts at a fraction of the run."""
        start = budget.fraction_of(self.swa_start)
        if not self.schedule_swa_lr or self.is_off or elapsed < start:
            return scheduled(elapsed)
        length = self.anneal_steps * budget.fraction_of(self.update_interval)
        progress = min(1.0, (elapsed - start) / length) if length else 1.0
        if self.anneal_strategy == "cos":
            progress = (1 - math.cos(math.pi * progress)) / 2
        rate = scheduled(start) if self.swa_lr is None else self.swa_lr
        return scheduled(elapsed) * (1 - progress) + rate * progress

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        """Return the state with the weights taken into the mean, where a moment has come."""
        if self.is_off:
            return state
        budget = at.budget_told
        interval = interval_of(self.update_interval, budget)
        step = at.clock.step
        is_within = steps_of(self.swa_start, budget) <= step <= steps_of(self.swa_end, budget)
        is_due = step % interval == 0 and is_within
        with torch.no_grad():
            if not state:
                return self._started(weights, interval) if is_due else state
            state, chosen = note_moved(state, weights.names, learnt, is_due=is_due)
            if not chosen:
                return state
            averages, names = averages_of(state), weights.names
            counts = state[_COUNTS].cpu() + torch.tensor([name in set(chosen) for name in names])
            taken = dict(zip(names, counts.tolist(), strict=True))
            approach(
                [averages[name] for name in chosen],
                [weights.tensors[name] for name in chosen],
                [1 / taken[name] for name in chosen],
            )
            return {**state, _COUNTS: counts}

    def taken_from(self, budget: Budget) -> object:
        """Return interval, first and last step; what happens to learning rates is compared by itself."""
        if self.is_off:
            return None
        first, last = steps_of(self.swa_start, budget), steps_of(self.swa_end, budget)
        return interval_of(self.update_interval, budget), math.ceil(first), math.floor(last)

    def evaluation_weights(self, state: State, at: Position) -> Mapping[str, Tensor] | None:
        """Return the means by parameter name; None before the first weights are taken."""
        return averages_of(state) or None

    def _started(self, weights: Pieces, interval: int) -> State:
        state = start_averages(weights, interval)
        return {**state, _COUNTS: torch.ones(len(averages_of(state)), dtype=torch.int64)}
