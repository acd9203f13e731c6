"""What a run finds again when it goes on: its loader's place, the promises it took back, its newest checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Regression
from cosmati.data.in_memory import InMemory
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer

Rows = tuple[Tensor, Tensor]


class Loader:
    """Gives batches one after another, and knows its place."""

    def __init__(self, served: list[int]) -> None:
        self._place = 0
        self._served = served

    def __iter__(self) -> Iterator[Rows]:
        while True:
            self._served.append(self._place)
            generator = torch.Generator().manual_seed(self._place)
            self._place += 1
            yield torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


class StopAfter(Observer):
    """Ask the run to stop, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self.step:
            os.kill(os.getpid(), 2)


class Counting(nn.Module):
    """Changes a buffer of its own in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.passes += 1
        return self.linear(rows)


def _fit(model: nn.Module, folder: Path, served: list[int], stop: int) -> tuple[str, dict[str, Tensor]]:
    config = RunConfig(budget="6ba", num_threads=1, run_folder=folder)
    observers = [StopAfter(stop)]
    trainer = Trainer(
        model, Regression(), Loader(served), optimizers=[SGD(lr=0.1, momentum=0.9)], observers=observers, config=config
    )
    return trainer.fit().outcome, model.state_dict()


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def test_a_loader_with_state_goes_on_at_its_place(tmp_path: Path) -> None:
    whole: list[int] = []
    _, expected = _fit(_linear(), tmp_path / "whole", whole, 0)
    assert whole == list(range(6))
    served: list[int] = []
    assert _fit(_linear(), tmp_path / "run", served, 2)[0] == "stopped"
    outcome, found = _fit(_linear(), tmp_path / "run", served, 0)
    # The last batch that was seen is read again, and compared.
    assert (outcome, served) == ("completed", [0, 1, 1, 2, 3, 4, 5])
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_promise_that_was_taken_back_stays_so_after_a_resume(tmp_path: Path) -> None:
    rows = (torch.ones(16, 3), torch.ones(16, 1))
    config = RunConfig(budget="4ba", num_microbatches=2, num_threads=1, run_folder=tmp_path)
    first, second = (Trainer(Counting(), Regression(), optimizers=[SGD(lr=0.1)], config=config) for _ in range(2))
    assert first.plan.holds("elastic")
    with first:
        first.step(rows)
    assert not first.plan.holds("elastic")
    with second:
        second.step(rows)
        assert not second.plan.holds("elastic")
        (why,) = [g.because for g in second.plan.guarantees if g.name == "elastic"]
    assert "forward changes the buffers passes" in why
    assert second.clock.step == 2


@pytest.mark.parametrize("num_checkpoints", [1, 3])
def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path: Path, num_checkpoints: int) -> None:
    config = RunConfig(
        budget="5ba", num_threads=1, run_folder=tmp_path, checkpoint_every="1ba", num_checkpoints=num_checkpoints
    )
    source = InMemory((torch.zeros(20, 3), torch.zeros(20, 1)), 4)
    Trainer(_linear(), Regression(), source, optimizers=[SGD(lr=0.1)], config=config).fit()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in range(6 - num_checkpoints, 6)]
