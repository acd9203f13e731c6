"""Exponential moving average of the weights, to evaluate with (Polyak and Juditsky, 1992)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from cosmati.core.clock import Budget, Time, Unit
from cosmati.core.method import Method, Position, Stage, State
from cosmati.errors import PlanError

_AVERAGE = "average/"
_MOVED = "moved"


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
        _approach(
            [tensor for tensor in averages.values() if tensor.is_floating_point()],
            [latest[name] for name, tensor in averages.items() if tensor.is_floating_point()],
            smoothing,
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
        for text in (self.half_life, self.ema_start, self.update_interval):
            if text is not None and Time.parse(text).unit is Unit.SECOND:
                msg = f"EMA can't be timed by the host's clock ({text!r}). Use ba, ep, sp, tok or dur."
                raise PlanError(msg)

    @property
    def claims(self) -> frozenset[str]:
        """The weights that are evaluated, unless it's off."""
        return frozenset() if self._is_off else frozenset({"evaluation weights"})

    @property
    def _is_off(self) -> bool:
        if self.smoothing is not None:
            return self.smoothing == 0
        return self.half_life is None or Time.parse(self.half_life).value == 0

    def after(self, state: State, model: nn.Module, at: Position, learnt: frozenset[str] | None) -> State:
        """Return the state with the averages moved towards the model's parameters, where an update is due."""
        if self._is_off:
            return state
        interval = self._interval(at.budget)
        is_due = at.clock.step % interval == 0 and at.clock.step >= _steps(self.ema_start, at.budget)
        with torch.no_grad():
            if is_due and not state:
                return self._started(model, interval)
            return self._updated(state, model, at.budget, interval, learnt, is_due=is_due) if state else state

    def evaluation_weights(self, state: State, at: Position) -> Mapping[str, Tensor] | None:
        """Return the averages by parameter name; None before they start."""
        return {name.removeprefix(_AVERAGE): value for name, value in state.items() if name != _MOVED} or None

    def _started(self, model: nn.Module, interval: int) -> State:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        state = {
            _AVERAGE + name: parameter.detach().to(_wide(parameter), copy=True) for name, parameter in named.items()
        }
        if interval > 1:
            state[_MOVED] = torch.zeros(len(named), dtype=torch.bool)
        return state

    def _updated(
        self,
        state: State,
        model: nn.Module,
        budget: Budget,
        interval: int,
        learnt: frozenset[str] | None,
        *,
        is_due: bool,
    ) -> State:
        names = [name.removeprefix(_AVERAGE) for name in state if name != _MOVED]
        moved = [learnt is None or name in learnt for name in names]
        if interval > 1:
            # Flags live on the host; a checkpoint brings them back on the device.
            flags = state[_MOVED].cpu() | torch.tensor(moved)
            state = {**state, _MOVED: flags & (not is_due)}
            moved = flags.tolist() if is_due else moved
        if is_due:
            parameters = dict(model.named_parameters())
            chosen = [name for name, has_moved in zip(names, moved, strict=True) if has_moved]
            averages = [state[_AVERAGE + name] for name in chosen]
            _approach(averages, [parameters[name] for name in chosen], self._smoothing(budget, interval))
        return state

    def _interval(self, budget: Budget) -> int:
        default = "1ep" if self.smoothing is None and str(self.half_life).strip().endswith("ep") else "1ba"
        return max(1, round(_steps(self.update_interval or default, budget)))

    def _smoothing(self, budget: Budget, interval: int) -> float:
        if self.smoothing is not None:
            return self.smoothing
        assert self.half_life is not None, "checked"
        half_life_steps = _steps(self.half_life, budget)
        return math.pow(2.0, -interval / half_life_steps)


def _steps(text: str, budget: Budget) -> float:
    """Return a span in steps of the dilated run."""
    time = Time.parse(text)
    if time.value == 0:
        return 0.0
    # Steps are steps, also in a run whose length in steps isn't known.
    if time.unit is Unit.STEP:
        return time.value * budget.ratio
    num_steps = budget.num_steps
    # A run whose length in steps isn't known is refused by step_of.
    return float(budget.step_of(time)) if num_steps is None else budget.fraction_of(time) * num_steps


def _wide(parameter: Tensor) -> torch.dtype:
    return parameter.dtype if parameter.dtype is torch.float64 else torch.float32


def _approach(averages: list[Tensor], weights: list[Tensor], smoothing: float) -> None:
    if averages:
        latest = [weight.detach().to(average.dtype) for average, weight in zip(averages, weights, strict=True)]
        torch._foreach_lerp_(averages, latest, 1 - smoothing)
