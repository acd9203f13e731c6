"""Evaluation, without a trainer: one value for each metric, whatever the batches, and a model left as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cosmati import RunConfig, Trainer
from cosmati.core.batch import Data
from cosmati.core.loss import Loss
from cosmati.errors import DataError
from cosmati.optim import SGD
from cosmati.train.evaluation import Evaluation, Stateful, accuracy, batches, evaluate, kept_state
from cosmati.train.ranks import Ranks
from cosmati.train.recalibration import recalibrate

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

    def gather_by_rank(self, rows: Tensor) -> Tensor:
        self.others[self.rank] = rows
        return torch.cat([self.others.get(rank, rows) for rank in range(3)])


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


def _halved(model: nn.Module, data: Data) -> Tensor:
    data["x"] = data["x"] / 2
    return data.pop("x").mean()


def _halved_in_place(model: nn.Module, data: Data) -> Tensor:
    return data["x"].div_(2).mean()


def _held() -> list[dict[str, Tensor]]:
    return [{"x": ROWS[i : i + 5].clone()} for i in (0, 5)]


class Halves:
    """A stateful metric's outputs, put into the batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    reset = compute = lambda self: float(len(self.seen))

    def update(self, value: float) -> None:
        self.seen.append(value)


def test_each_metric_has_the_batch_as_it_was_given() -> None:
    halves = Halves()
    stateful = Stateful(halves, lambda model, data: [float(_halved(model, data))])
    evaluation = Evaluation(_held(), {"a": _halved, "b": _halved, "c": stateful})
    found = evaluate(nn.Identity(), evaluation, Ranks(), CPU, PLAIN)
    assert (found["a"], found["b"], halves.seen) == (2.25, 2.25, [1.0, 3.5])


def test_a_batch_that_a_metric_writes_to_is_refused() -> None:
    """At once where the data hold it for sure, else when it's read again: a fresh one harms nobody."""

    def measure(evaluation: Evaluation) -> dict[str, float]:
        return evaluate(nn.Identity(), evaluation, Ranks(), CPU, PLAIN)

    one = {"a": _halved_in_place}
    with pytest.raises(DataError, match=r"Batch 0 of the data to evaluate on was changed in place.*clone\(\)"):
        measure(Evaluation(_held(), one))
    with pytest.raises(DataError, match=r"The metric 'b' would read other rows than were given"):
        measure(Evaluation(_held(), {**one, "b": _halved}))
    holding = Evaluation(DataLoader(_held(), batch_size=None, collate_fn=lambda batch: batch), one)  # type: ignore[arg-type]
    assert measure(holding) == {"a": 2.25}
    with pytest.raises(DataError, match=r"Batch 0 of the data to evaluate on was changed in place"):
        measure(holding)
    fresh = Evaluation(DataLoader(list(ROWS), 5, collate_fn=lambda rows: {"x": torch.stack(rows)}), one)  # type: ignore[arg-type]
    assert [measure(fresh), measure(fresh)] == [{"a": 2.25}] * 2


class Centred(nn.Module):
    """A loss with a running mean, which moves in training mode, and a count, which always does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, model: nn.Module, data: Data) -> Tensor:
        found = model(data[0])
        self.count += 1
        if self.training:
            self.mean.mul_(0.9).add_(found.detach().mean(0), alpha=0.1)
        return (found - self.mean - data[1]).square().mean() * (1 + self.count / 8)


@pytest.mark.parametrize("is_within", [False, True])
def test_evaluating_with_the_loss_leaves_its_state(is_within: bool) -> None:
    """As a metric it's in eval mode."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 2, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(4)]

    def trained(every: str | None) -> tuple[list[Tensor], list[bool]]:
        torch.manual_seed(0)
        loss, model, modes = Centred(), nn.Linear(2, 3), list[bool]()

        def metric(model: nn.Module, rows: Data) -> Tensor:
            modes.append(loss.training)
            return loss(model, rows)

        def within(model: nn.Module, rows: Data) -> Tensor:
            return 1 * loss(model, rows)

        config = RunConfig(budget="4ba", evaluate_every=every, num_microbatches=1, num_threads=1)
        evaluation = Evaluation(data[:2], {"loss": metric})
        Trainer(
            model, within if is_within else loss, data, optimizers=[SGD(lr=0.1)], evaluation=evaluation, config=config
        ).fit()
        assert loss.training
        return [*model.state_dict().values(), loss.mean], modes

    (rarely, _), (often, modes) = trained(None), trained("1ba")
    assert all(map(torch.equal, rarely, often))
    assert not any(modes)
    assert len(modes) > 8


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
