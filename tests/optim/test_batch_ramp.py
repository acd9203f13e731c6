"""More rows a step as the run goes on: each row once, a clock and schedules in rows, the same bits after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati import Classification, RunConfig, Trainer
from cosmati.models.mlp import MLP
from cosmati.optim import SGD, LinearToZero
from cosmati.train.observers import Observer, StepReport
from tests.optim.test_optimizer_contract import StopAt

pytestmark = pytest.mark.long

SIZES = [4, 4, 4, 4, 8, 8, 16]
RATE = 0.5


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(48, 5, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    return list(zip(inputs.split(SIZES), labels.split(SIZES), strict=True))


class Look(Observer):
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.rates: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.rows.append(report.clock.rows)
        self.rates.append(self.trainer.assembly.optimizers[0].optimizer.param_groups[0]["lr"])

    trainer: Trainer


def run(*observers: Any, **config: Any) -> Trainer:
    torch.manual_seed(0)
    options = {"budget": "48sp", "num_microbatches": 4, "num_threads": 1, **config}
    optimizers = [SGD(lr=RATE, schedule=LinearToZero())]
    made = Trainer(
        MLP((5, 4, 3)),
        Classification(3),
        batches(),
        optimizers=optimizers,
        observers=observers,
        config=RunConfig(**options),
    )
    for observer in observers:
        observer.trainer = made
    return made


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_ramp_is_gradient_descent_on_growing_batches(num_microbatches: int) -> None:
    look = Look()
    trainer = run(look, num_microbatches=num_microbatches)
    torch.manual_seed(0)
    model = MLP((5, 4, 3)).double()
    seen = 0
    for inputs, labels in batches():
        loss = torch.nn.functional.cross_entropy(model(inputs.double()), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.sub_(RATE * (1 - seen / 48) * gradient)
        seen += len(labels)
    assert trainer.fit().outcome == "completed"
    assert look.rows == [4, 8, 12, 16, 24, 32, 48]
    assert look.rates == pytest.approx([RATE * (1 - n / 48) for n in (0, 4, 8, 12, 16, 24, 32)])
    for found, expected in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_ramp_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = run()
    whole.fit()
    for step in (3, 5):
        stopped = run(StopAt(step), run_folder=tmp_path / str(step))
        assert (stopped.fit().outcome, stopped.clock.rows) == ("stopped", sum(SIZES[:step]))
        resumed = run(run_folder=tmp_path / str(step))
        assert resumed.fit().outcome == "completed"
        assert all(map(torch.equal, resumed.model.state_dict().values(), whole.model.state_dict().values()))
