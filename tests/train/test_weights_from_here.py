"""Weights of another run are known by its name, however the way there is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmati.core.loss import Classification
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

ROWS = torch.ones(8, 6), torch.arange(8) % 3


def train(folder: Path, weights: Path | None, budget: str = "2ba") -> None:
    config = RunConfig(budget=budget, num_threads=1, run_folder=folder, load_weights=weights, change=("budget",))
    Trainer(nn.Linear(6, 3), Classification(3), [ROWS] * 9, optimizers=[SGD(lr=0.1)], config=config).fit()


@pytest.mark.parametrize(
    "ways", [(".", "{run}"), ("checkpoints/{step}", "{run}/checkpoints/{step}"), ("../parent", ".")]
)
def test_a_run_goes_on_whichever_way_its_weights_are_named(
    ways: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "parent"
    train(run, None)
    monkeypatch.chdir(run)
    step = os.listdir("checkpoints")[0]  # noqa: PTH208
    begun, resumed = (Path(way.format(run=run, step=step)) for way in ways)
    train(tmp_path / "child", begun)
    train(tmp_path / "child", resumed, "3ba")
    assert len(list((tmp_path / "child" / "checkpoints").glob("step-*3"))) == 1
