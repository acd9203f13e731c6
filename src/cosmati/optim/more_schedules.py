"""Schedules that older recipes are written in; the protocol and its conventions are those of `schedules`.

Each is a function of the fraction of the run alone. A time in one is a span of the undilated run, and dilates with
it. Decays that start after the warm-up start from 1 there; milestones are counted from the run's start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cosmati.core.clock import Budget, Time
from cosmati.errors import PlanError
from cosmati.optim.schedules import Decaying, WarmedUp, check_final, progress_from, warm_up

_ROUNDING = 1e-9
"""Times are quotients; a milestone that falls on a step's start is passed in spite of rounding."""


@dataclass(frozen=True, kw_only=True)
class Step(WarmedUp):
    """Multiply by a factor again and again, counted from the run's start.

    Args:
        every: time string between two falls, > 0.
        factor: of each fall, >= 0; 1 is off.
    """

    every: str
    factor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_span("every", self.every)
        _check_factor(self.factor)

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        ramp, _ = warm_up(self.warmup, fraction_elapsed, budget)
        num_falls = math.floor(fraction_elapsed / budget.fraction_of(self.every) + _ROUNDING)
        return ramp * math.pow(self.factor, num_falls)


@dataclass(frozen=True, kw_only=True)
class MultiStep(WarmedUp):
    """Multiply by a factor at each milestone, counted from the run's start.

    Args:
        milestones: time strings, in any order; none is off.
        factor: of each fall, >= 0; 1 is off.
    """

    milestones: tuple[str, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.milestones, str):
            msg = f"milestones={self.milestones!r} is one string. Give a tuple: ({self.milestones!r},)."
            raise PlanError(msg)
        for milestone in self.milestones:
            Time.parse(milestone)
        _check_factor(self.factor)

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        ramp, _ = warm_up(self.warmup, fraction_elapsed, budget)
        now = fraction_elapsed + _ROUNDING
        return ramp * math.pow(self.factor, sum(budget.fraction_of(milestone) <= now for milestone in self.milestones))


@dataclass(frozen=True, kw_only=True)
class Exponential(WarmedUp):
    """Warm up, then fall by a factor over each span, smoothly.

    Args:
        every: time string in which the multiplier falls by the factor, > 0.
        factor: > 0; 1 is off.
    """

    every: str = "1ep"
    factor: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_span("every", self.every)
        _check_factor(self.factor)
        if self.factor == 0:
            msg = "factor=0.0 would end the run's learning at once. Give a number > 0, such as 0.95."
            raise PlanError(msg)

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        ramp, start = warm_up(self.warmup, fraction_elapsed, budget)
        return ramp * math.pow(self.factor, max(0.0, fraction_elapsed - start) / budget.fraction_of(self.every))


@dataclass(frozen=True, kw_only=True)
class CosineWarmRestarts(WarmedUp):
    """Warm up, then follow half a cosine to `final` in each cycle, and start again from 1 (SGDR, 1608.03983).

    Args:
        cycle: length of the first cycle, a time string > 0.
        growth: length of each cycle over that of the one before, >= 1.
        final: multiplier at the end of a cycle, >= 0.
    """

    cycle: str
    growth: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_span("cycle", self.cycle)
        check_final(self.final)
        if not 1 <= self.growth < math.inf:
            msg = f"growth={self.growth}: cycles that shrink have no end. Give a number >= 1; 1 keeps their length."
            raise PlanError(msg)

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        ramp, _ = warm_up(self.warmup, fraction_elapsed, budget)
        # In lengths of the first cycle. Counted from the warm-up's end, so that cycles that fill the rest of the run
        # don't restart in its last step.
        since = max(0.0, fraction_elapsed - budget.fraction_of(self.warmup))
        begin, length, now = 0.0, 1.0, since / budget.fraction_of(self.cycle)
        if self.growth == 1:
            begin = math.floor(now + _ROUNDING)
        else:
            while begin + length <= now + _ROUNDING:
                begin, length = begin + length, length * self.growth
        height = (1 + math.cos(math.pi * max(0.0, now - begin) / length)) / 2
        return ramp * (self.final + (1 - self.final) * height)


@dataclass(frozen=True, kw_only=True, repr=False)
class Polynomial(Decaying):
    """Warm up, then fall as `(1 - progress) ** power` to `final`, at the end of the run or at `t_max`.

    Args:
        power: > 0; 1 is a straight line.
        final: multiplier where the decay ends, >= 0.
    """

    power: float = 2.0
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_final(self.final)
        if not 0 < self.power < math.inf:
            msg = f"power={self.power} makes no decay. Give a number > 0, such as 1 for a line or 2 for a parabola."
            raise PlanError(msg)

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        ramp, progress = self.ramp_and_progress(fraction_elapsed, budget)
        return ramp * (self.final + (1 - self.final) * math.pow(1 - progress, self.power))


@dataclass(frozen=True, kw_only=True)
class LinearToZero(WarmedUp):
    """Warm up, then go straight to 0 at the end of the run (Bergsma et al., 2025, 2502.15938)."""

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        ramp, start = warm_up(self.warmup, fraction_elapsed, budget)
        return ramp * (1 - progress_from(fraction_elapsed, start))


def _check_span(name: str, text: str) -> None:
    if Time.parse(text).value <= 0:
        msg = f"{name}={text!r} is no span. Give a time > 0, such as '10ep' or '0.1dur'."
        raise PlanError(msg)


def _check_factor(factor: float) -> None:
    if not 0 <= factor < math.inf:
        msg = f"factor={factor} is no multiplier of a learning rate. Give a number >= 0; 1 is off."
        raise PlanError(msg)
