"""Answers from a verified ledger: which class gave what to which region. Pure Python, one or two passes.

Each query verifies the whole ledger first, as `verify_ledger` does, and reads only what the checkpoint
covers. Who asks several opens a `VerifiedLedger` once and gives it in place of the directory. A microbatch
*reaches* a region where it has rows, weighs something (rows without any label don't) and its route gives the region a
weight above 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmati.errors import LedgerError, TamperError
from cosmati.ledger.columns import ColumnScan
from cosmati.ledger.evidence import NOBODY, TrustedEvidence, Witnessing
from cosmati.ledger.exclusion import ExclusionStatement, exclusions
from cosmati.ledger.history import RunHistory
from cosmati.ledger.note import TreeHead
from cosmati.ledger.reader import Scan, ScannedEntry, operators, read_head, read_verifier_key
from cosmati.ledger.sealing import ColumnKeys, SealedClasses
from cosmati.ledger.step_details import learnt_weights, open_details, read_norms
from cosmati.ledger.tables import Tables, in_force
from cosmati.records.joint_classes import members_of
from cosmati.records.ledger import AmendEntry, RunEntry, StepEntry


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one class gave one region in the steps that stand.

    Norms are those that were logged, on their cadence. Norm shares are neither additive nor influence:
    gradients have directions, optimizers rescale them, and after two steps each class acts on all through the
    activations.

    Attributes:
        class_name: The class.
        region: The region.
        num_steps: Steps with a microbatch of the class that reaches the region while it learns: a frozen one doesn't.
        num_microbatches: Those microbatches.
        num_rows: Their rows.
        weight: Sum of microbatch weight times route weight, over all sub-steps.
        num_norms: Microbatches with a logged gradient norm that can be read.
        norm_sum: Sum of these norms; NaN where there are norms, and all of them are sealed.
        norm_rms: Root of their mean square, None where there is none.
        norm_share: `norm_sum` over that of all classes in the region, None where that is 0, or where any of them is
            sealed: of a total that is told with its other parts, the last one is told.
        num_sealed: Microbatches with a gradient norm that is sealed, and in no sum.
    """

    class_name: str
    region: str
    num_steps: int
    num_microbatches: int
    num_rows: int
    weight: float
    num_norms: int
    norm_sum: float
    norm_rms: float | None
    norm_share: float | None
    num_sealed: int = 0


@dataclass(frozen=True, slots=True)
class ContributionTable:
    """One `Contribution` for each class and region, in the order in which the log names them, zeros included."""

    origin: str
    tree_size: int
    root: str
    evidence_level: str
    num_steps: int
    classes: tuple[str, ...]
    regions: tuple[str, ...]
    cells: tuple[Contribution, ...]


def require(names: Sequence[str], name: str | None, kind: str) -> None:
    """Refuse a name that isn't among those of the ledger; None, that none is asked for, is fine.

    Raises:
        LedgerError: it isn't.
    """
    if name is not None and name not in names:
        raise LedgerError(f"The ledger has no {kind} {name!r}. It has {', '.join(names)}.")


class VerifiedLedger:
    """A ledger that was verified once; every further scan is under that one head.

    Args:
        directory: the ledger's.
        vkey: the operator's verifier key from a source that you trust.
        witnesses: whom you trust to have seen it: what they cosigned must be a prefix.
        keys: of columns that are sealed; what they don't open is counted, and in no sum.

    Attributes:
        directory: The ledger's.
        keys: As given.
        key: The operator's.
        head: What was verified.
        witnessing: What those who have seen it say.
        evidence_level: What an answer that rests on the whole of it shows.
        run: Entry 0.
        details: Entry 0's details: classes, regions, routes, phases and what else the run committed to.
        tables: What entry 0 and each amendment say, in the order of the log; the last ones are in force at its end.
        classes: Names in all these tables, in order of first appearance.
        regions: Likewise.
        standing: Indices of the steps that stand.

    Raises:
        LedgerError: no ledger, an empty one, or no key. TamperError: it doesn't verify, or its details don't
        follow the contract in `cosmati.records.ledger`.
    """

    def __init__(
        self,
        directory: Path,
        vkey: str | None = None,
        witnesses: TrustedEvidence = NOBODY,
        keys: ColumnKeys | None = None,
    ) -> None:
        self.keys = keys
        self.key = read_verifier_key(directory, vkey)
        self.witnessing = Witnessing(directory, witnesses)
        self.head: TreeHead = read_head(directory, self.key)
        if self.head.size == 0:
            raise LedgerError(f"The ledger {directory} is empty. Query it once the run has begun.")
        self.directory = directory
        self.tables, history = _read(directory, self.head, self.witnessing.heads)
        self.witnessing.check(operators(history, self.key))
        self.evidence_level = self.witnessing.level(self.head.size)
        first = self.tables[0]
        assert isinstance(first.entry, RunEntry), "the history refuses anything else as entry 0"
        self.run = first.entry
        self.details = first.details
        self.classes = tuple(dict.fromkeys(name for tables in self.tables for name in tables.classes))
        self.regions = tuple(dict.fromkeys(name for tables in self.tables for name in tables.regions))
        self.standing = history.standing()

    def entries(self) -> Iterator[ScannedEntry]:
        """Yield all entries."""
        return iter(Scan(self.directory, self.head))

    def steps(self) -> Iterator[tuple[ScannedEntry, StepEntry, Tables]]:
        """Yield the steps with the tables in force for them, superseded ones too."""
        for item, tables in in_force(Scan(self.directory, self.head)):
            if isinstance(item.entry, StepEntry):
                yield item, item.entry, tables

    def norms(
        self, item: ScannedEntry, entry: StepEntry, tables: Tables
    ) -> tuple[dict[int, list[float | None]], list[int]]:
        """Return a step's gradient norms by microbatch and region, and the microbatches whose norms are sealed.

        Raises:
            TamperError: they don't follow the contract in `cosmati.records.ledger`.
        """
        sealed = SealedClasses.of(tables.details, tables.classes, self.key.name)
        details, hidden = open_details(item, entry, sealed, self.keys)
        return read_norms(item, len(entry.microbatches), len(tables.regions), details), hidden


