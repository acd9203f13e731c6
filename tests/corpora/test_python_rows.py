"""Packages by their licences, each file as its RECORD says it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cosmati.corpora.python_packages import find_packages
from cosmati.corpora.python_rows import read_python_packages
from cosmati.errors import DataError
from tests.corpora.test_python_library import code, install

pytestmark = pytest.mark.long


@pytest.fixture
def site(tmp_path: Path) -> Path:
    shared = code("shared", 50)
    install(tmp_path, "alpha", {"alpha/a.py": b"a = 1\n", "alpha/b.py": shared, "alpha/__init__.py": b""})
    install(tmp_path, "beta", {"beta/copy.py": shared, "beta/tests/t.py": b"x", "beta/c.py": b"\xff\0"}, "GPL-3.0-only")
    return tmp_path


def test_each_file_is_a_row_of_its_licence(site: Path) -> None:
    rows = read_python_packages([site])
    found = list(rows)
    assert [(row["origin_file"], row["licence"], rows.class_path(row)) for row in found] == [
        ("alpha/alpha/a.py", "MIT", "open/permissive"),
        ("alpha/alpha/b.py", "MIT", "open/permissive"),
        ("beta/beta/c.py", "GPL-3.0-only", "open/copyleft"),
    ]
    assert all(row["origin_sha256"] == hashlib.sha256(row["content"]).digest() for row in found)
    assert all(row.keys() == rows.columns.keys() for row in found)
    assert rows.left_out == {"tests": 1, "empty": 1, "content seen before": 1}
    assert len(list(read_python_packages([site], deduplicate=False))) == 4


def test_a_changed_or_missing_file_is_raised_or_recorded(site: Path) -> None:
    (site / "alpha/a.py").write_bytes(b"a = 2\n")
    (site / "alpha/b.py").unlink()
    with pytest.raises(DataError, match=r"alpha/alpha/a\.py, 1: isn't what the RECORD"):
        list(read_python_packages([site]))
    rows = read_python_packages([site], on_error="record")
    assert [row["origin_file"] for row in rows] == ["beta/beta/c.py"]
    assert [bad.reason[:12] for bad in rows.skipped] == ["isn't what t", "can't be rea"]


def test_this_machine_has_rows_of_known_classes() -> None:
    packages, _ = find_packages()
    classes = {package.licence.class_path for package in packages}
    rows = read_python_packages(on_error="record")
    found = [rows.class_path(row) for row, _ in zip(rows, range(50), strict=False)]
    assert len(found) == 50
    assert set(found) <= classes
