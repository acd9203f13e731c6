"""Quick answers from derived tables: what `query` says by reading all entries, and when things were taught."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cosmati.ledger.derived.opened import DerivedLedger, Milestone, readable
from cosmati.ledger.query import Contribution, ContributionSum, require, total_norm
from cosmati.records.joint_classes import members_of

Each = Literal["", "phase", "policy"]
StepSpan = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ClassTaught:
    """What a class gave a region, and when.

    Attributes:
        group: The phase, or the number of the policy epoch, that it is of; empty where all are taken together.
        contribution: How much.
        first_step: The first step that did; -1 where none did.
        last_step: The last one.
    """

    group: str
    contribution: Contribution
    first_step: int = -1
    last_step: int = -1


@dataclass(slots=True)
class _Total(ContributionSum):
    first: int = -1
    last: int = -1


_CELLS = """
    SELECT policy_epoch, class_id, phase, route, reaches, opens, has_own,
           count(*), sum(rows)::BIGINT, fsum(weight), min(step)::BIGINT, max(step)::BIGINT
    FROM cells_file JOIN cuts USING (attempt) WHERE step < cut AND reaches > 0 GROUP BY ALL ORDER BY ALL
"""
_LEARNT = """
    SELECT policy_epoch, class_id, phase, region_id, fsum(learnt)
    FROM learnt_file JOIN cuts USING (attempt) WHERE step < cut GROUP BY ALL ORDER BY ALL
"""
_NORMS = """
    SELECT policy_epoch, class_id, phase, region_id, count(*), fsum(norm), fsum(norm * norm)
    FROM norms_file JOIN cuts USING (attempt) WHERE step < cut AND counts GROUP BY ALL ORDER BY ALL
"""
_SEALED = """
    SELECT policy_epoch, class_id, phase, region_id, count(*)
    FROM sealed_file JOIN cuts USING (attempt) WHERE step < cut GROUP BY ALL ORDER BY ALL
