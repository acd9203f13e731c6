"""Which rows of a data set are meant: by their ids, or by what a column says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cosmati.data.ingest.people import PEOPLE
from cosmati.data.people import ChosenRows, rows_by
from cosmati.data.rows import RowBatch
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError

_NAMED = 3


def rows_where(dataset: StreamingDataset, field: str, value: str) -> ChosenRows:
    """Return the rows whose column says a value; each row of the data is read once.

    Args:
        dataset: with columns as `data write` makes them.
        field: a column; or `annotator`, `label_function` or `rater`, which documents of packs have, too.
        value: compared as text.

    Raises:
        DataError: the data have no such column, or a row can't be read.
    """
    if field in PEOPLE:
        return rows_by(dataset, field, value)
    seen = dict[str, None]()

    def says(rows: RowBatch) -> NDArray[np.bool_]:
        seen.update(dict.fromkeys(rows.columns))
        return np.asarray([str(one) == value for one in rows.columns.get(field, [None] * len(rows))], bool)

    found = dataset.ids_where(says)
    if field not in seen:
        raise DataError(f"The data have no column {field!r}. They have {', '.join(seen) or 'none'}.")
    return ChosenRows(found, np.empty((0, 2), np.int64))


def rows_with_ids(dataset: StreamingDataset, ids: Iterable[int]) -> ChosenRows:
    """Return rows by their ids: of packs, the documents that were packed from these; each row of the data is read once.

    Raises:
        DataError: there's no row of such an id, or a row can't be read.
    """
    wanted = np.unique(np.asarray(list(ids), np.int64))
    documents, found = list[tuple[int, int]](), set[int]()

    def is_wanted(rows: RowBatch) -> NDArray[np.bool_]:
        if "spans" not in rows.columns:
            chosen = np.isin(rows.row_ids, wanted)
            found.update(np.asarray(rows.row_ids)[chosen].tolist())
            return chosen
        for pack, spans in zip(rows.row_ids.tolist(), rows.columns["spans"], strict=True):
            inside = spans[:, 0][np.isin(spans[:, 0], wanted)].tolist()
            documents.extend((pack, int(row)) for row in inside)
            found.update(inside)
        return np.zeros(len(rows), bool)

    row_ids = dataset.ids_where(is_wanted)
    if missing := [one for one in wanted.tolist() if one not in found]:
        named = ", ".join(map(str, missing[:_NAMED]))
        raise DataError(f"The data have no row {named}{' and others' * (len(missing) > _NAMED)}. Rows count from 0.")
    return ChosenRows(row_ids, np.asarray(documents, np.int64).reshape(-1, 2))


def read_ids(path: Path) -> list[int]:
    """Return the row ids of a file, one a line; empty lines mean nothing.

    Raises:
        DataError: the file can't be read, or a line is no id.
    """
    found = list[int]()
    try:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if text := line.strip():
                if not (text.isascii() and text.isdigit() and int(text) < 1 << 63):
                    raise DataError(f"{path}, line {number}: {text!r:.40} is no row id. Write one whole number a line.")
                found.append(int(text))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The row ids in {path} can't be read: {error}. Give a text file with an id a line.") from error
    return found
