"""Real `datasets` objects, offline: in memory, from Arrow files, as iterables; and the way back."""

from __future__ import annotations

import datetime
import hashlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.data.ingest import Rows, read_hugging_face, read_jsonl, to_hugging_face
from cosmati.data.shards.encodings import encoding
from cosmati.errors import DataError, MissingExtraError

datasets = pytest.importorskip("datasets", reason="the extra `llm` isn't installed")
import pyarrow as pa  # noqa: E402  (comes with datasets)
from datasets import Array2D, ClassLabel, Dataset, Features, Image, List, Value  # noqa: E402

pytestmark = pytest.mark.long

FEATURES = Features(
    {
        "text": Value("string"),
        "large": Value("large_string"),
        "raw": Value("binary"),
        "small": Value("uint8"),
        "half": Value("float32"),
        "truth": Value("bool"),
        "label": ClassLabel(names=["no", "yes"]),
        "tokens": List(Value("uint16")),
        "fixed": List(Value("int32"), length=2),
        "truths": List(Value("bool")),
        "grid": Array2D((2, 3), "int8"),
        "image": Image(),
        "names": List(Value("string")),
        "record": {"x": Value("int32"), "y": List({"z": Value("float64")})},
    }
)


def row(number: int) -> dict[str, Any]:
    return {
        "text": f"row {number} \u20ac",
        "large": "l" * number,
        "raw": bytes([number, 0, 255]),
        "small": number,
        "half": number / 4,
        "truth": number % 2 == 0,
        "label": number % 2,
        "tokens": list(range(1, number + 2)),
        "fixed": [number, -number],
        "truths": [True, False],
        "grid": [[number, 1, 2], [3, 4, 5]],
        "image": {"bytes": b"\x89PNG" + bytes([number]), "path": None},
        "names": ["a", None][: number % 3],
        "record": {"x": None, "y": [{"z": 0.5}]},
    }


ROWS = [row(number) for number in range(20)]
ENCODINGS = {
    "text": "str",
    "large": "str",
    "raw": "bytes",
    "small": "uint8",
    "half": "float32",
    "truth": "uint8",
    "label": "int64",
    "tokens": "ndarray:uint16",
    "fixed": "ndarray:int32:2",
    "truths": "ndarray:uint8",
    "grid": "ndarray:int8:2,3",
    "image": "bytes",
    "names": "json",
    "record": "json",
}


