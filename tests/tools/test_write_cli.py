"""The reference of the commands is the commands' own, and has all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati.cli.main import app
from tools.write_cli import PAGE, page, paragraphs

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tools/write_cli.py"


@pytest.mark.parametrize("command", ["train", "export", "data write", "study report", "ledger query", "policy explain"])
def test_a_command_has_its_options_as_its_help_has_them(command: str) -> None:
    text = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "300"}).output
    section = re.split(r"\n##+ ", PAGE.read_text().split(f"# cosmati {command}\n", 1)[1])[0]
    options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help"}
    assert options
    assert options - set(re.findall(r"--[a-z][a-z-]+", section)) == set()


def test_every_command_of_the_readme_is_there() -> None:
    commands = re.findall(r"^cosmati (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands
    for name in commands:
        assert f"## cosmati {name}\n" in PAGE.read_text()


def test_lines_that_stay_as_they_are_become_code() -> None:
    assert list(paragraphs("Do <this>.\n\n\b\nExamples:\n  one\n  two")) == [
        "Do &lt;this&gt;.",
        "Examples:\n\n```text\none\ntwo\n```",
    ]
