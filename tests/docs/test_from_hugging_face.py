"""The page for who comes from transformers' Trainer: its example runs, resumes and is exported by the page alone."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.core.loss import huggingface_loss
from cosmati.methods.label_smoothing import smooth_labels
from tests.docs.migration_pages import STOPS, blocks_of, names_are_real, run_blocks, table_of

transformers = pytest.importorskip("transformers", reason="the extra `llm` isn't installed")
pytestmark = [pytest.mark.filterwarnings("ignore:::transformers", "ignore:::torch.jit"), pytest.mark.long]

PAGE = (Path(__file__).parents[2] / "docs" / "from-hugging-face.md").read_text()
SCRIPT, LOADED, RECIPE = blocks_of(PAGE)


def run_script(folder: Path, source: str = SCRIPT) -> dict[str, Any]:
    return run_blocks([source.replace('__name__ == "__main__"', "True")], folder)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "sentiment.py").write_text(SCRIPT)
    (folder / "recipe.py").write_text(RECIPE)
    return folder, run_script(folder)


def test_it_learns_and_is_read_back(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, scope = ran
    assert scope["result"].metrics["accuracy"] > 0.9
    model = run_blocks([LOADED], folder)["model"].eval()
    batch = next(iter(scope["evaluation"]().data))
    with torch.no_grad(), scope["trainer"].averaged() as trained:
        assert torch.equal(model(**batch).logits, trained.eval()(**batch).logits)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(ran: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    broken = STOPS + SCRIPT.replace("observers=[", "observers=[Stops(19), ")
    broken = broken.replace('    trainer.export("sentiment", to="hf")\n', "")
    assert run_script(tmp_path, broken)["trainer"].clock.step == 19
    found = run_script(tmp_path)["trainer"].model.state_dict()
    whole = ran[1]["trainer"].model.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


def test_its_export_by_the_command(ran: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ran[0]
    monkeypatch.chdir(folder)
    (command,) = re.findall(r"```\ncosmati (.*)\n```", PAGE)
    result = CliRunner().invoke(app, shlex.split(command))
    sys.modules.pop("sentiment", None)
    assert result.exit_code == 0, result.output
    assert "Measured again on the export: accuracy" in result.output
    assert (folder / "sentiment-again" / "model.safetensors").read_bytes() == (
        folder / "sentiment" / "model.safetensors"
    ).read_bytes()
    assert json.loads((folder / "sentiment-again" / "config.json").read_text())["num_hidden_layers"] == 1


def test_smoothing_is_that_of_transformers_trainer(ran: tuple[Path, dict[str, Any]]) -> None:
    """`label_smoothing_factor`, by transformers' own class."""
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.1)
    model = ran[1]["make_model"]().eval()
    batch = next(iter(ran[1]["evaluation"]().data))
    theirs = smoother(model(**batch), batch["labels"])
    soft = smooth_labels(torch.zeros(len(batch["labels"]), 2), batch["labels"], 0.1)
    torch.testing.assert_close(huggingface_loss(model, batch | {"labels": soft}).mean(), theirs)


def test_names_on_the_page_are_real() -> None:
    names_are_real(PAGE, least={"AdamW", "LabelSmoothing", "Evaluation", "RunConfig", "EarlyStopping", "Constant"})
    fields = {field for row in table_of(PAGE) for field in re.findall(r"`(\w+)(?==|`)", row[0])}
    known = set(transformers.TrainingArguments.__dataclass_fields__)
    assert len(fields & known) > 20
    others = {
        "model", "args", "train_dataset", "data_collator", "eval_dataset", "compute_metrics", "resume_from_checkpoint",
        "warmup_ratio", "TrainingArguments", "Trainer", "TrainerCallback", "torchrun",
    }  # fmt: skip
    assert fields - known <= others, "no name of theirs that isn't there"
