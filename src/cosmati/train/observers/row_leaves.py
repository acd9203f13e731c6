"""The rows of a microbatch that took part, as a ledger commits to them: whole rows, or documents of packs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.core.lineage import Lineage
from cosmati.ledger.row_secrets import RowsAt


def rows_in(batch: Batch, step: int, microbatch: int, class_name: str) -> RowsAt:
    """Return the rows that took part, tombstones left out; all are of one class.

    Args:
        batch: as the methods have left it.
        step: number of the step.
        microbatch: its index in the step.
        class_name: of its cell.
    """
    lineage = batch.lineage
    ids = (lineage.row_ids[:, None] if lineage.parents is None else lineage.parents).numpy()
    slots = np.flatnonzero(ids[:, 0] != TOMBSTONE)
    contents = None if lineage.digests is None else lineage.digests.numpy()[slots]
    return RowsAt(step, microbatch, class_name, slots, ids[slots], contents, _owners(lineage, slots))


def documents_among(
    ids: NDArray[np.int64], takes_part: NDArray[np.bool_], step: int, microbatch: int, class_name: str
) -> RowsAt:
    """Return the documents of one class that took part.

    Args:
        ids: of pack and row of each document, [documents, 2].
        takes_part: bool [documents].
        step: number of the step.
        microbatch: its index in the step.
        class_name: of its cell.
    """
    own = ids[takes_part]
    owners = np.where(own[:, 1] == TOMBSTONE, own[:, 0], own[:, 1])[:, None]  # the pack, where nobody knows the row
    return RowsAt(step, microbatch, class_name, np.flatnonzero(takes_part), own, owners=owners)


def _owners(lineage: Lineage, slots: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the rows that were packed into each row, in rising order after those that fill up; None for other rows."""
    if lineage.token_row_ids is None:
        return None
    rows = np.sort(lineage.token_row_ids.numpy()[slots], axis=1)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = TOMBSTONE
    rows.sort(axis=1)
    return rows[:, (rows >= 0).any(axis=0).argmax() :] if rows.size else rows[:, :1]