"""


def taught(derived: DerivedLedger, *, at: Milestone | None = None, each: Each = "") -> tuple[ClassTaught, ...]:
    """Return what each class gave each region over the steps that stand, zeros included.

    Args:
        derived: the tables.
        at: a checkpoint, to be told what it had learnt; None takes all that stands.
        each: tell it by phase, or by policy epoch (entry 0 and each amendment). A step whose cells say several phases,
            as no policy gives them, is counted in one of them.
    """
    derived.set_cuts(at)
    with readable(derived.ledger):
        totals = _totals(derived, _groups(derived, each))
    groups = list(dict.fromkeys(group for group, _, _ in totals)) if each else [""]
    norms = {
        (group, region): total_norm(totals[group, name, region] for name in derived.classes)
        for group in groups
        for region in derived.regions
    }
    return tuple(
        ClassTaught(group, one.of(name, region, norms[group, region]), one.first, one.last)
        for group in groups
        for name in derived.classes
        for region in derived.regions
        for one in (totals[group, name, region],)
    )


def _totals(derived: DerivedLedger, group_of: Callable[[int, int], str]) -> dict[tuple[str, str, str], _Total]:
    totals: dict[tuple[str, str, str], _Total] = defaultdict(_Total)
    sets = derived.index.sets
    for epoch, class_id, phase, route, reaches, opens, own, num, rows, weight, first, last in derived.rows(_CELLS):
        tables, group = derived.tables[epoch], group_of(epoch, phase)
        for region in sets[reaches][1]:
            one = totals[group, tables.classes[class_id], tables.regions[region]]
            one.num_microbatches += num
            one.num_rows += rows
            one.weight += 0.0 if own else tables.routes[route][region] * weight
            one.num_steps += num if region in sets[opens][1] else 0
            one.first = first if one.first < 0 else min(first, one.first)
            one.last = max(last, one.last)
    for epoch, class_id, phase, region, weight in derived.rows(_LEARNT):
        tables = derived.tables[epoch]
        totals[group_of(epoch, phase), tables.classes[class_id], tables.regions[region]].weight += weight
    for epoch, class_id, phase, region, num, norm_sum, squares in derived.rows(_NORMS):
        tables = derived.tables[epoch]
        one = totals[group_of(epoch, phase), tables.classes[class_id], tables.regions[region]]
        one.num_norms += num
        one.norm_sum += norm_sum
        one.square_sum += squares
    for epoch, class_id, phase, region, num in derived.rows(_SEALED):
        tables = derived.tables[epoch]
        totals[group_of(epoch, phase), tables.classes[class_id], tables.regions[region]].num_sealed += num
    return totals


def _groups(derived: DerivedLedger, each: Each) -> Callable[[int, int], str]:
    if each == "phase":
        names = [[str(one[0]) for one in tables.details.get("phases") or ()] for tables in derived.tables]
        return lambda epoch, phase: names[epoch][phase] if phase < len(names[epoch]) else str(phase)
    return (lambda epoch, _: str(epoch)) if each == "policy" else (lambda _, __: "")


def steps_taught(
    derived: DerivedLedger,
    class_name: str | None = None,
    region: str | None = None,
    *,
    at: Milestone | None = None,
    joint: bool = True,
) -> tuple[StepSpan, ...]:
    """Return the spans of standing steps, ends included, in which rows of a class (or of any) taught a region (or any).

    Args:
        derived: the tables.
        class_name: its name.
        region: its name.
        at: a checkpoint, to be told which of the steps before it stood then.
        joint: count rows that belong to the class and to others besides, too.

    Raises:
        LedgerError: no such class or region.
    """
    require(derived.classes, class_name, "class")
    require(derived.regions, region, "region")
    derived.set_cuts(at)
    pairs = [
        (epoch, class_id)
        for epoch, tables in enumerate(derived.tables)
        for class_id, name in enumerate(tables.classes)
        if class_name in (None, name) or (joint and class_name in members_of(name))
    ]
    sets = [
        number
        for number, (epoch, regions) in enumerate(derived.index.sets)
        if any(region in (None, derived.tables[epoch].regions[one]) for one in regions)
    ]
    columns = np.asarray(pairs, np.uint32).reshape(-1, 2).T
    derived.put("asked", dict(zip(("policy_epoch", "class_id"), columns, strict=True)))
    derived.put("asked_sets", {"reaches": np.asarray(sets, np.uint32)})
    with readable(derived.ledger):
        found = derived.database.execute(
            "SELECT DISTINCT step FROM cells_file JOIN cuts USING (attempt) JOIN asked USING (policy_epoch, class_id) "
            "JOIN asked_sets USING (reaches) WHERE step < cut ORDER BY step"
        ).fetchnumpy()["step"]
    return spans_of(np.asarray(found, np.int64))


def spans_of(steps: NDArray[np.int64]) -> tuple[StepSpan, ...]:
    """Return rising numbers as spans, ends included."""
    if not len(steps):
        return ()
    breaks = np.flatnonzero(np.diff(steps) > 1)
    firsts, lasts = steps[np.r_[0, breaks + 1]], steps[np.r_[breaks, len(steps) - 1]]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def num_standing(derived: DerivedLedger, at: Milestone | None = None) -> int:
    """Return how many steps stand."""
    derived.set_cuts(at)
    return int(derived.rows("SELECT count(*) FROM steps_file JOIN cuts USING (attempt) WHERE step < cut")[0][0])


@dataclass(frozen=True, slots=True)
class PolicyEffect:
    """What a change of policy did to one kind of rows in one region.

    Attributes:
        policy_epoch: Of the later policy.
        class_name: The class.
        band: Of the rows, empty where the policies have none.
        region: The region.
        phase: Of the later policy; of the earlier one where no policy took its place.
        before: The weight that the earlier policy gave these rows at that time; None where it had no such class,
            band or region, or there was no policy: then nothing was kept from these rows.
        after: The later one's.
        decision_before: Likewise, `admit` and the like; empty where the weight is None.
        decision_after: Likewise.
    """

    policy_epoch: int
    class_name: str
    band: str
    region: str
    phase: str
    before: float | None
    after: float | None
    decision_before: str
    decision_after: str


def policy_effects(derived: DerivedLedger) -> tuple[PolicyEffect, ...]:
    """Return what each amendment that changed the policy changed in its table, from its step on: cells that differ.

    Where no policy takes a policy's place, each of its cells differs, and is allowed from that step on.
    """
    found = list[PolicyEffect]()
    for epoch in range(1, len(derived.tables)):
        old, new = derived.tables[epoch - 1], derived.tables[epoch]
        if not (old.policy or new.policy):
            continue
        begin = int(getattr(new.entry, "step", 0))
        told = new if new.policy else old
        names = [str(one[0]) for one in told.details.get("phases") or ()]
        for phase, (start, end) in enumerate(told.phases):
            if end <= begin:
                continue
            step = max(start, begin)
            was, now = _weights_at(old, step), _weights_at(new, step)
            for key in dict.fromkeys((*was, *now)):
                (before, did), (after, does) = was.get(key, (None, "")), now.get(key, (None, ""))
                if (before, did) != (after, does):
                    name = names[phase] if phase < len(names) else ""
                    found.append(PolicyEffect(epoch, *key, name, before, after, did, does))
    return tuple(found)


def _weights_at(tables: Any, step: int) -> dict[tuple[str, str, str], tuple[float | None, str]]:  # noqa: ANN401
    """Return weight and decision by class, band and region in the phase of a step."""
    phase = next((n for n, (start, end) in enumerate(tables.phases) if start <= step < end), None)
    if phase is None or not tables.policy:
        return {}
    num = len(tables.bands)
    return {
        (name, band, region): (weight, tables.policy[class_id * num + number][phase][1])
        for class_id, name in enumerate(tables.classes)
        for number, band in enumerate(tables.bands)
        for region, weight in zip(tables.regions, tables.policy[class_id * num + number][phase][0], strict=True)
    }
