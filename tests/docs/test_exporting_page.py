"""The page on exporting: its example runs by the commands that it gives, and its tables say what happens."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cosmati import methods
from cosmati.cli.main import app
from cosmati.export.folding import fold
from cosmati.export.formats import FORMS
from cosmati.models.gpt import GPT, GPTConfig

PAGE = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text()
SOURCES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```\n(cosmati.*?)```", PAGE, re.DOTALL)


def rows_of(title: str) -> list[list[str]]:
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, *later = SOURCES
    Path("stripes.py").write_text(recipe)
    for line in COMMANDS[0].splitlines():
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output
    assert "Measured again on the export: accuracy" in result.output
    assert {path.name for path in Path("stripes-model").iterdir()} == {
        row[0].strip("`") for row in rows_of("From a run folder")
    }
    scope: dict[str, Any] = {"__name__": "page"}
    for source in (recipe, *later):
        exec(compile(source, "exporting.md", "exec"), scope)
    x = scope["rows"](1)[0]
    with torch.no_grad():
        assert scope["logits"].shape == (5, 2)
        assert torch.equal(scope["program"](x), scope["plain"](x))
        assert torch.equal(scope["exported"](x), scope["plain"](x))
    (line,) = Path("runs/stripes/exports.jsonl").read_text().splitlines()
    facts = PAGE.partition("## exports.jsonl")[2]
    for name in ("time", "checkpoint", "step", "metrics"):
        assert name in json.loads(line)
        assert name in facts


def test_every_form_is_there() -> None:
    assert [row[0].strip("`") for row in rows_of("Forms")] == list(FORMS)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(8, 8, 3, 2), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.Dropout()),
    )


def tokens() -> nn.Module:
    return GPT(GPTConfig(vocabulary_size=8, sequence_length=8, width=8, num_blocks=1, num_heads=1, rotary=False))


SAMPLES: dict[str, tuple[Any, Any]] = {
    "`BlurPool`": (images, methods.BlurPool(min_channels=1)),
    "`SqueezeExcite`": (images, methods.SqueezeExcite(latent_channels=2, min_channels=1)),
    "`Factorize`": (images, methods.Factorize(min_channels=1, latent_channels=2)),
    "`WeightStandardization`": (images, methods.WeightStandardization()),
    "`GhostBatchNorm`": (images, methods.GhostBatchNorm()),
    "`LowPrecisionGroupNorm`": (images, methods.LowPrecisionGroupNorm()),
    "`LowPrecisionLayerNorm`": (tokens, methods.LowPrecisionLayerNorm()),
    "`GyroDropout`": (images, methods.GyroDropout()),
    "`StochasticDepth` by sample": (
        images,
        methods.StochasticDepth(target_layer_name="Sequential", stochastic_method="sample"),
    ),
    "`StochasticDepth` by block": (images, methods.StochasticDepth(target_layer_name="Sequential")),
    "`IsolatedAdapters`": (images, methods.IsolatedAdapters(classes="a")),
    "`GatedLinearUnits`": (tokens, methods.GatedLinearUnits()),
    "`Alibi`": (tokens, methods.Alibi(max_sequence_length=8)),
}


def test_the_table_says_what_becomes_of_surgery() -> None:
    table = rows_of("What becomes of surgery")
    told = {name.strip(): becomes for names, becomes in table for name in names.split(",")}
    assert told.keys() == SAMPLES.keys()
    for name, (build, method) in SAMPLES.items():
        folded = fold(method.apply(build(), ()))
        fate = {
            "the native": bool(folded.turned_back) or bool(folded.shares),
            "stay": bool(folded.kept),
            "hook": bool(folded.shares),
        }
        plain = bool(folded.replaced)
        assert plain or any(fate.values()), name
        assert told[name].startswith("the native") == fate["the native"], name
        assert told[name].startswith("stay") == fate["stay"], name
        assert ("hook" in told[name]) == fate["hook"], name
