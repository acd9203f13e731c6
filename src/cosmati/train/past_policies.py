"""The policies that a run has gone by: what a class wrote under one, no later one can promise that it didn't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cosmati.core.plan import Pair, Plan, Promise
from cosmati.routing.policy import CompiledPolicy

Past = list[dict[str, Any]]
"""Spans of steps, as JSON holds them: `first`, `end`, the `regions`' parameters, and which a class may teach."""

Broken = list[dict[str, Any]]
"""What the run broke, as JSON holds it: which `promise`, of which `class` and `parameters`, and `because` of what."""


def with_span(past: Past, policy: CompiledPolicy | None, first: int, end: int) -> Past:
    """Return the past with a policy that was in force from step `first` to before `end`."""
    if policy is None or first >= end:
        return past
    phases = [i for i, phase in enumerate(policy.phases) if phase.start_step < end and phase.end_step > first]
    taught = {
        name: [
            region
            for r, region in enumerate(policy.regions)
            if any(policy.weight[row][p][r] for row in policy.rows_of(c) for p in phases)
        ]
        for c, name in enumerate(policy.classes)
    }
    span = {"regions": dict(zip(policy.regions, map(list, policy.partition.parameters), strict=True)), "taught": taught}
    if past and all(past[-1][key] == value for key, value in span.items()):
        past, first = past[:-1], past[-1]["first"]
    return [*past, {"first": first, "end": end, **span}]


def without_taught(plan: Plan, past: Sequence[dict[str, Any]], policy: CompiledPolicy | None) -> Plan:
    """Take back that a class wrote nothing into a region of which a policy in the past let it teach a part."""
    for pair in [g.pair for g in plan.guarantees if g.pair is not None and g.holds]:
        if policy is not None and (why := _taught(pair, past, policy)):
            plan = plan.withdraw(Promise.NO_DIRECT_WRITE, why, pair)
    return plan


def with_broken(broken: Broken, plan: Plan, policy: CompiledPolicy | None, first: int, end: int) -> Broken:
    """Return what is broken with what a plan has withdrawn by step `end`, under a policy in force from step `first`."""
    if policy is None or first >= end:
        return broken
    own = [
        {
            "promise": str(g.promise),
            "class": g.pair[0],
            "parameters": _parameters(policy, g.pair[1]),
            "because": g.because,
        }
        for g in plan.guarantees
        if g.pair is not None and not g.holds
    ]
    known = list(map(_what, broken))
    return broken + [one for one in own if _what(one) not in known]


def _what(one: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    return one.get("promise", str(Promise.NO_DIRECT_WRITE)), one["class"], one["parameters"]


def without_broken(plan: Plan, broken: Sequence[dict[str, Any]], policy: CompiledPolicy | None) -> Plan:
    """Take back what the run broke under an earlier policy, whatever that one called the region."""
    for promise, pair in [(g.promise, g.pair) for g in plan.guarantees if g.pair is not None and g.holds]:
        own = set(_parameters(policy, pair[1])) if policy is not None else set()
        found = [
            one["because"] for one in broken if _what(one)[:2] == (promise, pair[0]) and own & {*one["parameters"]}
        ]
        plan = plan.withdraw(promise, found[0], pair) if found else plan
    return plan


def _parameters(policy: CompiledPolicy, region: str) -> list[str]:
    return list(policy.partition.parameters[policy.regions.index(region)])


def _taught(pair: Pair, past: Sequence[dict[str, Any]], policy: CompiledPolicy) -> str:
    """Return in which steps an earlier policy let the class teach parameters of the region; empty for none."""
    own = {*_parameters(policy, pair[1])}
    found = [
        f"'{region}' in steps {span['first']} to {span['end'] - 1}"
        for span in past
        for region in span["taught"].get(pair[0], ())
        if own & {*span["regions"][region]}
    ]
    return f"an earlier policy let rows of {pair[0]} teach {', '.join(found)}" if found else ""
