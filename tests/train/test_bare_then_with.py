"""A loop that takes a step before it says `with` has its numerics once: around that step, and then around the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import RunConfig, Trainer
from cosmati.optim import SGD
from cosmati.train import lifecycle
from cosmati.train import trainer as trainer_module
from cosmati.train.run.environment import numerics
from tests.train.test_watching import squared_error


def test_numerics_are_entered_once_for_all_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    def noted(name: str) -> Any:
        @contextmanager
        def around(assembly: Any) -> Iterator[None]:
            entered.append(name)
            with numerics(assembly):
                yield

        return around

    monkeypatch.setattr(trainer_module, "numerics", noted("step"))
    monkeypatch.setattr(lifecycle, "numerics", noted("with"))
    torch.manual_seed(0)
    batch = (torch.randn(4, 2), torch.randn(4, 1))
    config = RunConfig(budget="6ba", num_threads=1)
    trainer = Trainer(nn.Linear(2, 1), squared_error, None, optimizers=SGD(lr=0.1), config=config)
    trainer.step(batch)
    trainer.step(batch)
    assert entered == ["step", "step"]
    with trainer:
        trainer.step(batch)
        with trainer:
            trainer.step(batch)
    assert entered == ["step", "step", "with"]
