"""The page on credentials: its commands and options are there, its taxonomy is one, and its errors and columns too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

from cosmati import RunConfig
from cosmati.cli.main import app
from cosmati.ledger.sealing import BLOCK_STEPS, COLUMNS, KEY_FILE
from cosmati.provenance.sensitive import sensitive_classes
from cosmati.provenance.taxonomy import Taxonomy

PAGE = (Path(__file__).parents[2] / "docs" / "credentials.md").read_text()
COMMANDS = re.findall(r"^cosmati (.+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_page_is_there_with_its_options(command: str) -> None:
    words = command.split()
    told = CliRunner().invoke(app, [*words[:2], "--help"], terminal_width=200)
    assert told.exit_code == 0, words[:2]
    for option in (word for word in words if word.startswith("--")):
        assert option in told.output, (words[:2], option)


def test_its_taxonomy_and_settings_are_such() -> None:
    (told,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    taxonomy = Taxonomy.from_mapping(yaml.safe_load(told))
    assert sensitive_classes(taxonomy.classes, taxonomy.sensitive) == ("customer/pii",)
    assert RunConfig(sensitive=["licensed/news"]).sensitive == ("licensed/news",)  # type: ignore[arg-type]
    assert f"{BLOCK_STEPS:,} steps" in PAGE
    assert f"private/{KEY_FILE}" in PAGE
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert all(f"`{column}`" in rows for column in COLUMNS)
    assert len(COMMANDS) == 7
