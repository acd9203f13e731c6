"""The page on studies: its example runs by the command that it gives, and says what the page promises."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.records.study import StudyRecord
from cosmati.study.checks import checks_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "studies.md").read_text()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    Path("adam_study.py").write_text(source)
    commands = re.findall(r"```\n(cosmati.*?)```", PAGE, re.DOTALL)
    outputs = []
    for line in "".join(commands).splitlines():
        result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    record = StudyRecord.from_json(Path("adam/study.json").read_text())
    sizes = {arm.name: len(arm.search.trials) for arm in record.arms if arm.search}
    assert sizes["baseline"] == sizes["adam"] >= 14
    assert "over baseline, a tuned opponent (" in outputs[0]
    assert "as many as the arm's)" in outputs[0]
    assert "predicted adam over baseline, by training time: ≥ 1.50×; came" in outputs[0]
    unmet = {item.name for item in checks_of(record) if not item.met}
    assert unmet <= {"Optimum inside of what was searched"}
    assert "\nstudies\n" in (ROOT / "docs" / "index.md").read_text()
