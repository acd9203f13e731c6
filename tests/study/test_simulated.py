"""The command that counts what intervals cover: it sees intervals that are too narrow, and claims that are too many."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import statistics
from cosmati.study import comparison
from cosmati.study import statistics as intervals

pytestmark = pytest.mark.long


def run(folder: Path, *arguments: str, studies: int = 60) -> int:
    return statistics.main(["--studies", str(studies), *arguments], folder)


def test_intervals_that_are_too_narrow_are_out_of_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--only", "straight") == 0
    assert "| straight curve | 60 | " in capsys.readouterr().out
    exact = intervals.student_quantile
    monkeypatch.setattr(intervals, "student_quantile", lambda level, dof: exact(level, dof) / 3)
    assert run(tmp_path, "--only", "straight") == 1
    assert "out of range: straight curve: covers 0." in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "parts are never written"


def test_claims_that_nobody_adjusts_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of 28 arms without an effect one is claimed in most studies, and adjusted in one of twenty: few show it.
    assert run(tmp_path, "--only", "screening", studies=15) == 0
    monkeypatch.setattr(comparison, "holm", tuple)
    assert run(tmp_path, "--only", "screening", studies=15) == 1
    assert "false claims in 0." in capsys.readouterr().err


def test_the_same_studies_are_drawn_each_time_and_all_is_written(tmp_path: Path) -> None:
    arguments = ["--studies", "2"]
    statistics.main(arguments, tmp_path / "one")
    statistics.main(arguments, tmp_path / "two")
    for name in ("statistics.md", "statistics.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    table = (tmp_path / "one" / "statistics.md").read_text()
    assert all(f"| {shape.name} |" in table for shape in statistics.SHAPES)
