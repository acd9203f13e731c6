"""Which policies the steps of a ledger went by, and what each allows that the one before it didn't."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from cosmati.ledger.tables import Tables
from cosmati.records.grace import more_grace

_NAMED = 4


@dataclass(frozen=True, slots=True)
class PolicyInForce:
    """A policy that steps went by, or none in the place of one.

    Attributes:
        step: From which step on.
        digest: Of its canonical form; what the ledger commits to where there's none.
        facts: Who vouched for it; None where it was declared.
        before: The policy of the steps before it, None where it's the first.
        loosens: What it allows, in the steps from there on, that the one before didn't: a line each.
        readmits: Whether some of that was denied whole.
    """

    step: int
    digest: bytes
    facts: Mapping[str, Any] | None
    before: PolicyInForce | None = None
    loosens: tuple[str, ...] = ()
    readmits: bool = False

    def is_other(self, later: PolicyInForce) -> bool:
        """Return whether a later one differs, or others vouched for it."""
        return (self.digest, self.facts) != (later.digest, later.facts)

    @property
    def signed_before(self) -> Mapping[str, Any] | None:
        """Who vouched for the last signed policy before it; None where all were declared."""
        one = self.before
        while one is not None and one.facts is None:
            one = one.before
        return None if one is None else one.facts

    def problems(self, run: str) -> list[str]:
        """Return why it may not have taken the place of one that an authority had signed, a line each.

        The operator alone may tighten. What allows more was signed by the same authority, as the next number, for this
        run, the policy before it and a step that has come; by two people where it admits again what was denied. That
        the signatures themselves hold is asked elsewhere (`cosmati.provenance.authority.audit`).

        Args:
            run: Verifier key of the ledger.
        """
        try:
            return self._problems(run)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            return [f"what the ledger says of signatures isn't of the form that runs write: {error!r}"]

    def _problems(self, run: str) -> list[str]:
        signed, before = self.signed_before, self.before
        if signed is None or before is None or not self.loosens:
            return []
        what = f"from step {self.step} on more is allowed than was signed ({'; '.join(self.loosens[:_NAMED])})"
        was = signed["sources"][0]
        if self.facts is None or self.facts["sources"][0]["root"] != was["root"]:
            return [f"{what}, and {was['root'][:12]} hasn't signed that"]
        now, statement = self.facts["sources"][0], self.facts["statement"]
        wanted = {"run": run, "previous": before.digest.hex()}
        found = [
            f"{what}, and its signers meant the {name} {statement.get(name, '(none)')}, where that is {value}"
            for name, value in wanted.items()
            if statement.get(name) != value
        ]
        if not isinstance(begin := statement.get("from_step"), int) or begin > self.step:
            found.append(f"{what}, and its signers meant step {begin}")
        if _number(now) != _number(was) + 1:
            found.append(f"{what}, and {now['target']} isn't the version after {was['target']}")
        if self.readmits and len(now["keyids"]) < 2:
            found.append(f"{what}, some of which was denied: that takes two signers, and one has signed")
        return found


class PolicyHistory:
    """Follows the policies of a log: those that stand, and all of them in the order of the log."""

    def __init__(self) -> None:
        self.seen: list[PolicyInForce] = []
        self._standing: list[tuple[PolicyInForce, Tables]] = []

    def take(self, step: int, tables: Tables) -> None:
        """Take note of entry 0, or of an amendment from a step on."""
        if not tables.policy and not self._standing:
            return
        # A resume from an earlier step goes on from what was in force there; from step 0, from what the run began with.
        self._standing = [one for one in self._standing if one[0].step < step] or self._standing[:1]
        before = self._standing[-1] if self._standing else None
        was = None if before is None else before[1]
        more, others, is_dropped = list[tuple[str, float, float]](), list[str](), False
        if was is not None and was.policy and tables.policy:
            more, others = list(_more(was, tables, step)), _others(was, tables)
        elif was is not None and was.policy:
            others, is_dropped = ["no policy takes its place, so nothing is kept from any rows"], True
        policy = PolicyInForce(
            step,
            dict(tables.entry.commitments).get("policy", b""),
            tables.details.get("policy_provenance"),
            before[0] if before else None,
            tuple(dict.fromkeys([f"{text}: {old:g} -> {new:g}" for text, old, new in more] + others)),
            is_dropped or any(weight == 0 for _, weight, _ in more),
        )
        self._standing.append((policy, tables))
        if not self.seen or self.seen[-1].is_other(policy):
            self.seen.append(policy)


def _others(old: Tables, new: Tables) -> list[str]:
    """Return what no weight tells, and whose signers alone may change it: a line each."""
    texts = [tables.details.get("policy_text") for tables in (old, new)]
    was, now = (text if isinstance(text, Mapping) else {} for text in texts)
    starvation = [f"starvation: {one.get('starvation')}" for one in (was, now)]
    changed = [] if starvation[0] == starvation[1] else [" -> ".join(starvation)]
    # Which rows are meant by a band or a grade is no weight either.
    measured = [name for name in ("bands", "measures") if was.get(name) and now.get(name)]
    changed += [f"{n}: {was[n]} -> {now[n]}" for n in measured if was[n] != now[n]]
    end = max((end for _, end in new.phases), default=0)
    try:
        return changed + more_grace(was.get("grace"), now.get("grace"), end)
    except (AttributeError, KeyError, ValueError, ArithmeticError) as error:
        return [*changed, f"grace: {was.get('grace')} -> {now.get('grace')} ({error!r})"]


def _number(source: Mapping[str, Any]) -> int:
    return int(source["target"].rpartition("/")[2])


def _more(old: Tables, new: Tables, step: int) -> Iterator[tuple[str, float, float]]:
    """Yield what a later policy allows more from a step on: class and region in words, weight before and after."""
    starts = {start for tables in (old, new) for start, _ in tables.phases}
    spans = sorted({step} | {start for start in starts if start > step})
    kinds, regions = list(_kinds(old, new)), _shared_regions(old, new)
    has_bands = any(band for band, _ in kinds)
    for name, (band, grades), at in product(dict.fromkeys((*old.classes, *new.classes)), kinds, spans):
        before, after = _weights(old, name, band, grades, at), _weights(new, name, band, grades, at)
        for was, now in regions:
            if (w := before.get(was, 0.0)) < (n := after.get(now, 0.0)):
                words = [f"{measure} {grade or 'unmeasured'}" for measure, grade in grades.items()]
                kind = ", ".join([name, *([f"band {band}"] if has_bands else []), *words])
                yield f"{kind} in {now}, from step {at} on", w, n


def _bands(tables: Tables) -> int:
    """Return how many bands there are; 1 where there are none."""
    return max((band for band, _ in tables.kinds), default=len(tables.bands) - 1) + 1


def _kinds(old: Tables, new: Tables) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the kinds of rows to compare, as shards describe them; one band more where only one side has bands."""
    every = [grades for tables in (old, new) for _, grades in tables.kinds]
    names = sorted({name for grades in every for name in grades})
    known = [dict.fromkeys(("", *(grades[name] for grades in every if name in grades))) for name in names]
    bands = max(_bands(old), _bands(new)) + (_bands(old) != _bands(new))
    for band, *grades in product(range(bands), *known):
        yield band, dict(zip(names, grades, strict=True))


