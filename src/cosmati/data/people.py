"""Which rows of a data set somebody has labelled or rated: whole rows, and documents within packs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cosmati.data.ingest.people import PEOPLE
from cosmati.data.rows import RowBatch
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError


@dataclass(frozen=True)
class ChosenRows:
    """Rows, and documents of packs.

    Attributes:
        row_ids: of whole rows, int64 [rows].
        documents: of packs, id of the pack and of the row that was packed, int64 [documents, 2].
    """

    row_ids: NDArray[np.int64]
    documents: NDArray[np.int64]


def rows_by(dataset: StreamingDataset, field: str, who: str | int) -> ChosenRows:
    """Return the rows that somebody has labelled or rated; each row of the data is read once.

    Args:
        dataset: with columns as `data write` makes them.
        field: `annotator`, `label_function` or `rater`.
        who: the id.

    Raises:
        DataError: no source has such a field, or a row can't be read.
    """
    if field not in PEOPLE:
        raise DataError(f"{field!r} is none of {', '.join(PEOPLE)}.")
    documents, has_field = list[tuple[int, int]](), False

    def is_theirs(rows: RowBatch) -> NDArray[np.bool_]:
        nonlocal has_field
        found = np.zeros(len(rows), bool)
        if field in rows.columns:
            has_field = True
            found |= np.asarray([str(one) == str(who) for one in rows.columns[field]], bool)
        if "people" in rows.columns:
            parts = zip(rows.row_ids.tolist(), rows.columns["people"], rows.columns["spans"], strict=True)
            for pack, people, spans in parts:
                has_field |= any(field in one for one in people)
                theirs = [str(one.get(field)) == str(who) for one in people]
                documents.extend((pack, int(row)) for row, own in zip(spans[:, 0], theirs, strict=True) if own)
        return found

    row_ids = dataset.ids_where(is_theirs)
    if not has_field:
        raise DataError(f"The data have no {field}: no column, and none of a pack's documents. Write it with the rows.")
    return ChosenRows(row_ids, np.asarray(documents, np.int64).reshape(-1, 2))