def _read(directory: Path, head: TreeHead, roots: list[TreeHead]) -> tuple[list[Tables], RunHistory]:
    """Read a ledger to its end; what the quick reader refuses is for the careful one to judge, and to name."""
    quick, found = ColumnScan(directory, head, roots), list[Tables]()
    try:
        for one in quick.blocks():
            if isinstance(one, ScannedEntry) and isinstance(one.entry, RunEntry | AmendEntry):
                assert quick.tables is not None, "they're read with the entry"
                found.append(quick.tables)
    except TamperError:
        scan = Scan(directory, head, roots)
        found = [tables for item, tables in in_force(scan) if isinstance(item.entry, RunEntry | AmendEntry)]
        return found, scan.history
    return found, quick.history


def _opened(ledger: Path | VerifiedLedger, vkey: str | None) -> VerifiedLedger:
    return ledger if isinstance(ledger, VerifiedLedger) else VerifiedLedger(ledger, vkey)


@dataclass(slots=True)
class ContributionSum:
    """What one class gave one region, while it's counted; see `Contribution`."""

    num_steps: int = 0
    num_microbatches: int = 0
    num_rows: int = 0
    weight: float = 0.0
    num_norms: int = 0
    norm_sum: float = 0.0
    square_sum: float = 0.0
    num_sealed: int = 0

    def of(self, class_name: str, region: str, total_norm: float) -> Contribution:
        """Return it, of a class and a region.

        Args:
            class_name: the class.
            region: the region.
            total_norm: of all classes in the region, see there.
        """
        return Contribution(
            class_name=class_name,
            region=region,
            num_steps=self.num_steps,
            num_microbatches=self.num_microbatches,
            num_rows=self.num_rows,
            weight=self.weight,
            num_norms=self.num_norms,
            norm_sum=math.nan if self.num_sealed and not self.num_norms else self.norm_sum,
            norm_rms=math.sqrt(self.square_sum / self.num_norms) if self.num_norms else None,
            norm_share=self.norm_sum / total_norm if total_norm > 0 else None,
            num_sealed=self.num_sealed,
        )


@dataclass(slots=True)
class _Sum(ContributionSum):
    last_step: int = -1

    def add(self, item: ScannedEntry, num_rows: int, weight: float, norm: float | None, *, is_sealed: bool) -> None:
        self.num_sealed += is_sealed
        self.num_steps += self.last_step != item.index
        self.last_step = item.index
        self.num_microbatches += 1
        self.num_rows += num_rows
        self.weight += weight
        if norm is not None:
            self.num_norms += 1
            self.norm_sum += norm
            self.square_sum += norm * norm


