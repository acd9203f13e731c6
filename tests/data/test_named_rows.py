"""Rows by their ids and columns against a reading of them one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cosmati.data.named_rows import read_ids, rows_where, rows_with_ids
from cosmati.data.shards.dataset import write_dataset
from cosmati.data.streaming import StreamingDataset
from cosmati.errors import DataError

ROWS = [
    {"text": f"row {number}", "path": f"{number % 3}.txt", "annotator": "ada" if number % 2 else "bob"}
    for number in range(20)
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> StreamingDataset:
    folder = tmp_path_factory.mktemp("rows") / "out"
    write_dataset(ROWS, folder, dict.fromkeys(ROWS[0], "str"), class_of="open/x", source="s", size_limit=300)
    return StreamingDataset(folder)


def test_rows_are_those_whose_column_says_so(dataset: StreamingDataset) -> None:
    for field, value in (("path", "1.txt"), ("annotator", "ada"), ("text", "row 7"), ("path", "absent")):
        expected = [n for n, row in enumerate(ROWS) if row[field] == value]
        found = rows_where(dataset, field, value)
        assert found.row_ids.tolist() == expected
        assert found.documents.shape == (0, 2)
    with pytest.raises(DataError, match=r"no column 'size'. They have .*path"):
        rows_where(dataset, "size", "1")


def test_rows_are_those_of_the_ids(dataset: StreamingDataset, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("7\n\n 3 \n19\n7\n")
    assert rows_with_ids(dataset, read_ids(tmp_path / "ids.txt")).row_ids.tolist() == [3, 7, 19]
    assert rows_with_ids(dataset, []).row_ids.tolist() == []
    with pytest.raises(DataError, match=r"no row 20, 21, 22 and others"):
        rows_with_ids(dataset, [1, *range(20, 30)])
    for wrong in ("x", "-1", "1.5", "٣", str(1 << 63)):
        (tmp_path / "ids.txt").write_text(f"1\n{wrong}\n")
        with pytest.raises(DataError, match="line 2"):
            read_ids(tmp_path / "ids.txt")
    with pytest.raises(DataError, match="can't be read"):
        read_ids(tmp_path)


def test_the_documents_of_packs_are_named_by_the_rows_that_were_packed() -> None:
    spans = {0: [[4, 0], [2, 5]], 1: [[9, 0]]}

    class Packs:
        def ids_where(self, asks: object) -> np.ndarray:
            columns = {"spans": [np.asarray(one) for one in spans.values()]}
            rows = type(
                "Rows", (), {"row_ids": np.asarray([*spans]), "columns": columns, "__len__": lambda _: len(spans)}
            )()
            return np.flatnonzero(asks(rows))  # type: ignore[operator]

    found = rows_with_ids(Packs(), [2, 9])  # type: ignore[arg-type]
    assert found.row_ids.tolist() == []
    assert found.documents.tolist() == [[0, 2], [1, 9]]
    with pytest.raises(DataError, match="no row 0"):
        rows_with_ids(Packs(), [0])  # type: ignore[arg-type]
