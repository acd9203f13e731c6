"""What the deletion page says: its commands are real, its words are those of the certificate, its Python runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cosmati.cli.commands import load_command
from cosmati.forget.ablation import STRENGTH
from cosmati.forget.planning import EXACT, FROM_ENTRY_0
from tests.forget.samples import bare, maker, trained
from tests.train.isolated.samples import source

PAGE = (Path(__file__).parents[2] / "docs" / "deletion.md").read_text()
COMMANDS = re.findall(r"^cosmati forget .*$", PAGE, re.MULTILINE)


def test_its_commands_are_real() -> None:
    group = load_command("forget")
    assert len(COMMANDS) == 10
    for command in COMMANDS:
        words = shlex.split(command)[2:]
        own = group.commands[words[0] if words[0] in group.commands else "run"]
        known = {name for parameter in own.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, command


def test_its_words_are_those_of_the_certificate() -> None:
    assert EXACT in PAGE
    assert FROM_ENTRY_0.partition(";")[0] in " ".join(PAGE.split())
    assert f"| {STRENGTH.partition(':')[0]} |" in PAGE


def test_its_figures_of_ablation_are_those_that_were_measured() -> None:
    """The page's few, from the table that the benchmark wrote."""
    table = (Path(__file__).parents[2] / "benchmarks" / "results" / "deletion.md").read_text()
    cells = [[one.strip() for one in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("| ")]
    retain = {way: float(loss.split()[0]) for way, loss in cells[1:]}
    never = retain["retain-only: replay from the start"]
    told = " ".join(PAGE.split())
    for words in (
        f"{retain['SGTM, ablated'] - never:.2f} nats a byte above that of a model that never had the class",
        f", {retain['SGTM, ablated and repaired'] - never:.2f} after the repair",
        f"that loss was {retain['routed, before'] - retain['no deletion']:.2f} worse before anything was ablated",
        f"{retain['routed, ablated']:.1f} in all without the region",
        f"and {retain['routed, ablated and repaired']:.1f} after the repair, against {never:.1f};",
    ):
        assert words in told


@pytest.mark.long
def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = bare("MLP, low rank")
    trained(maker(case, source(case)), tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    exec(PAGE.split("```python\n")[1].split("```")[0].replace("licensed/news", "personal"), {})
    said = capsys.readouterr().out
    assert "drop (\"class personal isn't isolated" in said
    assert "replay (\"it trains, and needs the run's recipe" in said
