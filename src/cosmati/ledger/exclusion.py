"""The direct-write exclusion statement: a complete scan of the signed entries, and nothing less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cosmati.errors import LedgerError, RefutedError
from cosmati.ledger.columns import ColumnScan, StepBlock
from cosmati.ledger.evidence import Witnessing
from cosmati.ledger.note import TreeHead, VerifierKey
from cosmati.ledger.reader import operators
from cosmati.ledger.step_details import BlockDetails, read_details
from cosmati.ledger.tables import Tables
from cosmati.records.joint_classes import ids_with, members_of


@dataclass(frozen=True, slots=True)
class ExclusionStatement:
    """No logged step gave rows tagged with the class any weight in the region: superseded steps included.

    It is about direct writes. It doesn't say that the class had no influence on the region, nor that rows
    were tagged rightly.

    Attributes:
        class_name: The class.
        region: The region.
        origin: The log's name.
        tree_size: Entries that were scanned, all of the tree.
        root: Root hash, 64 hexadecimal digits.
        num_steps_scanned: Step entries among them.
        num_steps_without_region: Steps among them under tables that have no region of this name. Nothing is stated of
            what their tables call the same parameters.
        num_class_microbatches: Microbatches of the class among them.
        policy_digests: Digests of the policies in force, in hexadecimal, in the order of their first step.
        evidence_level: What the statement shows at most.
    """

    class_name: str
    region: str
    origin: str
    tree_size: int
    root: str
    num_steps_scanned: int
    num_steps_without_region: int
    num_class_microbatches: int
    policy_digests: tuple[str, ...]
    evidence_level: str


def exclusions(
    directory: Path, key: VerifierKey, head: TreeHead, witnessing: Witnessing, pairs: Sequence[tuple[str, str]]
) -> tuple[ExclusionStatement, ...]:
    """State of each class and region that no step under a verified head gave such rows weight there.

    Raises:
        LedgerError, RefutedError, TamperError: as for `query.direct_write_exclusions`.
    """
    if head.size == 0:
        raise LedgerError(f"The ledger {directory} is empty. Query it once the run has begun.")
    scan, looking = ColumnScan(directory, head, witnessing.heads), _Looking(pairs)
    for one in scan.blocks():
        if isinstance(one, StepBlock):
            looking.take(one)
        else:
            assert scan.tables is not None, "the columns of a run follow its tables"
            looking.name(scan.tables)
    witnessing.check(operators(scan.history, key))
    for class_name, region in pairs:
        _require(looking.classes, class_name, "class")
        _require(looking.regions, region, "region")
    if looking.found:
        mend = "How much there was: cosmati ledger query RUN with --class or --region alone."
        raise RefutedError(f"The statement is false: {looking.found}. {mend}")
    return tuple(
        ExclusionStatement(
            class_name=class_name,
            region=region,
            origin=key.name,
            tree_size=head.size,
            root=head.root.hex(),
            num_steps_scanned=looking.num_steps[""],
            num_steps_without_region=looking.num_steps[""] - looking.num_steps[region],
            num_class_microbatches=looking.num_cells[class_name],
            policy_digests=tuple(looking.policies),
            evidence_level=witnessing.level(head.size),
        )
        for class_name, region in pairs
    )


def _require(names: dict[str, None], name: str, kind: str) -> None:
    if name not in names:
        raise LedgerError(f"The ledger has no {kind} {name!r}. It has {', '.join(names)}.")


@dataclass(slots=True)
class _Looking:
    """What was seen so far; `found` is the first write that makes a statement false."""

    pairs: Sequence[tuple[str, str]]
    found: str = ""
    num_steps: Counter[str] = field(default_factory=Counter)
    num_cells: Counter[str] = field(default_factory=Counter)
    policies: dict[str, None] = field(default_factory=dict)
    classes: dict[str, None] = field(default_factory=dict)
    regions: dict[str, None] = field(default_factory=dict)

    def name(self, tables: Tables) -> None:
        """Take note of the names in force from here on."""
        self.classes |= dict.fromkeys(tables.classes)
        self.regions |= dict.fromkeys(tables.regions)

    def take(self, block: StepBlock) -> None:
        """Look at a block of steps."""
        tables, ids = block.tables, block.cells["class_id"]
        for name in ("", *tables.regions):
            self.num_steps[name] += len(block.data)
        self.policies[block.policy.hex()] = None
        for class_id, num in enumerate(np.bincount(ids.ravel()).tolist()):
            for name in {tables.classes[class_id], *members_of(tables.classes[class_id])}:
                self.num_cells[name] += num
        told = read_details(block)  # of all steps: what breaks the contract is no ground for a statement
        asked = [(own, r) for c, r in self.pairs if r in tables.regions and (own := ids_with(tables.classes, c))]
        if not self.found and asked:
            self._search(block, told, asked)

    def _search(self, block: StepBlock, told: BlockDetails, asked: Sequence[tuple[list[int], str]]) -> None:
        """Find the first microbatch that wrote: with a weight above 0, or with a gradient that it shouldn't have."""
        writes = told.reached(block)
        if told.norms is not None:
            writes |= np.nan_to_num(told.norms) > 0
        firsts = []
        for class_ids, region in asked:
            column = block.tables.regions.index(region)
            hits = np.flatnonzero((writes[..., column] & np.isin(block.cells["class_id"], class_ids)).ravel())
            if len(hits):
                firsts.append((int(hits[0]), column))
        if not firsts:
            return
        place, column = min(firsts)
        number, cell = divmod(place, block.cells.shape[1])
        item, entry = block.item(number)
        one, norm = entry.microbatches[cell], np.nan if told.norms is None else told.norms[number, cell, column]
        self.found = (
            f"entry {item.index} (step {entry.step}), microbatch {cell}, gave rows of "
            f"{block.tables.classes[one.class_id]!r} weight {block.tables.route(one, item)[column]} in "
            f"{block.tables.regions[column]!r} (gradient norm {None if np.isnan(norm) else float(norm)})"
        )
