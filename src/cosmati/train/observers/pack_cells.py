"""A step's cells: one for each microbatch, or of packs for each class and kind that it has tokens of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.ledger.row_secrets import RowsAt
from cosmati.records.ledger import DIGEST_SIZE, MicrobatchCell
from cosmati.train.observers.row_leaves import documents_among
from cosmati.train.outcome import StepOutcome
from cosmati.train.routes import Route

_WIDTH = DIGEST_SIZE + 2
"""Columns of a cell: commitment to its documents, how many took part, and whether there are any."""


def are_packs(routes: Sequence[Route]) -> bool:
    """Say whether some of a step's microbatches are routed by token."""
    return any(route.tokens is not None for route in routes)


def class_columns(
    batch: Batch,
    routes: Sequence[Route],
    commit: Callable[[RowsAt], bytes],
    names: Sequence[str],
    step: int,
    m: int,
) -> list[int]:
    """Return what a microbatch's cells are made from, [cells * _WIDTH]; zeros where rows aren't packs.

    A document's leaf has two ids, of its pack and of the row that it was packed from, and no content: a pack's digest
    would tell of all its documents. Blinds are numbered by document, in order.

    Args:
        batch: as the methods have left it.
        routes: of the step's microbatches, some of packs.
        commit: gives the commitment to documents.
        names: of the policy's classes.
        step: number of the step.
        m: number of the microbatch.
    """
    route, groups = routes[m], next(r.tokens.groups for r in routes if r.tokens is not None)
    if route.tokens is None:
        return [0] * (_WIDTH * len(groups))
    ids, classes = documents_in(batch)
    columns: list[int] = []
    for (policy_class, _, _), own in groups.items():
        is_there = np.isin(classes, own)
        takes_part = is_there & present(batch, ids) & (route.offered and not {*own} & {*route.tokens.withheld})
        commitment = commit(documents_among(ids, takes_part, step, m, names[policy_class]))
        columns += [*commitment, int(takes_part.sum()), int(is_there.any())]
    return columns


def present(batch: Batch, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which documents are there, bool [documents]; the others are tombstones, which keep their class.

    Args:
        batch: whose they are.
        ids: of pack and row, as `documents_in` gives them.
    """
    are_known = batch.lineage.token_row_ids is not None
    return ids[:, 1] != TOMBSTONE if are_known else np.ones(len(ids), bool)


def documents_in(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pack and row of each document [documents, 2], and its class [documents], in order; none of other rows."""
    lineage = batch.lineage
    if lineage.token_class_ids is None:
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    classes = lineage.token_class_ids.numpy()
    rows = np.full_like(classes, TOMBSTONE) if lineage.token_row_ids is None else lineage.token_row_ids.numpy()
    begins = np.ones(classes.shape, bool)
    begins[:, 1:] = (classes[:, 1:] != classes[:, :-1]) | (rows[:, 1:] != rows[:, :-1])
    packs = np.broadcast_to(lineage.row_ids.numpy()[:, None], classes.shape)
    first = begins & (classes != TOMBSTONE) & (packs != TOMBSTONE)
    return np.stack([packs[first], rows[first]], axis=1), classes[first]


def cell_of(outcome: StepOutcome, table: Tensor, m: int) -> MicrobatchCell:
    """Return the cell of a microbatch; the table has a commitment and a band for each."""
    *rows, band = table[m].tolist()
    if outcome.weights is None or outcome.num_rows is None:
        num_rows = outcome.batches[0].num_rows
        return MicrobatchCell(0, band, 0, 0, num_rows, float(num_rows), bytes(rows))
    route, weight, num = outcome.routes[m], outcome.weights[m].item(), int(outcome.num_rows[m].item())
    return MicrobatchCell(route.class_id, route.kind, route.phase, route.id, num, float(weight), bytes(rows))


class PackedCell(NamedTuple):
    """A cell of a step with packs.

    Attributes:
        microbatch: of which it is.
        share: of that one's weight.
        cell: as the entry has it.
    """

    microbatch: int
    share: float
    cell: MicrobatchCell


def packed_cells(outcome: StepOutcome, pure: Callable[[int], MicrobatchCell], columns: Tensor) -> list[PackedCell]:
    """Return a step's cells, in the order of its microbatches.

    Args:
        outcome: of the step.
        pure: gives the cell of a microbatch whose rows aren't packs.
        columns: `class_columns` of each.
    """
    found: list[PackedCell] = []
    for m, route in enumerate(outcome.routes):
        if route.tokens is None:
            found.append(PackedCell(m, 1.0, pure(m)))
            continue
        labels = torch.zeros(len(route.tokens.cells)) if outcome.labels is None else outcome.labels[m].cpu()
        weight = 0.0 if outcome.weights is None else float(outcome.weights[m])
        for index, ((policy_class, kind, route_id), own) in enumerate(route.tokens.groups.items()):
            *digest, number, is_there = columns[m, index * _WIDTH : (index + 1) * _WIDTH].tolist()
            if is_there:
                share = float(labels[own].sum() / labels.sum().clamp(min=1)) if number else 0.0
                told = policy_class, kind, route.phase, route_id, number, weight * share, bytes(digest)
                found.append(PackedCell(m, share, MicrobatchCell(*told)))
    return found


def by_cell(details: Mapping[str, Any], cells: Sequence[PackedCell]) -> dict[str, Any]:
    """Return a step's details, with the weights of its sub-steps by cell, and whose the cells are."""
    told = dict(details) | {"cell_microbatches": [one.microbatch for one in cells]}
    if "sub_steps" in details:
        told["sub_steps"] = [
            one | {"weights": [one["weights"][own.microbatch] * own.share for own in cells]}
            for one in details["sub_steps"]
        ]
    return told
