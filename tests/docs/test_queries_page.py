"""The questions on the page are answered, and its Python runs."""

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.ledger_scale import write_ledger
from cosmati.cli.main import app

pytest.importorskip("duckdb", reason="the extra `queries` isn't installed")

pytestmark = pytest.mark.long
PAGE = (Path(__file__).parents[2] / "docs" / "queries.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page")
    write_ledger(place / "RUN" / "ledger", 8000)
    return place


@pytest.mark.slow
def test_every_question_of_the_page_is_answered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    asked = re.findall(r"`(cosmati ledger (?:query|policy-effect|derive|sql) RUN[^`\n]*)`", PAGE)
    asked += [
        f"cosmati ledger query RUN {option}"
        for option in re.findall(r"`(?:\.\.\. )?(--(?:each|checkpoint) [^`]+)`", PAGE)
    ]
    asked += re.findall(r"^cosmati ledger .*$", PAGE, flags=re.MULTILINE)
    asked = [one for one in asked if "--by" not in one and "..." not in one]
    assert len(asked) > 9
    for line in asked:
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        is_refuted = "embedding" in line  # licensed/news did write there
        assert result.exit_code == int(is_refuted), (line, result.output)


def test_the_python_of_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(PAGE.split("```python\n")[1].split("```")[0], {})
    finally:
        os.chdir(before)
    assert "Derived from tree of size" in capsys.readouterr().out
