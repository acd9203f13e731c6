"""Learning-rate schedules: multipliers over the fraction of the run that has passed.

All of them are the same curve for any length of the run, so a dilated budget dilates warm-up and decay
together.

A step that starts at fraction e of the run and ends at e + 1/num_steps is warmed up by where it *ends*, and
decayed by where it *starts*. So neither the first step (multiplier 0 at e = 0) nor the last one (0 at e = 1)
is wasted: warm-up over k steps gives 1/k, 2/k, ..., 1, and the decay starts there, from 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

from cosmati.core.clock import Budget, Time
from cosmati.core.later import later, told_fields
from cosmati.core.named_settings import NamedSettings
from cosmati.errors import PlanError

DecayShape = Literal["linear", "sqrt"]


@runtime_checkable
class Schedule(Protocol):
    """What multiplies an optimizer's learning rates."""

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts when this fraction of the run has passed."""
        ...


@dataclass(frozen=True, kw_only=True)
class WarmedUp(NamedSettings):
    """Warm-up from 0 to 1, linear, before anything else.

    Args:
        warmup: time string; `0ba` is off.
    """

    other_names: ClassVar[dict[str, str]] = {
        "t_warmup": "warmup",
        "T_max": "t_max",
        "total_iters": "t_max",
        "alpha_f": "final",
        "end_factor": "final",
        "floor": "final",
        "eta_min": "final={} / lr",
        "gamma": "factor",
        "step_size": "every",
        "decay_period": "every",
        "T_0": "cycle",
        "t_0": "cycle",
        "T_mult": "growth",
        "t_mult": "growth",
    }

    warmup: str = "0ba"

    def __post_init__(self) -> None:
        Time.parse(self.warmup)


@dataclass(frozen=True, kw_only=True, repr=False)
class Decaying(WarmedUp):
    """Warm-up, then a decay that ends somewhere.

    Args:
        t_max: where the decay ends, counted from the run's start, a time string; its last value stays. Beyond the run's
            end it's left unfinished.
    """

    t_max: str = later(default="1dur")

    def __post_init__(self) -> None:
        super().__post_init__()
        if Time.parse(self.t_max).value <= 0:
            msg = f"t_max={self.t_max!r} leaves no time to decay in. Give a time > 0, such as '0.8dur' or '1000ba'."
            raise PlanError(msg)

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in told_fields(self).items())
        return f"{type(self).__name__}({told})"

    def ramp_and_progress(self, fraction_elapsed: float, budget: Budget) -> tuple[float, float]:
        """Return the warm-up's ramp in [0, 1], and the fraction of the decay that has passed.

        Raises:
            PlanError: the warm-up takes the whole run, or isn't over where the decay ends.
        """
        ramp, start = warm_up(self.warmup, fraction_elapsed, budget)
        end = budget.fraction_of(self.t_max)
        if budget.fraction_of(self.warmup) >= end:
            msg = (
                f"Warm-up {self.warmup!r} isn't over at t_max={self.t_max!r}; both are counted from the run's start. "
                "Shorten the one, or lengthen the other."
            )
            raise PlanError(msg)
        return ramp, progress_from(fraction_elapsed, start, end)


@dataclass(frozen=True, kw_only=True)
class Constant(WarmedUp):
    """Warm up, then stay at 1."""

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        return warm_up(self.warmup, fraction_elapsed, budget)[0]


@dataclass(frozen=True, kw_only=True, repr=False)
class Linear(Decaying):
    """Warm up, then go straight to `final`, at the end of the run or at `t_max`.

    Args:
        final: multiplier where the decay ends, >= 0.
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_final(self.final)

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        ramp, progress = self.ramp_and_progress(fraction_elapsed, budget)
        return ramp * (1 - (1 - self.final) * progress)


@dataclass(frozen=True, kw_only=True, repr=False)
class Cosine(Decaying):
    """Warm up, then follow half a cosine to `final`, at the end of the run or at `t_max` (arXiv 1608.03983).

    Args:
        final: multiplier where the decay ends, >= 0.
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_final(self.final)

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run."""
        ramp, progress = self.ramp_and_progress(fraction_elapsed, budget)
        height = (1 + math.cos(math.pi * progress)) / 2
        return ramp * (self.final + (1 - self.final) * height)


@dataclass(frozen=True, kw_only=True)
class WSD(WarmedUp):
    """Warm up, stay stable, decay at the end (MiniCPM, 2404.06395): budgets can share one trunk.

    Args:
        decay: length of the decay, a time string; `0ba` is off.
        final: multiplier at the end, >= 0.
        shape: `linear`, or `sqrt` for 1 - sqrt(progress) (Hägele et al., 2405.18392).
    """

    decay: str = "0.2dur"
    final: float = 0.0
    shape: DecayShape = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        Time.parse(self.decay)
        check_final(self.final)
        if self.shape not in get_args(DecayShape):
            msg = f"shape={self.shape!r} is no shape of a decay. Use 'linear' or 'sqrt'."
            raise PlanError(msg)

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        """Return the multiplier of the step that starts at a fraction of the run.

        Raises:
            PlanError: warm-up and decay are longer than the run.
        """
        ramp, _ = warm_up(self.warmup, fraction_elapsed, budget)
        stable = 1 - budget.fraction_of(self.decay)
        # A rounding error of the two divisions isn't an overlap.
        if stable < budget.fraction_of(self.warmup) - 1e-9:
            msg = (
                f"Warm-up {self.warmup!r} and decay {self.decay!r} are longer than the run of "
                f"{str(budget.span)!r}. Shorten one of them."
            )
            raise PlanError(msg)
        progress = progress_from(fraction_elapsed, stable)
        return ramp * (1 - (1 - self.final) * (math.sqrt(progress) if self.shape == "sqrt" else progress))


def check_final(final: float) -> None:
    """Check the multiplier at a schedule's end."""
    if not 0 <= final < math.inf:
        msg = f"final={final} is no multiplier of a learning rate. Give a number >= 0; 0 decays to nothing."
        raise PlanError(msg)


def warm_up(warmup: str, elapsed: float, budget: Budget) -> tuple[float, float]:
    """Return the ramp in [0, 1], and the fraction of the run at which it reaches 1."""
    length = budget.fraction_of(warmup)
    if length >= 1:
        msg = f"Warm-up {warmup!r} takes the whole run of {str(budget.span)!r}. Shorten it."
        raise PlanError(msg)
    # Where the number of steps isn't known ahead, a step has no length, and the first one of a warm-up rests.
    step = 1 / budget.num_steps if budget.num_steps else 0.0
    ramp = min(1.0, (elapsed + step) / length) if length else 1.0
    return ramp, max(0.0, length - step)


def progress_from(elapsed: float, start: float, end: float = 1.0) -> float:
    """Return the fraction of the way from `start` to `end`, by default the run's, in [0, 1]."""
    return min(1.0, max(0.0, (elapsed - start) / (end - start))) if start < end else float(elapsed >= end)