@pytest.fixture
def dataset() -> Any:
    return Dataset.from_dict({name: [r[name] for r in ROWS] for name in FEATURES}, features=FEATURES)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Undo what the reader is to do, without its code."""
    found = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
    found["truth"] = bool(found["truth"])
    found["truths"] = [bool(value) for value in found["truths"]]
    found["image"] = {"bytes": found["image"], "path": None}
    return {name: value for name, value in found.items() if not name.startswith("origin_")}


def read(dataset: Any, **changes: Any) -> Rows:
    return read_hugging_face(dataset, **{"name": "made/up, train", "class_of": "unknown", **changes})


def test_every_kind_of_column(dataset: Any) -> None:
    rows = read(dataset)
    assert {name: e for name, e in rows.columns.items() if not name.startswith("origin_")} == ENCODINGS
    found = list(rows)
    assert [plain(row) for row in found] == ROWS
    assert [(row["origin_file"], row["origin_place"]) for row in found] == [("made/up, train", i) for i in range(20)]
    assert rows.label_names == {"label": ("no", "yes")}
    assert len({row["origin_sha256"] for row in found}) == 20
    for name, kind in rows.columns.items():
        stored = encoding(kind).encode(found[7][name])
        assert np.array_equal(encoding(kind).decode(memoryview(stored)), found[7][name]), name
        if kind.startswith("ndarray:"):
            assert found[7][name].dtype == np.dtype(kind.split(":")[1])


def test_arrow_files_iterables_formats_and_batches_give_the_same_rows(dataset: Any, tmp_path: Path) -> None:
    expected = [row["origin_sha256"] for row in read(dataset)]
    datasets.disable_progress_bars()
    dataset.save_to_disk(tmp_path / "saved")
    files = sorted((tmp_path / "saved").glob("*.arrow"))
    assert len(files) == 1
    others = [
        Dataset.from_file(str(files[0])),
        datasets.load_from_disk(str(tmp_path / "saved")),
        dataset.to_iterable_dataset(num_shards=3),
        dataset.with_format("numpy", columns=["tokens"]),
        datasets.concatenate_datasets([dataset.select(range(7)), dataset.select(range(7, 20))]),
        dataset.select_columns(list(reversed(dataset.column_names))),
    ]
    for other in others:
        rows = read(other)
        assert [row["origin_sha256"] for row in rows] == expected
        assert [file.sha256 for file in rows.files] == [hashlib.sha256(b"".join(expected)).hexdigest()]
    chosen = read(dataset.select([3, 1]), columns=["small"])
    assert [(row["small"], row["origin_place"]) for row in chosen] == [(3, 0), (1, 1)]


POISON = {
    "null": ({"x": Value("string")}, ["a", None, "c"], "column 'x' is null"),
    "null in a list": ({"x": List(Value("int8"))}, [[1], [None], [3]], "column 'x' is or holds a null"),
    "null list": ({"x": List(Value("int8"))}, [[1], None, [3]], "column 'x' is or holds a null"),
    "empty list": ({"x": List(Value("int8"))}, [[1], [], [3]], "column 'x' is an empty list"),
    "nan in json": ({"x": {"y": Value("float64")}}, [{"y": 1.0}, {"y": float("nan")}, {"y": 3.0}], "JSON"),
    "image gone": (
        {"x": Image()},
        [{"bytes": b"a"}, {"bytes": None, "path": "/none/such.png"}, {"bytes": b"c"}],
        "column 'x' holds no bytes, and its file can't be read",
    ),
}


@pytest.mark.parametrize("kind", POISON)
def test_poison_is_raised_with_row_and_reason_or_recorded(kind: str) -> None:
    features, values, reason = POISON[kind]
    dataset = Dataset.from_dict({"x": values}, features=Features(features))
    with pytest.raises(DataError, match="made/up, train, 1: ") as caught:
        list(read(dataset))
    assert reason in str(caught.value)
    rows = read(dataset, on_error="record")
    assert [row["origin_place"] for row in rows] == [0, 2]
    assert [(bad.file, bad.place) for bad in rows.skipped] == [("made/up, train", 1)]


def test_what_cannot_be_read_is_refused_at_once(dataset: Any) -> None:
    day = Dataset.from_dict({"t": [datetime.date(2020, 1, 1)], "n": [1]})
    with pytest.raises(DataError, match=r"column 't' is of the type .*date.*Cast it"):
        read(day)
    assert [row["n"] for row in read(day, columns=["n"])] == [1]
    with pytest.raises(DataError, match="Name one split"):
        read(datasets.DatasetDict({"train": dataset}))
    with pytest.raises(DataError, match="has no column nope"):
        read(dataset, columns=["nope"])
    with pytest.raises(DataError, match="taken by a row's origin"):
        read(Dataset.from_dict({"origin_file": ["a"]}))
    with pytest.raises(DataError, match="without features"):
        read(datasets.IterableDataset.from_generator(lambda: iter([{"a": 1}])))


def test_a_data_set_that_breaks_off_is_raised_or_recorded(dataset: Any) -> None:
    class Broken(datasets.IterableDataset):  # type: ignore[misc,name-defined]
        """Fails as a damaged file does, after its first batch."""

        features = Features({"n": Value("int64")})

        def __init__(self) -> None:
            """Needs nothing."""

        def select_columns(self, names: list[str]) -> Any:
            return self

        def with_format(self, kind: str) -> Any:
            return self

        def iter(self, batch_size: int) -> Any:
            yield pa.table({"n": [1, 2]})
            raise pa.ArrowInvalid("not an IPC message")

    with pytest.raises(DataError, match="train, 2: the data set is damaged at or after this row"):
        list(read(Broken()))
    rows = read(Broken(), on_error="record")
    assert [row["n"] for row in rows] == [1, 2]
    assert [bad.place for bad in rows.skipped] == [2]


@pytest.mark.parametrize("in_file", [False, True])
def test_there_and_back(in_file: bool, dataset: Any, tmp_path: Path) -> None:
    rows = read(dataset.remove_columns(["image"]))
    back = to_hugging_face(rows, path=tmp_path / "rows.arrow" if in_file else None)
    assert back.features["label"] == ClassLabel(names=["no", "yes"])
    assert back.features["grid"] == Array2D((2, 3), "int8")
    assert back.features["fixed"] == List(Value("int32"), length=2)
    assert back["record"][0] == {"x": None, "y": [{"z": 0.5}]}
    assert back["origin_place"][:] == list(range(20))
    again = list(read(back.remove_columns(["origin_file", "origin_place", "origin_sha256"])))
    for first, second in zip(rows, again, strict=True):
        assert first["origin_sha256"] == second["origin_sha256"]


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.text(st.characters(exclude_categories=["Cs"])),
                "raw": st.binary(),
                "n": st.integers(-(2**63), 2**63 - 1),
                "tokens": st.lists(st.integers(0, 2**32 - 1), min_size=1).map(lambda v: np.array(v, np.uint32)),
            }
        ),
        max_size=4,
    )
)
def test_any_rows_go_there_and_back(values: list[dict[str, Any]]) -> None:
    columns = {"text": "str", "raw": "bytes", "n": "int", "tokens": "ndarray:uint32"}
    found = list(read(to_hugging_face(values, columns)))
    assert len(found) == len(values)
    for given_row, row in zip(values, found, strict=True):
        assert all(np.array_equal(row[name], given_row[name]) for name in columns)


def test_from_a_reader_and_batches_of_several(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {n}, "m": [[{n}, 1]]}}\n' for n in range(600)))
    rows = read_jsonl(path, {"n": "int", "m": "ndarray:int64"}, class_of="unknown")
    found = to_hugging_face(rows, path=tmp_path / "rows.arrow")
    assert found["n"][:] == list(range(600))
    assert found["m"][599] == [[599, 1]]
    assert len(found["origin_sha256"][0]) == 32


def test_images_cast_to_images_decode() -> None:
    pillow = pytest.importorskip("PIL.Image", reason="the extra `vision` isn't installed")
    buffer = io.BytesIO()
    pillow.new("RGB", (3, 2), (1, 2, 3)).save(buffer, "PNG")
    found = to_hugging_face([{"image": buffer.getvalue()}], {"image": "bytes"}).cast_column("image", Image())
    assert found[0]["image"].getpixel((2, 1)) == (1, 2, 3)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="Give columns="):
        to_hugging_face([{"a": 1}])
    with pytest.raises(DataError, match="rows 0 to 1 has no column 'b'"):
        to_hugging_face([{"a": 1, "b": 1}, {"a": 2}], {"a": "int", "b": "int"})
    with pytest.raises(DataError, match="doesn't fit its columns"):
        to_hugging_face([{"a": "x"}], {"a": "int"})
    with pytest.raises(DataError, match="'pkl' has no counterpart"):
        to_hugging_face([{"a": 1}], {"a": "pkl"})
    assert to_hugging_face([], {"a": "ndarray:int8", "b": "str"}).num_rows == 0


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, dataset: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"cosmati\[llm\]"):
        read(dataset)
    with pytest.raises(MissingExtraError, match=r"cosmati\[llm\]"):
        to_hugging_face([], {"a": "int"})


def test_the_readers_load_without_torch_and_datasets() -> None:
    code = (
        "import sys, cosmati.data.ingest, cosmati.data.tokens, cosmati.data.packing\n"
        "print([name for name in ('torch', 'datasets', 'pyarrow', 'PIL', 'tokenizers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
