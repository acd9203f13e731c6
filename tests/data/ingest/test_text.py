"""Text comes as it is, by file or by separator, with the line it begins on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cosmati.data.ingest import read_text
from cosmati.errors import DataError

CONTENT = "one\r\ntwo \n\n\n\tthree\n\nvier \u20ac"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + CONTENT.encode())
    (tmp_path / "empty.txt").write_bytes(b" \n")
    (tmp_path / "z.md").write_bytes(b"five")
    return tmp_path


EXPECTED = {
    None: [("a.txt", 1, CONTENT), ("z.md", 1, "five")],
    "\n": [
        ("a.txt", 1, "one\r"),
        ("a.txt", 2, "two "),
        ("a.txt", 5, "\tthree"),
        ("a.txt", 7, "vier \u20ac"),
        ("z.md", 1, "five"),
    ],
    "\n\n": [
        ("a.txt", 1, "one\r\ntwo "),
        ("a.txt", 4, "\n\tthree"),
        ("a.txt", 7, "vier \u20ac"),
        ("z.md", 1, "five"),
    ],
    "three": [("a.txt", 1, "one\r\ntwo \n\n\n\t"), ("a.txt", 5, "\n\nvier \u20ac"), ("z.md", 1, "five")],
}


@pytest.mark.parametrize("separator", EXPECTED)
def test_rows_by_separator(separator: str | None, folder: Path) -> None:
    rows = read_text(folder, class_of="unknown", separator=separator)
    found = list(rows)
    assert [(row["origin_file"], row["origin_place"], row["text"]) for row in found] == EXPECTED[separator]
    assert all(row.keys() == rows.columns.keys() for row in found)
    last = hashlib.sha256(found[-1]["text"].encode()).digest()
    assert found[-1]["origin_sha256"] == last
    assert [file.name for file in rows.files] == ["a.txt", "empty.txt", "z.md"]


def test_what_is_not_utf8_or_too_long_is_raised_or_recorded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\nmuch too long\nfine")
    with pytest.raises(DataError, match=r"a\.txt, 2: isn't UTF-8 at byte 4"):
        list(read_text(tmp_path, class_of="unknown", separator="\n", max_row_bytes=10))
    rows = read_text(tmp_path, class_of="unknown", separator="\n", max_row_bytes=10, on_error="record")
    assert [row["text"] for row in rows] == ["good", "fine"]
    assert [(bad.place, bad.reason.split()[0]) for bad in rows.skipped] == [(2, "isn't"), (3, "longer")]
    with pytest.raises(DataError, match=r"a\.txt, 1: longer than 10 bytes"):
        list(read_text(tmp_path, class_of="unknown", max_row_bytes=10))


def test_an_empty_separator_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="separator is empty"):
        read_text(folder, class_of="unknown", separator="")
