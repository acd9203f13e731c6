"""Rows that aren't there: a microbatch with some of them trains on the others, one with nothing else isn't run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cosmati.core.loss import Loss
from cosmati.data.in_memory import InMemory
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer


class Rows(Observer):
    def __init__(self, model: nn.Linear) -> None:
        self.model = model
        self.counts: list[list[int]] = []
        self.weights: list[float] = []

    def on_step(self, report: StepReport) -> None:
        assert report.num_rows is not None
        self.counts.append([int(count) for count in report.num_rows])
        self.weights.append(self.model.weight.item())


def test_a_partly_padded_microbatch_is_trained_on() -> None:
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
    calls: list[int] = []

    def product(model: nn.Module, data: Tensor) -> Loss:
        calls.append(len(data))
        per_row = model(data).flatten()
        return Loss(per_row.sum(), float(len(data)), per_row)

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    seen = Rows(model)
    config = RunConfig(budget="1ep", num_microbatches=2, num_threads=1)
    source = InMemory(rows, 4, tail="pad")
    Trainer(model, product, source, optimizers=[SGD(lr=1.0)], observers=[seen], config=config).fit()
    assert seen.counts == [[2, 2], [1, 0]]
    assert calls == [2, 2, 2], "canonical shape, and no forward pass where no row is"
    # The gradient is the mean of the step's rows: four of them, then the last one.
    last = seen.weights[0] - seen.weights[1]
    assert [last] in rows.tolist()
    assert -seen.weights[0] * 4 + last == rows.sum().item()
