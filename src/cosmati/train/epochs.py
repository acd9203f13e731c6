"""Refuses times that don't fit into the run, and what follows time within an epoch whose length nobody knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from cosmati.core.clock import Budget, Clock, Time, Unit
from cosmati.core.method import Method
from cosmati.core.plan import describe
from cosmati.errors import PlanError
from cosmati.optim.schedules import Schedule
from cosmati.train.assembly import ScheduledOptimizer
from cosmati.train.config import RunConfig

_MAX_EPOCHS = 100


def refuse_times(
    config: RunConfig, budget: Budget, data: object, methods: Sequence[Method], scheduled: Sequence[ScheduledOptimizer]
) -> None:
    """Refuse what can't follow a run whose epochs have no known length, and schedules that the run is too short for.

    A loop of the user's own has no epochs at all, and is refused a budget in them. The default budget is let be there:
    whoever asks it for its end is told then (`refuse_endless`).

    Args:
        config: of the run.
        budget: its length.
        data: as given; None where only `step` is called.
        methods: of the run.
        scheduled: its optimizers.

    Raises:
        PlanError: a budget that never ends; by name, a schedule or a method that would stand still within an epoch; a
            warm-up that takes the whole run.
    """
    _refuse_epochs(config, budget, data, methods, scheduled)
    for part in scheduled:
        part.multiplier(Clock(), budget)  # The first step would ask, when folder and checkpoint are there.


def _refuse_epochs(
    config: RunConfig, budget: Budget, data: object, methods: Sequence[Method], scheduled: Sequence[ScheduledOptimizer]
) -> None:
    if budget.steps_per_epoch is not None:
        return
    if data is None or not budget.goes_by_epochs:
        _refuse_spans(config, methods, scheduled)
    if not budget.goes_by_epochs:
        return
    if data is None and config.budget != RunConfig.budget:
        raise PlanError(_endless(config.budget))
    found = [f"{type(s.optimizer).__name__}'s {s.schedule}" for s in scheduled if _moves(s.schedule, budget)]
    found += [describe(method) for method in methods if method.follows_elapsed]
    if found:
        where = "A loop of one's own" if data is None else f"The {type(data).__name__}"
        msg = (
            f"{', '.join(found)} would follow how far the run is, and nobody knows that within an epoch: {where} "
            f"doesn't say how long one is. In a run of {config.budget!r} it would stand still until the epoch's end, a "
            "warm-up at a learning rate of 0. Give the budget in steps or rows, RunConfig(budget='1000ba') or "
            "'64000sp'; or a length to the data (__len__); or a constant learning rate."
        )
        raise PlanError(msg)


def _refuse_spans(config: RunConfig, methods: Sequence[Method], scheduled: Sequence[ScheduledOptimizer]) -> None:
    """Refuse spans in epochs where a run has none, or isn't measured in them: a cadence, a half-life, a warm-up."""
    found = [
        f"RunConfig({name}={text!r})"
        for name in ("checkpoint_every", "evaluate_every")
        if _is_in_epochs(text := getattr(config, name))
    ]
    for thing in (*methods, *(s.schedule for s in scheduled)):
        if dataclasses.is_dataclass(thing) and not getattr(thing, "is_off", False):
            values = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
            found += [f"{type(thing).__name__}({n}={v!r})" for n, v in values.items() if _is_in_epochs(v)]
    if found:
        msg = (
            f"{', '.join(found)} can't be placed: nobody knows how many steps an epoch of this run has. Give spans in "
            "steps ('500ba') or as a fraction of the run ('0.1dur')."
        )
        raise PlanError(msg)


def _is_in_epochs(value: object) -> bool:
    if isinstance(value, tuple):
        return any(_is_in_epochs(one) for one in value)
    try:
        return isinstance(value, str) and Time.parse(value).unit is Unit.EPOCH and Time.parse(value).value > 0
    except PlanError:  # text that is no time
        return False


def refuse_endless(budget: Budget, *, own_loop: bool) -> None:
    """Refuse to say whether a loop of the user's own is over where it can't be.

    Raises:
        PlanError: its budget is in epochs.
    """
    if own_loop and budget.goes_by_epochs:
        raise PlanError(_endless(str(budget.span)))


def _endless(span: str) -> str:
    return (
        f"A budget of {span!r} never ends here: a loop of one's own has no epochs, since step() isn't told where the "
        "data begin anew, and should_stop would never be true. Give the steps of all epochs together, such as "
        f"RunConfig(budget='1000{Unit.STEP}'), or rows ('64000{Unit.ROW}')."
    )


def _moves(schedule: Schedule | None, budget: Budget) -> bool:
    """Say whether a schedule wants to move within an epoch; one that steps from epoch to epoch doesn't."""
    if schedule is None:
        return False
    num_epochs = math.ceil(budget.span.value * budget.ratio)
    length = 1 / (budget.span.value * budget.ratio)

    def rates(epoch: int) -> set[Any]:
        return {schedule.multiplier(min(1.0, (epoch + part) * length), budget) for part in (0.1, 0.5, 0.9)}

    return any(len(rates(epoch)) > 1 for epoch in range(min(num_epochs, _MAX_EPOCHS)))
