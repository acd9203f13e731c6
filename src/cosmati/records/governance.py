"""The facts about what a model was allowed to learn from whom, and what its ledger says that it did learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cosmati.errors import RunError
from cosmati.records.encoding import FileRecord

GOVERNANCE_VERSION = 1


@dataclass(frozen=True)
class ContributionSeries:
    """Gradient norms that one class left in one region, step by step."""

    class_name: str
    region: str
    steps: tuple[int, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True)
class ContributionTotal:
    """What one class gave one region over the whole run.

    Attributes:
        class_name: The class.
        region: The region.
        num_steps: Steps in which rows of the class had weight in the region.
        num_rows: Rows of the class that had weight in the region.
        norm_sum: Sum of the logged gradient norms.
        share: `norm_sum` over the sum of all classes in this region. Neither additive nor influence.
        num_sealed: Norms that are sealed, and in no sum.
        has_share: Whether no class has any of those in this region: with one, none has a share.
    """

    class_name: str
    region: str
    num_steps: int
    num_rows: int
    norm_sum: float
    share: float
    num_sealed: int = 0
    has_share: bool = True


@dataclass(frozen=True)
class SourceRow:
    """One data source: class, rows, the packages that it comes from, its licence and that licence's state."""

    class_name: str
    name: str
    num_rows: int
    num_packages: int
    licence: str
    licence_state: str


@dataclass(frozen=True)
class LedgerFacts:
    """State of the ledger when the facts were taken.

    Attributes:
        origin: The log's origin line.
        size: Number of entries.
        root: Root hash of the tree, as in the checkpoint.
        level: Evidence level: `L0`, `L1`, `L2` or `L3`.
        checked: Whether the ledger was verified for these facts.
        problems: What verification found; empty where all is well or nothing was checked.
        num_witnesses: Cosignatures by others whom the reader trusts. With 0 all is operator-asserted.
        commands: What a reader runs to verify it.
        evidence: The evidence level in words, as each answer from the ledger has it.
    """

    origin: str
    size: int
    root: str
    level: str
    checked: bool
    problems: tuple[str, ...]
    num_witnesses: int
    commands: tuple[str, ...]
    evidence: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether it was checked and nothing was found."""
        return self.checked and not self.problems


@dataclass(frozen=True, kw_only=True)
class GovernanceFacts(FileRecord):
    """Policy, contribution, sources and ledger of one governed run.

    Attributes:
        classes: Class names.
        regions: Region names, from the input to the output.
        phases: Phase names in their order in time.
        weight: Compiled weight by class, phase and region.
        decision: Decision by class and phase: `admit`, `gate`, `defer` or `reject`.
        contribution: Gradient norms over time by class and region.
        totals: The same over the whole run.
        exclusions: Direct-write exclusion statements, as their queries gave them.
        sources: The data sources.
        ledger: The ledger's state, None for a run without one.
        notes: Whatever a reader must know besides.
        version: Version of this record's form.
    """

    version: int = GOVERNANCE_VERSION
    classes: tuple[str, ...]
    regions: tuple[str, ...]
    phases: tuple[str, ...]
    weight: Mapping[str, Mapping[str, Mapping[str, float]]]
    decision: Mapping[str, Mapping[str, str]]
    contribution: tuple[ContributionSeries, ...]
    totals: tuple[ContributionTotal, ...]
    exclusions: tuple[str, ...]
    sources: tuple[SourceRow, ...]
    ledger: LedgerFacts | None
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse a policy table with holes: each class has a decision and all weights in each phase."""
        for name in self.classes:
            for phase in self.phases:
                row = self.weight.get(name, {}).get(phase, {})
                missing = [region for region in self.regions if region not in row]
                if missing or phase not in self.decision.get(name, {}):
                    raise RunError(
                        f"The policy table lacks class {name!r}, phase {phase!r}, regions {missing}. "
                        "Build the facts from the compiled policy, which is total."
                    )
