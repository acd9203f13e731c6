"""The facts of a governed run for the report: what its policy says, and what its verified ledger answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from cosmati.corpora.python_library import PythonLibrary
from cosmati.errors import RunError
from cosmati.ledger.details import decode_details
from cosmati.ledger.query import contributions, direct_write_exclusion
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.ledger.verify import LedgerReport, verify_ledger
from cosmati.records.governance import (
    ContributionSeries,
    ContributionTotal,
    GovernanceFacts,
    LedgerFacts,
    SourceRow,
)
from cosmati.records.ledger import StepEntry
from cosmati.routing.policy import CompiledPolicy
from cosmati.train.trainer import Trainer

NOTES = (
    (
        "A statement of direct-write exclusion is about gradients: rows of the class wrote nothing into the region. "
        "It doesn't say that the class had no influence there: after the first steps every class acts on every "
        "region through the activations."
    ),
    "The ledger has no witness: it is consistent in itself, and asserted by whoever ran the training.",
    "Classes come from what packages declare about their licences. That is metadata, not legal advice.",
)


def governance_facts(trainer: Trainer, library: PythonLibrary, run_folder: Path) -> GovernanceFacts:
    """Verify a finished run's ledger and gather what the report shows of it.

    Args:
        trainer: of the run.
        library: the corpus that it learnt from.
        run_folder: of the run.

    Raises:
        RunError: the run had no policy. TamperError: the ledger doesn't verify.
    """
    policy = trainer.assembly.policy
    if policy is None:
        msg = "This run had no policy, so there is nothing to report on it. Give Trainer(policy=...)."
        raise RunError(msg)
    ledger = run_folder / "ledger"
    report = verify_ledger(ledger)
    table = contributions(ledger)
    shown = [name for name in policy.classes if any(c.class_name == name and c.num_rows for c in table.cells)]
    phases = tuple(phase.name for phase in policy.phases)
    return GovernanceFacts(
        classes=policy.classes,
        regions=policy.regions,
        phases=phases,
        weight={
            name: {p: dict(zip(policy.regions, policy.weight[c][i], strict=True)) for i, p in enumerate(phases)}
            for c, name in enumerate(policy.classes)
        },
        decision={name: dict(zip(phases, policy.decision[c], strict=True)) for c, name in enumerate(policy.classes)},
        contribution=_series(ledger, shown, policy.regions),
        totals=tuple(
            ContributionTotal(c.class_name, c.region, c.num_steps, c.num_rows, c.norm_sum, c.norm_share or 0.0)
            for c in table.cells
            if c.class_name in shown
        ),
        exclusions=_exclusions(ledger, policy, shown),
        sources=_sources(library),
        ledger=_ledger_facts(report, ledger),
        notes=NOTES,
    )


def denied_pairs(policy: CompiledPolicy, classes: Sequence[str]) -> list[tuple[str, str]]:
    """Return class and region wherever the policy gives one of the classes no weight in any phase."""
    return [
        (name, region)
        for name in classes
        for r, region in enumerate(policy.regions)
        if all(route[r] == 0 for route in policy.weight[policy.classes.index(name)])
    ]


def _exclusions(ledger: Path, policy: CompiledPolicy, classes: Sequence[str]) -> tuple[str, ...]:
    found = [direct_write_exclusion(ledger, name, region) for name, region in denied_pairs(policy, classes)]
    return tuple(
        f"No logged step gave rows tagged {s.class_name} any weight in {s.region}: {s.num_steps_scanned} steps with "
        f"{s.num_class_microbatches} microbatches of the class were scanned, all of the {s.tree_size} entries "
        f"under root {s.root[:16]}…"
        for s in found
    )


def _series(ledger: Path, classes: Sequence[str], regions: Sequence[str]) -> tuple[ContributionSeries, ...]:
    """Add up the logged norms of each step, by class and region."""
    key = read_verifier_key(ledger)
    sums: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    names: list[str] = []
    for item in Scan(ledger, read_head(ledger, key)):
        details = decode_details(item.details) if item.details is not None else {}
        if item.index == 0:
            found = details.get("classes")
            names = [str(name) for name in found] if isinstance(found, list) else []
        logged = details.get("gradient_norm")
        if not isinstance(item.entry, StepEntry) or not isinstance(logged, dict):
            continue
        for microbatch, norms in logged.items():
            name = names[item.entry.microbatches[int(microbatch)].class_id]
            for region, norm in zip(regions, norms, strict=True):
                if norm is not None:
                    sums[name, region][item.entry.step] += norm
    return tuple(
        ContributionSeries(name, region, tuple(sorted(by_step)), tuple(by_step[s] for s in sorted(by_step)))
        for (name, region), by_step in sorted(sums.items())
        if name in classes
    )


def _sources(library: PythonLibrary) -> tuple[SourceRow, ...]:
    """Group the training packages by class and licence; the standard library's modules count as packages."""
    groups: dict[tuple[str, str, str], list[tuple[str, int]]] = defaultdict(list)
    for package in library.packages:
        if package.split == "train" and package.num_rows:
            licence = package.licence
            key = (licence.class_path, licence.spdx or "not understood", licence.state)
            groups[key].append((package.name, package.num_rows))
    return tuple(
        SourceRow(
            class_name=class_path,
            name=_named([name for name, _ in sorted(found, key=lambda pair: -pair[1])]),
            num_rows=sum(rows for _, rows in found),
            num_packages=len(found),
            licence=expression,
            licence_state=state,
        )
        for (class_path, expression, state), found in sorted(groups.items())
    )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ledger_facts(report: LedgerReport, ledger: Path) -> LedgerFacts:
    return LedgerFacts(
        origin=report.origin,
        size=report.size,
        root=report.root,
        level=report.evidence_level.partition(":")[0],
        checked=True,
        problems=(),
        num_witnesses=0,
        commands=(f"cosmati ledger verify {ledger}", f"cosmati ledger query {ledger}"),
    )
