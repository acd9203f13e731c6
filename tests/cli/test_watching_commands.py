"""`cosmati track`, `cosmati profile`, and what `cosmati train` takes to be watched."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cosmati.cli.main import app
from tests.integrations.doubles import CometPackage

RECIPE = """
import torch
from cosmati import Classification, InMemory, RunConfig
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe

def data():
    return InMemory((torch.arange(96.0).reshape(32, 3) / 96, torch.arange(32) % 2), 8)

def recipe():
    return Recipe(name="small", model=lambda: MLP((3, 4, 2)), loss=Classification(2), data=data,
                  optimizers=(SGD(lr=0.1),), config=RunConfig(budget="40ba"))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(RECIPE)
    return str(path)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_run_is_watched_live_and_sent_afterwards(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = CometPackage()
    monkeypatch.setitem(sys.modules, "comet_ml", package)
    folder = str(tmp_path / "run")
    result = call("train", recipe, "--run-folder", folder, "--monitor", "--track", "comet:project=live")
    assert result.exit_code == 0, result.output
    (experiment,) = package.experiments.values()
    steps = [step for name, step, _ in experiment.metrics if name == "update_norm/layers.0"]
    assert steps == [10, 20, 30, 40]
    lines = [json.loads(line) for line in (tmp_path / "run/monitors.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    package.experiments.clear()
    sent = call("track", folder, "--to", "comet:project=after")
    assert sent.exit_code == 0, sent.output
    assert "Attempt 0: 9 lines" in sent.output
    assert len(package.experiments) == 1
    assert "Attempt 0: 0 lines (all of it is there)" in call("track", folder, "--to", "comet:project=after").output
    assert "it was watched live there" in call("track", folder, "--to", "comet:project=live").output


def test_what_cannot_be_tracked_is_told_before_anything_runs(recipe: str, tmp_path: Path) -> None:
    result = call("train", recipe, "--run-folder", str(tmp_path / "run"), "--track", "tensorbord")
    assert result.exit_code == 1
    assert "'tensorbord' is no tracker. Did you mean tensorboard?" in result.output
    assert not (tmp_path / "run").exists()


def test_a_profile_says_what_bounds_the_step_and_where_the_trace_is(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "profile"
    result = call("profile", recipe, "--steps", "3", "--warm-up", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "Bound by " in result.output
    assert f"Wrote {out / 'trace.json'}" in result.output
    assert "no memory snapshot: PyTorch takes one on CUDA only" in result.output
    names = {event.get("name") for event in json.loads((out / "trace.json").read_text())["traceEvents"]}
    assert {"cosmati: forward", "cosmati: backward", "cosmati: optimizer"} <= names
    assert {path.name for path in tmp_path.iterdir()} <= {"profile", "small.py", "__pycache__"}, "no run is kept"


def test_a_run_with_a_ledger_is_profiled_with_it_and_keeps_none(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "aside"))
    (tmp_path / "aside").mkdir()
    given = ("--steps", "2", "--warm-up", "1", "--out", str(tmp_path / "profile"), "--set", "config.ledger=true")
    result = call("profile", recipe, *given)
    assert result.exit_code == 0, result.output
    assert float(re.findall(r"^ledger +([0-9.]+)", result.output, re.MULTILINE)[0]) > 0
    assert list((tmp_path / "aside").iterdir()) == []
