"""The page on finding subjects: its code runs and prints what it says, and its figures are the benchmarks'."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.walked_page import walk

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "finding-subjects.md"
RESULTS = ROOT / "benchmarks" / "results"


def test_its_code_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    walk(PAGE, tmp_path)


def test_its_recall_is_what_was_measured() -> None:
    found = json.loads((RESULTS / "near_duplicates.json").read_text())["found"]
    by_threshold = {one["threshold"]: one for one in found}
    rows = re.findall(r"^\| (0\.\d) \| (\d+) \| (\S+) \((\S+) to 1\) \| (\S+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 4
    for threshold, pairs, recall, low, looked_at in rows:
        one = by_threshold[float(threshold)]
        assert (int(pairs), float(recall)) == (one["pairs as like"], one["recall"])
        assert float(low) == pytest.approx(one["recall low"], abs=5e-4)
        assert float(looked_at) == pytest.approx(one["candidates"] / 400, rel=0.03)


def test_the_findings_have_the_measured_table() -> None:
    """Each row as the benchmark wrote it, with its seeds, its hardware and its command."""
    findings, found = (ROOT / "docs" / "findings.md").read_text(), json.loads((RESULTS / "deletion.json").read_text())
    table = [line for line in (RESULTS / "deletion.md").read_text().splitlines() if line.startswith("|")]
    assert len(table) == 11
    assert "\n".join(table) in findings
    section = findings[: findings.index(table[0])].rpartition("\n## ")[2]
    assert f"n = {found['seeds']}" in section
    assert f"`{found['command']}`" in section
    assert found["hardware"].split(",")[0] in section
