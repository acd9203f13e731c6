"""Metrics that people bring: stateful ones, numbers of every kind, and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import cosmati
from cosmati.core.batch import Batch, Data, Lineage
from cosmati.core.loss import Classification
from cosmati.errors import BatchError, DataError
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, Stateful, batches, evaluate
from cosmati.train.ranks import Ranks
from cosmati.train.trainer import Trainer

CPU = torch.device("cpu")
PLAIN = torch.autocast("cpu", torch.bfloat16, enabled=False)
LOGITS = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(4, (50,), generator=torch.Generator().manual_seed(2)) ** 2 // 3
MACRO_F1 = f1_score(TARGETS, LOGITS.argmax(1), average="macro")


class MacroF1:
    """The mean of the classes' F1, from counts over all rows."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts = np.zeros((4, 4), int)

    def update(self, predicted: Tensor, target: Tensor) -> None:
        np.add.at(self.counts, (target.numpy(), predicted.numpy()), 1)

    def compute(self) -> float:
        hits, sums = self.counts.diagonal(), self.counts.sum(0) + self.counts.sum(1)
        return float((2 * hits[sums > 0] / sums[sums > 0]).mean())


class Synced(nn.Module):
    """As torchmetrics': a module that can be called, and gathers what other ranks have seen unless told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.sync_on_compute, self._to_sync, self.total, self.moved = True, True, 0.0, []
        self.inner = nn.Identity()
        self.inner.sync_on_compute = True

    def forward(self, predicted: Tensor, target: Tensor) -> Tensor:
        raise AssertionError("means something else")

    def to(self, *arguments: Any, **named: Any) -> Synced:
        self.moved.append(arguments)
        return super().to(*arguments, **named)

    def reset(self) -> None:
        self.total = 0.0

    def update(self, logits: Tensor, target: Tensor) -> None:
        assert logits.shape == (len(target), 4)
        self.total += len(target)

    def compute(self) -> dict[str, Any]:
        world = 2 if self._to_sync or self.sync_on_compute or self.inner.sync_on_compute else 1
        return {"rows": torch.tensor(self.total * world), "share": np.float32(0.5)}


class OneOf(Ranks):
    """A rank of several, to whom the others' rows are handed."""

    def __init__(self, rank: int, world: int, others: dict[int, Tensor]) -> None:
        super().__init__()
        self.rank, self.world, self.others = rank, world, others

    def gather_by_rank(self, rows: Tensor) -> Tensor:
        self.others[self.rank] = rows
        return torch.cat([self.others.get(rank, rows) for rank in range(self.world)])


