"""A model is put where the run trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.train.config import RunConfig
from cosmati.train.ranks import Ranks
from cosmati.train.warm_start import place


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_and_buffers_are_where_the_run_trains(device: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    given: Any = SimpleNamespace(config=RunConfig(), loss=lambda model, data: model(data).sum())
    assert place(model, torch.device(device), given, Ranks()) == {}
    held = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in held} == {device}
    assert len(held) == 7
