"""The legs of a run: from its beginning, or a stop at which policy, budget or schedule was changed, to the next one.

A replay goes through them one after another, and makes each change at the step at which the run made it. What each leg
went by the ledger says: it has the recipe's facts at every amendment, and the texts of policies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cosmati.forget.past_run import CERTIFICATE, FORGOTTEN, PastRun, Start
from cosmati.ledger.sealing import SEALED
from cosmati.ledger.standing import StandingSteps
from cosmati.ledger.tables import Tables
from cosmati.train.config import CHANGEABLE
from cosmati.train.identity import kind_of

_VOUCHED = {"provenance", "policy_provenance"}
"""Who vouches, and when they were asked: rows are those that they were, save rejected ones."""
_FREE = ("cadence.", "parent.", "microbatches", SEALED)
"""Changes in mid-run that a replay doesn't have to be told: cuts of microbatches are kept in the folder, and what the
run came to seal is sealed in all steps that are taken anew, which changes no bit of them."""
_LIVE = {"policy", "policy.changed_by"}
"""What an amendment says of a policy that the run took up without a stop."""


@dataclass(frozen=True, slots=True)
class Leg:
    """Steps that stand, under one policy, budget and schedule as the recipe gave them.

    Attributes:
        first: number of its first step.
        end: of the first one after it; None of the last leg, which goes to the end of its budget.
        tables: in force at its last step.
    """

    first: int
    end: int | None
    tables: Tables

    @property
    def recipe(self) -> Mapping[str, str]:
        """What of the recipe a resume may change, by name, as texts."""
        return _changeable(self.tables)

    @property
    def policy_changes(self) -> list[dict[str, Any]]:
        """The changes of the policy without a stop, those to come among them."""
        told = self.tables.details.get("policy_changes") or []
        return [one for one in told if isinstance(one, dict) and isinstance(one.get("step"), int)]


def legs_of(run: PastRun) -> tuple[Leg, ...]:
    """Return a run's legs, in the order of steps, without a gap."""
    last = run.ledger.tables[-1]
    if not any(kind_of(name) in CHANGEABLE for tables in run.ledger.tables for name, *_ in tables.changes):
        return (Leg(0, None, last),)
    found = list[Leg]()
    for span in StandingSteps(run.ledger).spans:
        if found and found[-1].recipe == _changeable(span.tables):
            found[-1] = replace(found[-1], end=span.end, tables=span.tables)
        else:
            found.append(Leg(span.first, span.end, span.tables))
    if not found:
        return (Leg(0, None, last),)
    # What was told since its last step is the last leg's too, unless nobody has gone on by it.
    end = last if _changeable(last) == found[-1].recipe else found[-1].tables
    return (*found[:-1], replace(found[-1], end=None, tables=end))


def leg_at(legs: Collection[Leg], step: int) -> Leg:
    """Return the leg that a step is of."""
    return next(leg for leg in legs if leg.first <= step and (leg.end is None or step < leg.end))


def legs_after(legs: Collection[Leg], step: int) -> tuple[Leg, ...]:
    """Return the legs that a run still has before it which stands at a step."""
    return tuple(leg for leg in legs if leg.end is None or leg.end > step)


def _changeable(tables: Tables) -> dict[str, str]:
    told = tables.details.get("recipe")
    facts = told if isinstance(told, Mapping) else {}
    return {name: str(value) for name, value in facts.items() if kind_of(name) in CHANGEABLE}


def amended_after(run: PastRun, start: Start, classes: Collection[str], legs: Collection[Leg]) -> list[str]:
    """Return in words what the run changed in mid-run after a start, and a replay from there wouldn't do again.

    Args:
        run: that was trained.
        start: of the replay.
        classes: that are forgotten: that they were rejected on the way changes nothing, since they're gone.
        legs: of the run.
    """
    before = {one.class_name for one in start.tables.withdrawn if one.action == "reject"}
    again, found = _done_again(run, start, legs), []
    for tables in (tables for tables in run.ledger.tables if tables.index > start.tables.index):
        names = {name for name, *_ in tables.changes}
        rejected = {one.class_name for one in tables.withdrawn if one.action == "reject"} - before
        step = getattr(tables.entry, "step", 0)
        if not {FORGOTTEN, CERTIFICATE} & names:
            left = names - _VOUCHED - again.get(tables.index, set())
            found += [f"{name} from step {step} on" for name in left if not name.startswith(_FREE)]
            found += [f"{name} is rejected from step {step} on" for name in rejected - {*classes}]
    return sorted(set(found))


def _done_again(run: PastRun, start: Start, legs: Collection[Leg]) -> dict[int, set[str]]:
    """Return which changes a replay from a start does again, by the index of the entry that says them."""
    if run.ledger.tables[-1].withdrawn != start.tables.withdrawn:  # Nobody has tried both together.
        return {}
    stops = {leg.first for leg in legs if 0 < leg.first >= start.step}
    coming = set(_taken_up(legs, start.step))
    again = dict[int, set[str]]()
    for tables in run.ledger.tables:
        names, step = {name for name, *_ in tables.changes} - _VOUCHED, getattr(tables.entry, "step", None)
        if (step in coming and names == _LIVE) or names == {"policy.to_come"}:
            again[tables.index] = names
        elif step in stops and any(kind_of(name) in CHANGEABLE for name in names):
            # The plan has length and policy in it.
            again[tables.index] = {name for name in names if name == "plan" or kind_of(name) in CHANGEABLE}
    return again


def _taken_up(legs: Collection[Leg], after: int) -> Iterator[int]:
    """Yield the steps after one at which the run took up another policy without a stop."""
    for leg in legs:
        yield from (one["step"] for one in leg.policy_changes if one["step"] > max(after, leg.first))


def changed_at(legs: Collection[Leg], start: int) -> Iterator[str]:
    """Yield in words what a replay from a step changes again at a stop of the run's."""
    before: Leg | None = None
    for leg in legs:
        if before is not None and leg.first >= start:
            changed = before.recipe.items() ^ leg.recipe.items()
            what = " and the ".join(sorted({kind_of(name) for name, _ in changed}))
            yield f"the {what} of the run changed at a stop, and changes again at step {leg.first}"
        before = leg
