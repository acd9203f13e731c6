"""The page for who has a loop of their own: its code runs, what it says of it holds, and its names are real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cosmati.cli.main import app
from tests.docs.migration_pages import blocks_of, names_are_real, run_blocks, table_of

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "from-a-bare-loop.md").read_text()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("page")
    return folder, run_blocks(blocks_of(PAGE), folder)


def test_the_page_runs_and_learns(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, scope = ran
    assert scope["metrics"]["accuracy"] > 0.95
    attempt = json.loads((folder / "runs/spirals/attempts.jsonl").read_text().splitlines()[-1])
    assert attempt["outcome"] in ("stopped", "completed")


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(ran: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    step = "        report = trainer.step(batch_of(trainer.clock.step))\n"
    assert PAGE.count(step) == 1
    blocks = blocks_of(PAGE)
    broken = [
        block.replace(step, f"{step}        if trainer.clock.step == 33: raise RuntimeError\n") for block in blocks
    ]
    with pytest.raises(RuntimeError):
        run_blocks(broken, tmp_path)
    again = run_blocks(blocks, tmp_path)
    lines = (tmp_path / "runs/spirals/attempts.jsonl").read_text().splitlines()
    assert [json.loads(line).get("first_step") for line in lines if "first_step" in line] == [0, 20]
    whole = ran[1]["trainer"].model.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in again["trainer"].model.state_dict().items())


def test_its_commands(ran: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ran[0])
    commands = re.findall(r"`cosmati (ledger verify|report|export) ([^`]+)`", PAGE)
    assert [command for command, _ in commands] == ["ledger verify", "report", "export"]
    for command, arguments in commands:
        result = CliRunner().invoke(app, [*command.split(), *arguments.split()])
        assert result.exit_code == 0, result.output
    assert (ran[0] / "weights" / "model.safetensors").is_file()


def test_names_on_the_page_are_real() -> None:
    names_are_real(PAGE, least={"EMA", "GradientClipping", "Evaluation", "RunConfig"})
    assert len(table_of(PAGE)) > 12