def contributions(directory: Path | VerifiedLedger, *, vkey: str | None = None) -> ContributionTable:
    """Return what each class gave each region over the steps that stand; `Contribution` says what it means.

    Raises:
        LedgerError: no ledger, an empty one, or no key. TamperError: the ledger doesn't verify, or its
        details don't follow the contract in `cosmati.records.ledger`.
    """
    ledger = _opened(directory, vkey)
    sums: dict[tuple[str, str], _Sum] = {(name, region): _Sum() for name in ledger.classes for region in ledger.regions}
    for item, entry, tables in ledger.steps():
        if item.index not in ledger.standing:
            continue
        norms, hidden = ledger.norms(item, entry, tables)
        weights = learnt_weights(item, entry, len(tables.regions))
        for number, cell in enumerate(entry.microbatches):
            name, row = tables.class_of(cell, item), norms.get(number)
            for column, rho in enumerate(tables.route(cell, item)):
                if rho > 0 and (weight := weights[number][column]):
                    norm = None if row is None else row[column]
                    one = sums[name, tables.regions[column]]
                    one.add(item, cell.num_rows, rho * weight, norm, is_sealed=number in hidden)
    totals = {region: total_norm(sums[name, region] for name in ledger.classes) for region in ledger.regions}
    return ContributionTable(
        origin=ledger.key.name,
        tree_size=ledger.head.size,
        root=ledger.head.root.hex(),
        evidence_level=ledger.evidence_level,
        num_steps=len(ledger.standing),
        classes=ledger.classes,
        regions=ledger.regions,
        cells=tuple(one.of(name, region, totals[region]) for (name, region), one in sums.items()),
    )


def total_norm(sums: Iterable[ContributionSum]) -> float:
    """Return the total of a region's norms; NaN, of which there's no share, where any of them is sealed."""
    known = list(sums)
    return math.nan if any(one.num_sealed for one in known) else sum(one.norm_sum for one in known)


def regions_of_class(
    directory: Path | VerifiedLedger, class_name: str, *, vkey: str | None = None
) -> tuple[Contribution, ...]:
    """Return the regions that rows of a class reached, those of several classes among them; see `contributions`."""
    table = contributions(directory, vkey=vkey)
    require(table.classes, class_name, "class")
    own = {class_name, *(name for name in table.classes if class_name in members_of(name))}
    return tuple(c for c in table.cells if c.class_name in own and c.num_microbatches)


def classes_of_region(
    directory: Path | VerifiedLedger, region: str, *, vkey: str | None = None
) -> tuple[Contribution, ...]:
    """Return the classes whose rows reached a region; see `contributions`."""
    table = contributions(directory, vkey=vkey)
    require(table.regions, region, "region")
    return tuple(c for c in table.cells if c.region == region and c.num_microbatches)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step that stands.

    Attributes:
        step: Its number.
        class_names: The class of each microbatch that has rows.
        norms: Sum of the logged gradient norms by class and region; those that are sealed are left out.
    """

    step: int
    class_names: tuple[str, ...]
    norms: Mapping[tuple[str, str], float]


def logged_steps(directory: Path | VerifiedLedger, *, vkey: str | None = None) -> Iterator[LoggedStep]:
    """Yield the steps that stand, in order.

    Raises:
        LedgerError, TamperError: as for `contributions`.
    """
    ledger = _opened(directory, vkey)
    for item, entry, tables in ledger.steps():
        if item.index not in ledger.standing:
            continue
        norms: dict[tuple[str, str], float] = {}
        rows, _ = ledger.norms(item, entry, tables)
        names = [tables.class_of(cell, item) for cell in entry.microbatches]
        for number, name in enumerate(names):
            for region, norm in zip(tables.regions, rows.get(number, ()), strict=False):
                if norm is not None:
                    key = name, region
                    norms[key] = norms.get(key, 0.0) + norm
        seen = tuple(name for name, cell in zip(names, entry.microbatches, strict=True) if cell.num_rows)
        yield LoggedStep(entry.step, seen, norms)


def direct_write_exclusion(
    directory: Path | VerifiedLedger,
    class_name: str,
    region: str,
    *,
    vkey: str | None = None,
    witnesses: TrustedEvidence = NOBODY,
) -> ExclusionStatement:
    """Scan the whole ledger and state that no step gave rows of the class weight in the region.

    Raises:
        LedgerError, RefutedError, TamperError: as for `direct_write_exclusions`.
    """
    return direct_write_exclusions(directory, [(class_name, region)], vkey=vkey, witnesses=witnesses)[0]


def direct_write_exclusions(
    directory: Path | VerifiedLedger,
    pairs: Sequence[tuple[str, str]],
    *,
    vkey: str | None = None,
    witnesses: TrustedEvidence = NOBODY,
) -> tuple[ExclusionStatement, ...]:
    """Scan the whole ledger once, and state of each class and region that no step gave such rows weight there.

    A `VerifiedLedger` has been asked for a key and for witnesses already: `vkey` and `witnesses` are for a directory.

    Raises:
        LedgerError: no ledger, an empty one, or no such class or region. RefutedError: a logged step (a superseded
        one too) did, or logged a gradient where its route gave no weight. TamperError: the ledger doesn't verify.
    """
    if isinstance(directory, VerifiedLedger):
        return exclusions(directory.directory, directory.key, directory.head, directory.witnessing, pairs)
    key = read_verifier_key(directory, vkey)
    witnessing = Witnessing(directory, witnesses)
    return exclusions(directory, key, read_head(directory, key), witnessing, pairs)
