"""The page on replay: its Python runs, its commands exist, and its words are those that the commands say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati.cli.files import load_recipe
from cosmati.cli.main import app
from cosmati.ledger import replay_result, spot_check
from tests.cli.test_replay_commands import RECIPE

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()


@pytest.mark.long
def test_the_python_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    recipe = load_recipe(str(tmp_path / "small.py"), ["config.budget=8ba"])
    recipe.trainer(run_folder=tmp_path / "run").fit()
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {"folder": tmp_path / "run", "recipe": recipe})
    assert capsys.readouterr().out == "equal\n"


def test_the_commands_of_the_page_take_what_it_gives_them() -> None:
    commands = re.findall(r"^cosmati ledger ([a-z-]+) (.*)$", PAGE, re.MULTILINE)
    assert {name for name, _ in commands} == {"replay", "blinds", "spot-check"}
    for name, given in commands:
        told = CliRunner().invoke(app, ["ledger", name, "--help"], env={"COLUMNS": "200"}).output
        assert all(option in told for option in re.findall(r"--[a-z-]+", given)), (name, given)


def test_its_words_are_those_of_the_code() -> None:
    assert replay_result.LEVEL_REPLAYED in PAGE
    assert spot_check._DOMAIN.decode().rstrip("\0") in PAGE
    assert "\nreplay\n" in (Path(__file__).parents[2] / "docs" / "index.md").read_text()
