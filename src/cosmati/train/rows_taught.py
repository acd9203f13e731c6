"""Which regions some rows taught, and at which steps: the ledger's cells, and the rows that it commits to in them.

A ledger holds no rows. Which they were follows from the data and their order, so the run's own trainer is asked for
each step's rows again; that they are the ones that took part is compared with the ledger's commitments. Who holds the
run's row keys (`private/rows.keys`, or its salt) can do that, and nobody else; nobody of rows whose keys are gone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cosmati.core.batch import Batch
from cosmati.core.method import Stage
from cosmati.data.graded import SourceKind
from cosmati.data.people import ChosenRows
from cosmati.errors import LedgerError
from cosmati.ledger.details import decode_details
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import ScannedEntry
from cosmati.ledger.row_secrets import RowsAt, RowSecrets, commit, open_secrets
from cosmati.ledger.step_details import learnt_weights
from cosmati.ledger.tables import Tables
from cosmati.records.ledger import MicrobatchCell, StepEntry
from cosmati.routing.starvation import SaidKind
from cosmati.train.cutting import piece_of
from cosmati.train.lifecycle import Lifecycle
from cosmati.train.observers.pack_cells import documents_in, present
from cosmati.train.observers.row_leaves import documents_among, rows_in


@dataclass(frozen=True)
class RegionTaught:
    """What some rows taught a region, in the steps that stand.

    Attributes:
        region: its name.
        steps: at which they reached it, rising.
        num_rows: how many of them did, of packs documents; a row counts at each visit.
        num_unopened: microbatches among them whose commitment can't be compared with the rows alone, since a method has
            mixed them or cut them up, or rows were forgotten. They're counted as if all of their rows took part.
    """

    region: str
    steps: tuple[int, ...]
    num_rows: int
    num_unopened: int


def regions_taught_by(trainer: Lifecycle, chosen: ChosenRows, *, vkey: str | None = None) -> tuple[RegionTaught, ...]:
    """Return which regions some rows taught, and at which steps.

    Args:
        trainer: made as the run's own was, with its folder and its data in order. It needn't have trained.
        chosen: which rows (`rows_by`).
        vkey: the operator's verifier key from a source that you trust.

    Raises:
        LedgerError: the run has no ledger or row keys, its data have no order that can be asked again, or their rows
            aren't those that the ledger commits to.
        TamperError: the ledger doesn't verify.
    """
    folder = trainer.assembly.config.run_folder
    if folder is None or not (folder / "ledger").is_dir() or not (folder / "private" / "rows.salt").is_file():
        msg = (
            "Which rows taught what is asked of a run's ledger and of its private/rows.keys and rows.salt, which only "
            f"the operator has; and {folder} doesn't have both. Give the run's own run_folder."
        )
        raise LedgerError(msg)
    ledger = VerifiedLedger(folder / "ledger", vkey)
    again = _Again(trainer, open_secrets(folder / "private", ledger.key.name), chosen)
    steps, rows, unopened = defaultdict[str, list[int]](list), Counter[str](), Counter[str]()
    for item, entry, tables in ledger.steps():
        if item.index not in ledger.standing:
            continue
        weights = learnt_weights(item, entry, len(tables.regions))
        for number, num_chosen, is_opened in again.cells(item, entry, tables):
            for column, rho in enumerate(tables.route(entry.microbatches[number], item)):
                if num_chosen and rho > 0 and weights[number][column]:
                    region = tables.regions[column]
                    steps[region] += [] if entry.step in steps[region][-1:] else [entry.step]
                    rows[region] += num_chosen
                    unopened[region] += not is_opened
    return tuple(
        RegionTaught(one, tuple(steps[one]), rows[one], unopened[one]) for one in ledger.regions if one in rows
    )


class _Again:
    """The rows of a run's steps, once more."""

    def __init__(self, trainer: Lifecycle, secrets: RowSecrets, chosen: ChosenRows) -> None:
        plan, policy = trainer.assembly.plan, trainer.assembly.policy
        self._classes = [] if policy is None else [policy.classes[own] for own in trainer.prepared.class_map]
        said = getattr(trainer.prepared.given.data, "row_kinds", ())
        self._kinds: Sequence[SaidKind] = said or (SourceKind(),) * len(self._classes)
        self._feed, self._num_microbatches = trainer.feed, trainer.assembly.num_microbatches
        self._secrets, self._rows = secrets, chosen.row_ids
        self._documents = {(pack, row) for pack, row in chosen.documents.tolist()}
        # What they make of rows isn't known without the model, or their own code.
        self._changes_rows = any(
            method.stage in (Stage.MIX, Stage.SHAPE) or not type(method).__module__.startswith("cosmati.methods.")
            for method in plan.with_hook("batch")
        )

    def cells(self, item: ScannedEntry, entry: StepEntry, tables: Tables) -> Iterator[tuple[int, int, bool]]:
        """Yield a step's cells that have rows: index, how many chosen rows took part, and whether that was compared.

        Raises:
            LedgerError: they aren't the rows that the ledger commits to.
        """
        details: Mapping[str, Any] = decode_details(item.details) if item.details is not None else {}
        owners = details.get("cell_microbatches")
        numbers = list(range(len(entry.microbatches))) if owners is None else owners
        microbatches = self._given(entry.step, max(numbers) + 1)
        for number, m in enumerate(numbers):
            cell, batch = entry.microbatches[number], microbatches[m]
            if not cell.num_rows:
                continue
            slots, has_gaps = details.get("kept_rows", {}).get(str(m)), batch.present is not None
            if slots is not None:
                batch = batch.select(torch.tensor(slots))
            is_pack = owners is not None and batch.lineage.token_class_ids is not None
            name = tables.class_of(cell, item)
            took_part = (
                self._of_cell(batch, self._ids_of(cell, item, tables), entry.step, m, name)
                if is_pack
                else rows_in(batch, entry.step, m, name)
            )
            blinds = self._secrets.blinds(took_part) or []
            is_opened = commit(took_part, blinds) == cell.row_commitment
            is_told = not self._changes_rows and not (slots is not None and has_gaps) and None not in blinds
            if is_told and not is_opened:
                msg = (
                    f"The rows of microbatch {m} of step {entry.step} aren't those that the ledger commits to: other "
                    "data, another order, or other row keys. Make the trainer as the run's own was, with its own data."
                )
                raise LedgerError(msg)
            yield number, self._num_chosen(batch, took_part, is_pack), is_opened

    def _given(self, step: int, num_microbatches: int) -> Sequence[Batch]:
        """Return a step's microbatches as the data give them, cut into as many pieces as the step had."""
        found = () if self._feed is None else self._feed.again(step)
        if not found:
            msg = (
                f"The rows of step {step} can't be had again: only a Source is read by position, and a list of batches "
                "in its first pass. Which rows a loader gave is nowhere."
            )
            raise LedgerError(msg)
        pieces = num_microbatches // self._num_microbatches
        return [piece_of(batch, k, pieces) for k in range(pieces) for batch in found] if pieces > 1 else found

    def _ids_of(self, cell: MicrobatchCell, item: ScannedEntry, tables: Tables) -> list[int]:
        """Return the class ids in packs of which a cell is, by the tables in force: kinds have other numbers later."""
        name, own = tables.class_of(cell, item), zip(self._classes, self._kinds, strict=True)
        if tables.bands == ("",):
            return [index for index, (one, _) in enumerate(own) if one == name]
        band, grades = tables.kinds[cell.band] if tables.kinds else (cell.band, {})
        has_bands = not tables.kinds or any(number for number, _ in tables.kinds)
        return [
            index
            for index, (one, kind) in enumerate(own)
            if one == name
            and (kind.band == band or not has_bands)
            and all(dict(kind.grades).get(measure, "") == grade for measure, grade in grades.items())
        ]

    @staticmethod
    def _of_cell(batch: Batch, class_ids: Sequence[int], step: int, m: int, name: str) -> RowsAt:
        ids, classes = documents_in(batch)
        return documents_among(ids, np.isin(classes, class_ids) & present(batch, ids), step, m, name)

    def _num_chosen(self, batch: Batch, took_part: RowsAt, is_pack: bool) -> int:
        """Count whole rows, and documents of packs, that were chosen."""
        pairs = took_part.ids if is_pack else documents_in(batch)[0]
        num_documents = sum((pack, row) in self._documents for pack, row in pairs.tolist())
        own = np.isin(took_part.ids[:, 0], self._rows)
        return num_documents + (0 if is_pack else int(own.sum()))