def _predict(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    return model(data[0]).argmax(1), data[1]


def _run(metric: Any, data: Any = None, ranks: Ranks | None = None) -> dict[str, float]:
    data = batches((LOGITS, TARGETS), 7) if data is None else data
    return evaluate(nn.Identity(), Evaluation(data, {"m": metric}), ranks or Ranks(), CPU, PLAIN)


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_a_stateful_metric_is_that_of_all_rows(rows: int) -> None:
    metric = Stateful(MacroF1(), _predict)
    for _ in range(2):  # it forgets what it has seen
        found = _run(metric, batches((LOGITS, TARGETS), rows))
        assert found == {"m": pytest.approx(MACRO_F1, abs=1e-12)}
    by_batch = [f1_score(y, x.argmax(1), average="macro") for x, y in batches((LOGITS, TARGETS), 7)]
    assert abs(float(np.mean(by_batch)) - MACRO_F1) > 0.01, "a mean over batches is something else"


@pytest.mark.parametrize("world", [2, 3])
def test_it_has_one_value_on_any_number_of_ranks(world: int) -> None:
    """Beside a mean, which is shared out."""
    data = batches((LOGITS, TARGETS), 7)
    seen: list[int] = []

    def mean(model: nn.Module, data: Data) -> Tensor:
        seen.append(len(data[0]))
        return data[0].mean()

    metrics = {"mean": mean, "f1": Stateful(MacroF1(), _predict)}
    expected = evaluate(nn.Identity(), Evaluation(data, metrics), Ranks(), CPU, PLAIN)
    seen.clear()
    handed: dict[int, Tensor] = {}
    for rank in reversed(range(world)):
        found = evaluate(nn.Identity(), Evaluation(data, metrics), OneOf(rank, world, handed), CPU, PLAIN)
        assert found["f1"] == expected["f1"]
    assert found == expected
    assert len(seen) == len(data)


def test_a_metric_of_torchmetrics_kind_is_given_output_and_target_and_does_not_gather() -> None:
    metric = Synced()
    assert _run(metric) == {"m/rows": 50.0, "m/share": 0.5}
    assert (metric.sync_on_compute, metric._to_sync, metric.inner.sync_on_compute) == (True, True, True)
    assert metric.moved == [(CPU,)]

    class Fails(Synced):
        def compute(self) -> dict[str, Any]:
            raise ZeroDivisionError

    failing = Fails()
    with pytest.raises(ZeroDivisionError):
        _run(failing)
    assert failing.sync_on_compute


def test_a_trainer_takes_a_stateful_metric() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    evaluation = cosmati.Evaluation([(LOGITS, TARGETS)], {"f1": cosmati.Stateful(MacroF1(), _predict)})
    config = RunConfig(budget="1ba", num_threads=1)
    trainer = Trainer(
        model, Classification(4), [(LOGITS, TARGETS)], optimizers=[SGD(lr=0.1)], config=config, evaluation=evaluation
    )
    result = trainer.fit()
    expected = f1_score(TARGETS, model(LOGITS).argmax(1), average="macro")
    assert result.metrics == {"f1": pytest.approx(expected, abs=1e-12)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.25, 0.25), (2, 2.0), (True, 1.0), (np.float32(0.5), 0.5), (torch.tensor([0.75]), 0.75), (math.nan, math.nan)],
)
def test_numbers_of_every_kind_are_metrics(value: Any, expected: float) -> None:
    assert _run(lambda model, data: value)["m"] == pytest.approx(expected, nan_ok=True)


class Odd(MacroF1):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"a": 1.0}, r"'m' returned a dict, and a metric is one number: .*metrics=\{'a'"),
        (torch.zeros(3), r"'m' returned a Tensor of shape \(3,\)"),
        (None, "returned a NoneType"),
        ("0.5", "returned a str"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, match: str) -> None:
    with pytest.raises(BatchError, match=match):
        _run(lambda model, data: value)
    if not isinstance(value, dict):
        with pytest.raises(BatchError, match=match):
            _run(Stateful(Odd(value), _predict))


def _again() -> Any:
    return iter([(LOGITS, TARGETS)])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (_again, r"list_iterator can be read only once, and every evaluation .*list\(\.\.\.\)"),
        (lambda: TensorDataset(LOGITS, TARGETS), r"TensorDataset gives rows"),
        (lambda: DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0)), "share of its own"),  # type: ignore[arg-type]
    ],
)
def test_data_that_are_not_the_same_batches_each_time_are_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        Evaluation(make(), {})


def test_ranks_do_not_share_out_shuffled_batches() -> None:
    loader = DataLoader(TensorDataset(LOGITS, TARGETS), batch_size=7, shuffle=True)
    assert _run(Stateful(MacroF1(), _predict), loader)["m"] == pytest.approx(MACRO_F1)
    with pytest.raises(DataError, match="shuffle=False"):
        _run(lambda model, data: 1.0, loader, OneOf(0, 2, {}))


def test_batches_of_every_kind_are_evaluated() -> None:
    def named(model: nn.Module, data: Data) -> Tensor:
        assert len(data["text"]) == len(data["x"])
        return data["x"].mean()

    data = {"text": [str(i) for i in range(50)], "x": LOGITS, "scale": torch.tensor(2.0)}
    found = evaluate(nn.Identity(), Evaluation(batches(data, 7), {"m": named}), Ranks(), CPU, PLAIN)
    assert found["m"] == pytest.approx(float(LOGITS.double().mean()), abs=1e-7)
    batch = Batch((LOGITS, TARGETS), Lineage.of_rows(0, 50))
    assert _run(Stateful(MacroF1(), _predict), [batch])["m"] == pytest.approx(MACRO_F1)
