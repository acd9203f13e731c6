"""What became of the rows that were proposed to a run, and why: admitted, gated, deferred or rejected. From its ledger.

The decision is that of the tables which the ledger holds each step against. The reason is looked up in the text of the
policy, whose digest the ledger commits to; what an authority took back in mid-run stands in the ledger itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pydantic import ValidationError

from cosmati.errors import LedgerError, PolicyError
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.tables import Tables
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.records.joint_classes import is_joint, members_of
from cosmati.routing.policy_analysis import explain
from cosmati.routing.policy_file import PolicyFile


@dataclass(frozen=True)
class Proposal:
    """Rows of one class and kind in a span of steps, and what the policy in force decided about them.

    Args:
        class_name: the class.
        kind: band and grades, in words; empty where the policy tells no kinds apart.
        start_step: the first step.
        end_step: the one after the last.
        decision: `admit`, `gate`, `defer` or `reject`.
        num_microbatches: with such rows in the steps that stand; of what is rejected or deferred, most never get there.
        num_rows: their rows that were trained on.
        because: why, a line for each group of regions that have the same reason.
    """

    class_name: str
    kind: str
    start_step: int
    end_step: int
    decision: str
    num_microbatches: int
    num_rows: int
    because: tuple[str, ...]


def proposals(ledger: VerifiedLedger, class_name: str = "") -> list[Proposal]:
    """Return what was decided about each class's rows, of one class or of all, in the order of steps.

    Raises:
        LedgerError: the run has no policy, or there's no such class.
    """
    if not ledger.tables[0].policy:
        raise LedgerError("The run has no policy: all its rows were admitted. Nothing was decided about any of them.")
    if class_name and class_name not in ledger.classes:
        raise LedgerError(f"The ledger has no class {class_name!r}. It has {', '.join(ledger.classes)}.")
    seen, rows = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for item, entry, tables in ledger.steps():
        if item.index in ledger.standing:
            for cell in entry.microbatches:
                place = tables.index, tables.row_of(cell, item), cell.phase
                seen[place] += 1
                rows[place] += cell.num_rows
    found = []
    for tables, begin, end in _in_turn(ledger.tables):
        policy = _policy_of(tables)
        for (class_id, name), (kind, words), p in product(
            enumerate(tables.classes), enumerate(tables.bands), range(len(tables.phases))
        ):
            start, stop = max(tables.phases[p][0], begin), min(tables.phases[p][1], end)
            if start >= stop or class_name not in ("", name):
                continue
            row = class_id * len(tables.bands) + kind
            because = _because(tables, policy, name, kind, p)
            counts = seen[tables.index, row, p], rows[tables.index, row, p]
            found.append(Proposal(name, words, start, stop, tables.policy[row][p][1], *counts, because))
    return sorted(found, key=lambda one: one.start_step)


def _in_turn(every: Sequence[Tables]) -> Iterator[tuple[Tables, int, int]]:
    """Yield tables with the steps for which they stood in the end: what a resume superseded isn't among them."""
    standing: list[tuple[Tables, int]] = []
    for tables in every:
        step = getattr(tables.entry, "step", 0)
        standing = [*((one, begin) for one, begin in standing if begin < step), (tables, step)]
    ends = [*(begin for _, begin in standing[1:]), max(end for _, end in standing[-1][0].phases)]
    for (tables, begin), end in zip(standing, ends, strict=True):
        yield tables, begin, end


def _policy_of(tables: Tables) -> PolicyFile | None:
    try:
        return PolicyFile.model_validate(tables.details.get("policy_text"))
    except ValidationError:  # of a ledger that was written before it was kept
        return None


def _because(tables: Tables, policy: PolicyFile | None, name: str, kind: int, p: int) -> tuple[str, ...]:
    """Return the reasons for a decision."""
    begin = tables.phases[p][0]
    taken = [
        one
        for one in tables.withdrawn
        if one.action == "reject" and one.class_name in members_of(name) and one.step <= begin
    ]
    if taken:
        return (f"nobody vouches for {taken[0].target} any more, from step {taken[0].step} on",)
    if policy is None:
        return ("the ledger doesn't hold the policy's text",)
    phase = str(tables.details["phases"][p][0])
    # Where a class is taken away in mid-run, a phase is cut in two.
    phase = next((own for own in policy.phase_names if own == phase or phase.startswith(f"{own} from ")), phase)
    number, grades = tables.kinds[kind] if tables.kinds else (kind, dict[str, str]())
    band = policy.band_names[number] if policy.bands else ""
    taxonomy = Taxonomy(
        policy.taxonomy, "of the ledger", tuple((one, "") for one in tables.classes if not is_joint(one))
    )
    reasons: dict[str, list[str]] = {}
    for region in sorted(policy.selectors) or ["all"]:
        reasons.setdefault(_reason(policy, (name, region, phase, band), grades, taxonomy), []).append(region)
    alone = len(reasons) == 1
    return tuple(reason if alone else f"{', '.join(regions)}: {reason}" for reason, regions in reasons.items())


def _reason(policy: PolicyFile, where: tuple[str, str, str, str], grades: Mapping[str, str], taxonomy: Taxonomy) -> str:
    try:
        found = explain(policy, *where, taxonomy=taxonomy, grades=grades)
    except PolicyError as error:
        return f"it can't be explained: {error}"
    rule = "the default" if found.winner is None else found.winner.partition("(")[2].removesuffix(")")
    return "; ".join([f"{rule} ({found.why})", *(one.partition("(")[2].removesuffix(")") for one in found.lowered)])
