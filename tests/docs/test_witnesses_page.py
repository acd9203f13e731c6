"""The page on witnesses: its commands and options are there, its settings too, and its key is of the right kind."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmati import RunConfig
from cosmati.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "witnesses.md").read_text()
COMMANDS = re.findall(r"^cosmati (.+)$", PAGE, re.MULTILINE) + re.findall(r"`cosmati ([^`]+)`", PAGE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_page_is_there_with_its_options(command: str) -> None:
    words = re.sub(r'"[^"]*"', "X", command).split()
    names = [word for word in words if re.fullmatch(r"[a-z][a-z-]+", word)][: 3 if "witness" in words[:2] else 2]
    names = names[:1] if words[0] in ("train", "report") else names
    told = CliRunner().invoke(app, [*names, "--help"], terminal_width=200)
    assert told.exit_code == 0, names
    for option in (word for word in words if word.startswith("--")):
        assert option in told.output, (names, option)


def test_its_settings_are_there() -> None:
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    assert set(re.findall(r"^    (\w+)=", PAGE, re.MULTILINE)) <= fields
    assert {"witness_quorum", "ledger_profile"} <= fields
    assert len(COMMANDS) > 6
