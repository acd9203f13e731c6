"""The issue's case: what was measured is what leaves, and a plain model with the same names isn't it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from cosmati import Classification, Evaluation, InMemory, RunConfig, Trainer, accuracy, batches
from cosmati.methods import EMA, BlurPool
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import SGD
from cosmati.train.run.checkpoints import list_checkpoints

pytestmark = pytest.mark.long


def stripes(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of upright or lying stripes under noise: two classes."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 2
    wave = torch.sin(torch.arange(16.0) * 1.4)
    upright = wave.expand(rows, 1, 16, 16)
    images = torch.where(labels.view(-1, 1, 1, 1) == 0, upright, upright.transpose(2, 3))
    return images + 1.2 * torch.randn(rows, 1, 16, 16, generator=draws), labels


def net() -> ResNet:
    torch.manual_seed(0)
    return ResNet(ResNetConfig(num_classes=2, widths=(16, 16), stem_max_pool=True))


def blurred_trainer(folder: Path | None, **options: Any) -> Trainer:
    return Trainer(
        net(),
        Classification(2),
        InMemory(stripes(256, 0), 16),
        optimizers=[SGD(lr=0.1)],
        methods=[BlurPool(min_channels=1), EMA(half_life="4ba")],
        evaluation=Evaluation(batches(stripes(40, 1), 20), {"accuracy": accuracy}),
        config=RunConfig(budget="24ba", run_folder=folder, **options),
    )


def accuracy_of(model: nn.Module) -> float:
    images, labels = stripes(40, 1)
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == labels).float().mean())


def test_a_blurred_averaged_model_leaves_as_it_was_measured(tmp_path: Path) -> None:
    trainer = blurred_trainer(tmp_path / "run")
    recorded = trainer.fit().metrics["accuracy"]
    # What one does without an export: every key matches, and the model is another one.
    naive = net()
    naive.load_state_dict(load_file(list_checkpoints(tmp_path / "run/checkpoints")[0] / "model.safetensors"))
    assert accuracy_of(naive) < recorded
    out = tmp_path / "out"
    exported = trainer.export(out)
    assert accuracy_of(exported) == recorded
    assert not any(type(part).__module__.startswith("cosmati.methods") for part in exported.modules())
    # With PyTorch alone, from the files: the program, and the weights in a model of its own class.
    images, _ = stripes(40, 1)
    program = torch.export.load(out / "model.pt2").module()
    with trainer.averaged() as measured, torch.no_grad():
        expected = measured.eval()(images)
    assert torch.equal(program(images), expected)
    assert torch.equal(program(images[:7]), exported(images[:7]))
    rebuilt = runpy.run_path(str(out / "rebuild.py"))["rebuild"](net())
    assert load_model(rebuilt, out / "model.safetensors") == (set(), [])
    assert torch.equal(rebuilt.eval()(images), expected)
    assert "cosmati" not in (out / "rebuild.py").read_text()
    # A plain model can't be given the weights by mistake any more.
    with pytest.raises(RuntimeError, match="Missing key"):
        net().load_state_dict(load_file(out / "model.safetensors"))
    (line,) = [json.loads(text) for text in (tmp_path / "run/exports.jsonl").read_text().splitlines()]
    assert line["checkpoint"] == "step-00000024"
    assert line["metrics"] == {"accuracy": recorded}
    assert line["checked"]
    assert line["out"] == str(out)
    assert not list(tmp_path.glob(".*"))
