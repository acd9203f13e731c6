"""Evaluation, without a trainer: one value for each metric, whatever the batches, and a model left as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.core.loss import Loss
from cosmati.train.evaluation import Evaluation, accuracy, batches, evaluate, kept_state, recalibrate
from cosmati.train.ranks import Ranks

CPU = torch.device("cpu")
PLAIN = torch.autocast("cpu", torch.bfloat16, enabled=False)
ROWS = torch.arange(10.0)[:, None]


def _sum(model: nn.Module, data: Data) -> Loss:
    return Loss(model(data).sum(), float(len(data)))


def _mean(model: nn.Module, data: Data) -> Tensor:
    return model(data).mean()


def _nothing(model: nn.Module, data: Data) -> Loss:
    return Loss(torch.zeros(()), 0.0)


METRICS: dict[str, Callable[..., Any]] = {"sum": _sum, "mean": _mean, "nothing": _nothing}


class OneOfThree(Ranks):
    """A rank of three, to whom the others' rows are handed."""

    def __init__(self, rank: int, others: dict[int, Tensor]) -> None:
        super().__init__()
        self.rank, self.world = rank, 3
        self.others = others

    def gather(self, rows: Tensor) -> Tensor:
        self.others[self.rank] = rows
        return torch.stack([self.others.get(rank, rows) for rank in range(3)], 1).flatten(0, 1)


def test_batches_are_cut_in_order_and_the_last_may_be_smaller() -> None:
    cut = batches((ROWS, {"y": ROWS + 1}), 4)
    assert [(part[0].flatten().tolist(), part[1]["y"][0].item()) for part in cut] == [
        ([0, 1, 2, 3], 1), ([4, 5, 6, 7], 5), ([8, 9], 9)
    ]  # fmt: skip
    assert len(batches(ROWS, 5)) == 2


def test_accuracy_counts_rows() -> None:
    logits = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 5.0]])
    result = accuracy(nn.Identity(), (logits, torch.tensor([1, 1, 1])))
    assert (float(result.sum), result.weight) == (2.0, 3.0)


@pytest.mark.parametrize("rows", [1, 3, 4, 10])
def test_metrics_are_those_of_all_rows(rows: int) -> None:
    found = evaluate(nn.Identity(), Evaluation(batches(ROWS, rows), METRICS), Ranks(), CPU, PLAIN)
    assert found == {"sum": 4.5, "mean": pytest.approx(4.5, abs=1e-12), "nothing": 0.0}


def test_nothing_to_measure_is_no_error() -> None:
    assert evaluate(nn.Identity(), Evaluation([]), Ranks(), CPU, PLAIN) == {}
    assert evaluate(nn.Identity(), Evaluation([], {"sum": _sum}), Ranks(), CPU, PLAIN) == {"sum": 0.0}
    assert evaluate(nn.Identity(), Evaluation([ROWS]), Ranks(), CPU, PLAIN) == {}


def test_three_ranks_share_the_batches_and_add_in_their_order() -> None:
    """Sums that depend on their order: 1e16 and -1e16 come apart, and 1 between them is lost."""
    values = [1e16, 1.0, -1e16, 3.0, 1e16, 1.0, -1e16]
    data = [torch.tensor([[value]], dtype=torch.float64) for value in values]
    total = 0.0
    for value in values:
        total += value
    assert total != math.fsum(values)
    evaluation, handed, seen = Evaluation(data, {"sum": _sum}), {}, []

    class Sees(nn.Identity):
        def forward(self, rows: Tensor) -> Tensor:
            seen.append(float(rows))
            return rows

    for rank in (2, 1, 0):
        found = evaluate(Sees(), evaluation, OneOfThree(rank, handed), CPU, PLAIN)
    assert found == {"sum": total / 7} == evaluate(nn.Identity(), evaluation, Ranks(), CPU, PLAIN)
    # Each batch is measured by one rank; a rank that has fewer hands on zeros.
    assert seen == [values[2], values[5], values[1], values[4], values[0], values[3], values[6]]
    assert [len(handed[rank]) for rank in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_evaluated_without_gradients_and_left_in_its_mode(training: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    model.train(training)
    modes: list[tuple[bool, bool]] = []

    def metric(model: nn.Module, data: Data) -> Tensor:
        modes.append((model.training, torch.is_grad_enabled()))
        return model(data).mean()

    evaluate(model, Evaluation([ROWS], {"m": metric}), Ranks(), CPU, PLAIN)
    assert modes == [(False, False)]
    assert (model.training, model[1].training) == (training, training)

    def fails(model: nn.Module, data: Data) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(model, Evaluation([ROWS], {"m": fails}), Ranks(), CPU, PLAIN)
    assert model.training == training


def test_metrics_run_in_the_precision_of_the_run() -> None:
    kinds: list[torch.dtype] = []

    def metric(model: nn.Module, data: Data) -> Tensor:
        kinds.append(model(data).dtype)
        return torch.zeros(())

    for enabled in (False, True):
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=enabled)
        evaluate(nn.Linear(1, 1), Evaluation([ROWS], {"m": metric}), Ranks(), CPU, autocast)
    assert kinds == [torch.float32, torch.bfloat16]


def test_buffers_are_put_back_also_after_an_error() -> None:
    model = nn.BatchNorm1d(2)

    def moves() -> None:
        model(torch.ones(4, 2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), kept_state(model):
        moves()
    assert (model.running_mean.tolist(), int(model.num_batches_tracked)) == ([0, 0], 0)


def test_recalibrated_statistics_are_the_plain_average_of_all_passes() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.3), nn.Dropout(0.5))
    model.eval()
    data = [torch.randn(5, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    modes: list[tuple[bool, bool]] = []

    def forward(rows: Tensor) -> Callable[[], object]:
        def run() -> None:
            modes.append((model.training, torch.is_grad_enabled()))
            model(rows)

        return run

    model[0].running_mean.fill_(99.0)
    recalibrate(model, [model[0], nn.Linear(1, 1)], [forward(rows) for rows in data])
    torch.testing.assert_close(model[0].running_mean, torch.stack([rows.mean(0) for rows in data]).mean(0))
    torch.testing.assert_close(model[0].running_var, torch.stack([rows.var(0) for rows in data]).mean(0))
    assert modes == [(True, False)] * 3
    assert (model[0].momentum, model.training, model[0].training) == (0.3, False, False)


def test_without_passes_the_running_statistics_stay() -> None:
    layer = nn.BatchNorm1d(2)
    layer.running_mean.fill_(99.0)
    recalibrate(layer, [layer], [])
    assert layer.running_mean.tolist() == [99.0, 99.0]
    ran: list[int] = []
    recalibrate(nn.Linear(1, 1), [], [lambda: ran.append(1)])
    assert ran == []


def test_a_recalibration_that_fails_leaves_momentum_and_mode() -> None:
    layer = nn.BatchNorm1d(2, momentum=0.3)
    layer.eval()

    def fails() -> None:
        assert layer.momentum is None
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recalibrate(layer, [layer], [fails])
    assert (layer.momentum, layer.training) == (0.3, False)