def _shared_regions(old: Tables, new: Tables) -> list[tuple[str, str]]:
    """Return the pairs of an old and a new region that have parameters in common; empty for one that wasn't there."""
    before, after = (
        {
            parameter: region
            for region, own in zip(tables.regions, tables.details.get("parameters", ()), strict=False)
            for parameter in own
        }
        for tables in (old, new)
    )
    named = [(before.get(parameter, ""), region) for parameter, region in after.items()]
    return list(dict.fromkeys(named)) or [(name, name) for name in new.regions]


def _weights(tables: Tables, name: str, band: int, grades: Mapping[str, str], step: int) -> dict[str, float]:
    """Return the weight of each region at a step, empty where the class, its band or a grade isn't there."""
    phase = next((p for p, (start, end) in enumerate(tables.phases) if start <= step < end), None)
    alike: Mapping[str, str] = {}
    kinds = tables.kinds or [(number, alike) for number in range(len(tables.bands))]
    band = band if _bands(tables) > 1 else 0
    found = (k for k, (b, own) in enumerate(kinds) if b == band and all(grades[m] == g for m, g in own.items()))
    if name not in tables.classes or phase is None or (kind := next(found, None)) is None:
        return {}
    row = tables.classes.index(name) * len(tables.bands) + kind
    return dict(zip(tables.regions, tables.policy[row][phase][0], strict=True))
