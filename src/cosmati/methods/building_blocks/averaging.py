"""What averages of weights have in common: when they are updated, and which of them take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cosmati.core.clock import Budget, Time, Unit
from cosmati.core.method import State
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError

_AVERAGE = "average/"
_MOVED = "moved"


def check_times(method: str, *times: str | None) -> None:
    """Check that averages aren't timed by the host's clock, which no other run could repeat.

    Raises:
        PlanError: a time in seconds, or no time at all.
    """
    for text in times:
        if text is not None and Time.parse(text).unit is Unit.SECOND:
            msg = f"{method} can't be timed by the host's clock ({text!r}). Use ba, ep, sp, tok or dur."
            raise PlanError(msg)


def steps_of(text: str, budget: Budget) -> float:
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


def interval_of(text: str, budget: Budget) -> int:
    """Return the whole number of steps between two updates."""
    return max(1, round(steps_of(text, budget)))


def start_averages(weights: Pieces, interval: int) -> State:
    """Return copies of the weights, float32 at least."""
    copies = weights.map(lambda weight: weight.detach().to(_wide(weight), copy=True))
    state = {_AVERAGE + name: copy for name, copy in copies.tensors.items()}
    if interval > 1:
        state[_MOVED] = torch.zeros(len(copies.names), dtype=torch.bool)
    return state


def averages_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the averages by parameter name."""
    return {name.removeprefix(_AVERAGE): value for name, value in state.items() if name.startswith(_AVERAGE)}


def note_moved(
    state: State, names: Sequence[str], learnt: frozenset[str] | None, *, is_due: bool
) -> tuple[State, list[str]]:
    """Note which parameters moved in this step; where an update is due, return those that moved since the last one.

    A parameter that hasn't moved is left out of an update: absent from a step means absent from the average.

    Args:
        state: of the averages. A checkpoint brings it back in another order of names.
        names: of the parameters, in the model's order, which flags go by.
        learnt: names of those that moved; None for all.
        is_due: whether an update is.
    """
    moved = [learnt is None or name in learnt for name in names]
    if _MOVED in state:
        # Flags live on the host; a checkpoint brings them back on the device.
        flags = state[_MOVED].cpu() | torch.tensor(moved)
        state = {**state, _MOVED: flags & (not is_due)}
        moved = flags.tolist()
    return state, [name for name, has_moved in zip(names, moved, strict=True) if has_moved and is_due]


def approach(averages: list[Tensor], weights: list[Tensor], shares: float | list[float]) -> None:
    """Move averages towards weights in place, by one share or one each: `average + share * (weight - average)`."""
    if not averages:
        return
    latest = [weight.detach().to(average.dtype) for average, weight in zip(averages, weights, strict=True)]
    if isinstance(shares, float):
        torch._foreach_lerp_(averages, latest, shares)
        return
    for average, weight, share in zip(averages, latest, shares, strict=True):
        average.lerp_(weight, share)


def _wide(parameter: Tensor) -> torch.dtype:
    return parameter.dtype if parameter.dtype is torch.float64 else torch.float32
