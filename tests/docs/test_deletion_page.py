"""What the deletion page says: its commands are real, its words are those of the certificate, its Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cosmati.cli.commands import load_command
from cosmati.forget.planning import EXACT, FROM_ENTRY_0
from tests.forget.samples import bare, maker, trained
from tests.train.isolated.samples import source

PAGE = (Path(__file__).parents[2] / "docs" / "deletion.md").read_text()
COMMANDS = re.findall(r"^cosmati forget .*$", PAGE, re.MULTILINE)


def test_its_commands_are_real() -> None:
    group = load_command("forget")
    assert len(COMMANDS) == 8
    for command in COMMANDS:
        words = shlex.split(command)[2:]
        own = group.commands[words[0] if words[0] in group.commands else "run"]
        known = {name for parameter in own.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, command


def test_its_words_are_those_of_the_certificate() -> None:
    assert EXACT in PAGE
    assert FROM_ENTRY_0.partition(";")[0] in " ".join(PAGE.split())


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = bare("MLP, low rank")
    trained(maker(case, source(case)), tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    exec(PAGE.split("```python\n")[1].split("```")[0].replace("licensed/news", "personal"), {})
    said = capsys.readouterr().out
    assert "drop (\"class personal isn't isolated" in said
    assert "replay (\"it trains, and needs the run's recipe" in said
