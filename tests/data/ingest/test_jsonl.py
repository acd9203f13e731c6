"""JSON Lines: rows as the standard library reads them, and each kind of poison named with its line."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.data.ingest import ORIGIN_COLUMNS, Rows, class_by_field, infer_columns, read_jsonl
from cosmati.data.shards.encodings import encoding
from cosmati.errors import DataError

ROWS = [{"text": "one", "n": 1, "tokens": [1, 2]}, {"text": "zwei \u20ac", "n": -5, "tokens": [70000]}]
COLUMNS = {"text": "str", "n": "int", "tokens": "ndarray:uint32"}


def write(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def read(path: Path, columns: dict[str, str] | None = None, **changes: Any) -> Rows:
    return read_jsonl(path, columns, **{"class_of": "open/permissive", **changes})


def test_rows_columns_and_origin(tmp_path: Path) -> None:
    lines = [json.dumps(row).encode() for row in ROWS]
    path = write(tmp_path / "a.jsonl", [lines[0], b"  ", lines[1] + b"\r"])
    rows = read(path, COLUMNS)
    assert dict(rows.columns) == COLUMNS | dict(ORIGIN_COLUMNS)
    found = list(rows)
    assert [row["tokens"].tolist() for row in found] == [row["tokens"] for row in ROWS]
    assert all(row["tokens"].dtype == np.uint32 for row in found)
    assert [(row["text"], row["n"]) for row in found] == [(row["text"], row["n"]) for row in ROWS]
    assert [(row["origin_file"], row["origin_place"]) for row in found] == [("a.jsonl", 1), ("a.jsonl", 3)]
    assert [row["origin_sha256"] for row in found] == [
        hashlib.sha256(lines[0]).digest(),
        hashlib.sha256(lines[1] + b"\r").digest(),
    ]
    assert [file.sha256 for file in rows.files] == [hashlib.sha256(path.read_bytes()).hexdigest()]
    assert rows.skipped == ()


def test_reading_is_lazy_and_starts_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [b'{"n": 1}', b'{"n": 2}', b"poison"])
    rows = read(path, {"n": "int"})
    assert next(iter(rows))["n"] == 1  # the poison is further on
    assert rows.files == ()
    for _ in range(2):
        iterator = iter(rows)
        assert [next(iterator)["n"], next(iterator)["n"]] == [1, 2]
        with pytest.raises(DataError, match=r"a\.jsonl, 3: isn't JSON"):
            next(iterator)


@pytest.mark.long
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.text(st.characters(exclude_categories=["Cs"])),
                "n": st.integers(-(2**63), 2**63 - 1),
                "x": st.floats(allow_nan=False, allow_infinity=False),
                "any": st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner),
                    max_leaves=5,
                ),
            }
        ),
        max_size=5,
    )
)
def test_whatever_json_holds_comes_back_through_the_encodings(values: list[dict[str, Any]]) -> None:
    import tempfile

    columns = {"text": "str", "n": "int", "x": "float64", "any": "json"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl.gz"
        path.write_bytes(gzip.compress(b"".join(json.dumps(v).encode() + b"\n" for v in values)))
        rows = read(path, columns)
        found = list(rows)
    decoded = [
        {n: encoding(e).decode(memoryview(encoding(e).encode(row[n]))) for n, e in rows.columns.items()}
        for row in found
    ]
    assert [{name: row[name] for name in columns} for row in decoded] == values


POISON = {
    "truncated": (b'{"n": 1', "isn't JSON"),
    "two objects": (b'{"n": 1} {"n": 2}', "isn't JSON"),
    "a list": (b"[1]", "is a JSON list, not an object"),
    "no UTF-8": (b'{"n": "\xff"}', "isn't UTF-8 at byte 7"),
    "twice": (b'{"n": 1, "n": 2}', "names 'n' twice"),
    "missing": (b'{"m": 1}', "lacks 'n'"),
    "null": (b'{"n": null}', "is None, not an integer"),
    "true": (b'{"n": true}', "is True, not an integer"),
    "fraction": (b'{"n": 1.0}', "is 1.0, not an integer"),
    "text": (b'{"n": "1"}', "is '1', not an integer"),
    "beyond": (b'{"n": 9223372036854775808}', "beyond int"),
    "not a number": (b'{"n": NaN}', "holds NaN"),
    "nested": (b'{"n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "digits": (b'{"n": ' + b"9" * 5000 + b"}", "digits"),
    "long": (b'{"n": 1, "m": "' + b"x" * 300_000 + b'"}', "longer than 250000 bytes"),
}


@pytest.mark.parametrize("kind", POISON)
def test_poison_is_raised_with_file_line_and_reason_or_recorded(kind: str, tmp_path: Path) -> None:
    line, reason = POISON[kind]
    path = write(tmp_path / "a.jsonl", [b'{"n": 1}', line, b'{"n": 3}'])
    with pytest.raises(DataError, match=r"a\.jsonl, 2: ") as caught:
        list(read(path, {"n": "int"}, max_row_bytes=250_000))
    assert reason in str(caught.value)
    assert "on_error='record'" in str(caught.value)
    rows = read(path, {"n": "int"}, max_row_bytes=250_000, on_error="record")
    assert [row["n"] for row in rows] == [1, 3]
    assert [(bad.file, bad.place, reason in bad.reason) for bad in rows.skipped] == [("a.jsonl", 2, True)]
    assert list(rows)  # a second pass doesn't record twice
    assert len(rows.skipped) == 1
    iter(rows)  # the latest pass has come nowhere yet
    assert rows.skipped == ()


BAD_VALUES = [
    ("str", 1, "not text"),
    ("str", "\ud800", "surrogates"),
    ("json", {"a": "\ud800"}, "surrogates"),
    ("int8", 128, "beyond int8"),
    ("uint8", -1, "beyond uint8"),
    ("float16", 70000, "beyond float16"),
    ("float32", 1e39, "beyond float32"),
    ("float64", 2**53 + 1, "doesn't hold 9007199254740993 exactly"),
    ("float16", 2049, "doesn't hold 2049 exactly"),
    ("ndarray:float32", [16777217], "doesn't hold 16777217 exactly"),
    ("ndarray:float64", [2**53 + 1, 0.5], "doesn't hold 9007199254740993 exactly"),
    ("ndarray:int32", 1, "not a list"),
    ("ndarray:int32", [], "empty list"),
    ("ndarray:int32", [1, 2.5], "int32 can hold"),
    ("ndarray:int32", [1, "2"], "int32 can hold"),
    ("ndarray:int32", [[1], [2, 3]], "different lengths"),
    ("ndarray:int32", [2**31], "beyond int32"),
    ("ndarray:uint64", [2**70], "uint64 can hold"),
    ("ndarray:float32", [None], "float32 can hold"),
    ("ndarray:uint8:2,2", [1, 2, 3, 4], "shape (4,)"),
]


@pytest.mark.parametrize(("name", "value", "reason"), BAD_VALUES)
def test_values_that_the_encoding_cannot_hold(name: str, value: Any, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [json.dumps({"v": value}).encode()])
    with pytest.raises(DataError, match=r"a\.jsonl, 1: field 'v' ") as caught:
        list(read(path, {"v": name}))
    assert reason in str(caught.value)


def test_arrays_keep_their_shape_and_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [b'{"v": [[1, 2], [3, 255]], "w": [1, 2.5], "u": [18446744073709551615]}'])
    [row] = read(path, {"v": "ndarray:uint8:2,2", "w": "ndarray:float32", "u": "ndarray:uint64"})
    assert row["v"].tolist() == [[1, 2], [3, 255]]
    assert (row["w"].dtype, row["w"].tolist()) == (np.float32, [1.0, 2.5])
    assert row["u"].tolist() == [2**64 - 1]


def test_inferred_columns_refuse_what_the_first_row_has_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [b'\xef\xbb\xbf{"t": "a", "n": 1, "x": 1.5, "b": true, "z": null}'])
    columns = {"t": "str", "n": "int", "x": "float64", "b": "json", "z": "json"}
    assert infer_columns(path) == columns
    assert dict(read(path).columns) == columns | dict(ORIGIN_COLUMNS)
    assert [row["t"] for row in read(path)] == ["a"]
    write(path, [b'{"t": "a"}', b'{"t": "b", "new": 1}'])
    with pytest.raises(DataError, match=r"a\.jsonl, 2: has fields that the first row hasn't: new"):
        list(read(path))
    assert [row["t"] for row in read(path, {"t": "str"})] == ["a", "b"]


@pytest.mark.parametrize("columns", [{"a": "bytes"}, {"a": "ndarray"}, {"a": "ndarray:int"}, {"a": "ndarray:int8:0"}])
def test_columns_that_json_cannot_fill(columns: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't fill the encoding"):
        read(write(tmp_path / "a.jsonl", [b"{}"]), columns)


def test_other_refusals(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [b"", b"[]"])
    with pytest.raises(DataError, match="taken by a row's origin"):
        read(path, {"origin_file": "str"})
    with pytest.raises(DataError, match="neither 'raise' nor 'record'"):
        read(path, {"a": "str"}, on_error="ignore")
    with pytest.raises(DataError, match="is no class path"):
        read(path, {"a": "str"}, class_of="Open Permissive")
    with pytest.raises(DataError, match=r"a\.jsonl, 2: is a JSON list.*give columns="):
        infer_columns(path)
    with pytest.raises(DataError, match="no row to infer"):
        infer_columns(write(path, [b""]))


def test_the_class_goes_by_a_field_and_a_row_without_one_is_bad(tmp_path: Path) -> None:
    lines = [b'{"t": "a", "licence": "MIT"}', b'{"t": "b", "licence": "GPL"}', b'{"t": "c", "licence": "?"}']
    path = write(tmp_path / "a.jsonl", lines)
    columns = {"t": "str", "licence": "str"}
    classes = class_by_field("licence", {"MIT": "open/permissive", "GPL": "open/copyleft"})
    with pytest.raises(DataError, match=r"a\.jsonl, 3: no class is given for licence='\?'"):
        list(read(path, columns, class_of=classes))
    rows = read(path, columns, class_of=classes, on_error="record")
    assert [rows.class_path(row) for row in rows] == ["open/permissive", "open/copyleft"]
    assert [bad.place for bad in rows.skipped] == [3]
    with pytest.raises(DataError, match=r"a\.jsonl, 1: 'MIT' is no class path"):
        list(read(path, columns, class_of=class_by_field("licence")))
    with pytest.raises(DataError, match=r"a\.jsonl, 1: the class stands in column 'licence', which isn't read"):
        list(read(path, {"t": "str"}, class_of=classes))
    assert list(rows.keep(["licence"])) == [{"licence": "MIT"}, {"licence": "GPL"}]
    assert dict(rows.keep(["licence"]).columns) == {"licence": "str"}
    with pytest.raises(DataError, match="There is no column x"):
        rows.keep(["x"])
