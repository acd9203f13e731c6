"""What a governed run's ledger says: its policy, who taught which region how much, who came when, who was kept out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from cosmati.errors import TamperError
from cosmati.ledger.query import Contribution, VerifiedLedger, contributions, direct_write_exclusions, logged_steps
from cosmati.records.governance import ContributionSeries, ContributionTotal, GovernanceFacts, LedgerFacts

ClassSchedule = tuple[tuple[str, ...], ...]
"""Of each step that stands, the classes of its microbatches."""
Weights = Mapping[str, Mapping[str, Mapping[str, float]]]

NOTES = (
    (
        "A statement of direct-write exclusion is about gradients: rows of the class wrote nothing into the region. "
        "It doesn't say that the class had no influence there: after the first steps every class acts on every "
        "region through the activations."
    ),
    "The ledger has no witness: it is consistent in itself, and asserted by whoever ran the training.",
)


def governance_facts(ledger: VerifiedLedger, facts: LedgerFacts) -> tuple[GovernanceFacts, ClassSchedule]:
    """Gather what the page shows of a governed run, and the schedule of its classes.

    Args:
        ledger: of the run.
        facts: its state.

    Raises:
        TamperError: its entries or details don't follow their contract, or a step gave a class weight where the policy
            gives it none.
    """
    table = contributions(ledger)
    phases, weight, decision = _policy(ledger)
    taught = {cell.class_name for cell in table.cells if cell.num_rows}
    closed = {cell.region for cell in table.cells if cell.num_sealed}
    series, schedule = _logged(ledger)
    governance = GovernanceFacts(
        classes=table.classes,
        regions=table.regions,
        phases=phases,
        weight=weight,
        decision=decision,
        contribution=series,
        totals=tuple(_total(c, closed) for c in table.cells if c.class_name in taught),
        exclusions=_exclusions(ledger, [pair for pair in denied_pairs(weight) if pair not in _admitted_pairs(ledger)]),
        sources=(),
        ledger=facts,
        notes=NOTES,
    )
    return governance, schedule


def _total(one: Contribution, closed: Collection[str]) -> ContributionTotal:
    return ContributionTotal(
        one.class_name,
        one.region,
        one.num_steps,
        one.num_rows,
        one.norm_sum if one.num_norms else 0.0,  # it isn't a number where all of them are sealed
        one.norm_share or 0.0,
        one.num_sealed,
        one.region not in closed,
    )


def _policy(ledger: VerifiedLedger) -> tuple[tuple[str, ...], Weights, Mapping[str, Mapping[str, str]]]:
    """Return phases, weights and decisions in force at the end; what only earlier tables named gets nothing in them."""
    tables = ledger.tables[-1]
    if not tables.policy:
        msg = (
            f"Entry {tables.index} of the ledger holds no policy, though the run had one. "
            "Read it with the release of Cosmati that wrote it."
        )
        raise TamperError(msg)
    phases = tuple(str(name) for name, _, _ in tables.details["phases"])
    absent = (((), "reject"),) * len(phases)
    rows = {
        name: dict(zip(tables.classes, tables.policy_of_classes, strict=True)).get(name, absent)
        for name in ledger.classes
    }
    weight = {
        name: {
            phase: dict.fromkeys(ledger.regions, 0.0) | dict(zip(tables.regions, weights, strict=False))
            for phase, (weights, _) in zip(phases, cells, strict=True)
        }
        for name, cells in rows.items()
    }
    decision = {name: dict(zip(phases, (kind for _, kind in cells), strict=True)) for name, cells in rows.items()}
    return phases, weight, decision


def _admitted_pairs(ledger: VerifiedLedger) -> set[tuple[str, str]]:
    """Return class and region wherever a policy that was ever in force gives the class weight."""
    return {
        (name, region)
        for tables in ledger.tables
        for name, cells in zip(tables.classes, tables.policy_of_classes, strict=False)
        for weights, _ in cells
        for region, weight in zip(tables.regions, weights, strict=True)
        if weight
    }


def denied_pairs(weight: Weights) -> list[tuple[str, str]]:
    """Return class and region wherever the policy gives the class no weight in any phase."""
    return [
        (name, region)
        for name, phases in weight.items()
        for region in dict.fromkeys(region for row in phases.values() for region in row)
        if not any(row[region] for row in phases.values())
    ]


def _exclusions(ledger: VerifiedLedger, pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """State for each class which regions it wrote nothing into."""
    found = defaultdict(list)
    for statement in direct_write_exclusions(ledger, pairs):
        found[statement.class_name].append(statement)
    return tuple(
        f"No logged step gave rows tagged {name} any weight in {_listed([s.region for s in some], ledger)}: "
        f"{some[0].num_steps_scanned:,} steps with {some[0].num_class_microbatches:,} microbatches of the class were "
        f"scanned, all of the {some[0].tree_size:,} entries under root {some[0].root[:16]}…, by the tables of "
        f"{'policy' if len(some[0].policy_digests) == 1 else 'policies'} "
        f"{', '.join(f'{one[:16]}…' for one in some[0].policy_digests)}. Evidence: {some[0].evidence_level}."
        for name, some in found.items()
    )


def _listed(regions: Sequence[str], ledger: VerifiedLedger) -> str:
    if len(regions) == len(ledger.regions):
        return "any region"
    *others, last = regions
    return f"{', '.join(others)} or {last}" if others else last


def _logged(ledger: VerifiedLedger) -> tuple[tuple[ContributionSeries, ...], ClassSchedule]:
    """Return the logged norms of each step by class and region, and each step's classes."""
    norms: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    schedule = []
    for one in logged_steps(ledger):
        schedule.append(one.class_names)
        for key, norm in one.norms.items():
            norms[key].append((one.step, norm))
    series = tuple(
        ContributionSeries(name, region, tuple(s for s, _ in points), tuple(n for _, n in points))
        for (name, region), points in sorted(norms.items())
    )
    return series, tuple(schedule)
