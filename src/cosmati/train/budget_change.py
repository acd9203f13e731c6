"""Whether another budget leaves the steps that were taken as they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import ChangedRunError
from cosmati.train.assembly import Assembly
from cosmati.train.run.checkpoints import Checkpoint


def check_past(assembly: Assembly, checkpoint: Checkpoint, *, schedule_is_new: bool) -> None:
    """Refuse a budget under which a past step's learning rate, phase or method would have been another one.

    Args:
        assembly: of the run as it would go on.
        checkpoint: where it stands.
        schedule_is_new: the schedule was changed by name: it holds from here on, and says nothing of the past.

    Raises:
        ChangedRunError: a past step would differ.
    """
    facts, clock = checkpoint.facts, Clock(*checkpoint.facts["clock"])
    now = assembly.budget
    was = dataclasses.replace(
        now, span=Time.parse(facts["identity"]["budget.span"]), ratio=facts["identity"]["budget.ratio"]
    )
    wrong = []
    if now.is_over(clock):
        wrong.append(f"it is over after the {clock.step} steps that were taken")
    if not schedule_is_new and (step := _other_rate(assembly, was, clock)) is not None:
        wrong.append(f"the learning rate of step {step} would have been another one (RunConfig.change: add 'schedule')")
    if "policy" not in assembly.config.change and _other_phase(facts["phases"], assembly, clock.step):
        wrong.append("the policy's phases would have begun at other steps")
    if facts["budget_was_read"] and not (facts.get("budget_use_is_told") and _is_taken_alike(assembly, was)):
        wrong.append("a method has acted by how far the run was")
    if wrong:
        msg = (
            f"The budget can't be changed from {was.span} to {now.span} at step {clock.step}: {'; '.join(wrong)}. Keep "
            "the budget, or start a new run from these weights: RunConfig(load_weights=...)."
        )
        raise ChangedRunError(msg)


def _other_rate(assembly: Assembly, was: Budget, clock: Clock) -> int | None:
    """Return the first past step whose learning rate the budget would change."""
    for scheduled in assembly.optimizers:
        if scheduled.schedule is None:
            continue
        for step in range(clock.step):
            # What a past step had seen is in proportion: steps have equally many rows, and take about equally long.
            part = step / clock.step
            seen = int(part * clock.epoch), 0, int(part * clock.rows), int(part * clock.tokens)
            at = Clock(step, *seen, part * clock.seconds)
            if scheduled.rates(at, was) != scheduled.rates(at, assembly.budget):
                return step
    return None


def _is_taken_alike(assembly: Assembly, was: Budget) -> bool:
    """Say whether the methods take the same from both budgets."""
    return all(method.taken_from(was) == method.taken_from(assembly.budget) for method in assembly.plan.methods)


def _other_phase(was: Sequence[Sequence[Any]], assembly: Assembly, done: int) -> bool:
    if assembly.policy is None:
        return False
    now = [(phase.name, phase.start_step, phase.end_step) for phase in assembly.policy.phases]
    old = [(name, start, min(end, done)) for name, start, end in was if start < done]
    return old != [(name, start, min(end, done)) for name, start, end in now if start < done]
