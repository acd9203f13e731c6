"""A policy from which a class is taken in mid-run."""

from __future__ import annotations

import dataclasses

from cosmati.routing.cells import Decision
from cosmati.routing.policy import CompiledPolicy, Phase


def without_class(policy: CompiledPolicy, class_id: int, step: int) -> CompiledPolicy:
    """Return a policy that rejects a class from a step on, and says of all before and else what it did.

    Args:
        policy: compiled; the phase that the step is in is cut in two.
        class_id: index of the class.
        step: the first without it; at or after the run's end nothing changes.
    """
    policy = _cut(policy, step)
    late = [phase.start_step >= step for phase in policy.phases]
    nothing = (0.0,) * len(policy.regions)
    weights, decisions = list(policy.weight), list(policy.decision)
    for row in policy.rows_of(class_id):
        weights[row] = tuple(nothing if is_late else w for is_late, w in zip(late, weights[row], strict=True))
        decisions[row] = tuple[Decision, ...](
            "reject" if is_late else decision for is_late, decision in zip(late, decisions[row], strict=True)
        )
    return dataclasses.replace(policy, weight=tuple(weights), decision=tuple(decisions))


def _cut(policy: CompiledPolicy, step: int) -> CompiledPolicy:
    """Return the same policy with a phase that begins at a step."""
    at = next((i for i, phase in enumerate(policy.phases) if phase.start_step < step < phase.end_step), None)
    if at is None:
        return policy
    phase = policy.phases[at]
    parts = (dataclasses.replace(phase, end_step=step), Phase(f"{phase.name} from {step}", step, phase.end_step))
    return dataclasses.replace(
        policy,
        phases=(*policy.phases[:at], *parts, *policy.phases[at + 1 :]),
        weight=tuple((*rows[: at + 1], *rows[at:]) for rows in policy.weight),
        decision=tuple((*kinds[: at + 1], *kinds[at:]) for kinds in policy.decision),
    )
