"""Metrics are read batch by batch on their own, summed in order, and leave model, losses and metrics as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import Loss
from cosmati.errors import BatchError, DataError
from cosmati.train import evaluation
from cosmati.train.evaluation import Evaluation, Stateful, accuracy, batches, evaluate, try_out
from cosmati.train.ranks import Ranks

CPU = torch.device("cpu")
DATA = [(torch.full((2, 3), float(i)), torch.tensor([i, 0])) for i in range(3)]


def run(metrics: Any, data: Any = None, model: nn.Module | None = None, **given: Any) -> dict[str, float]:
    own = Evaluation(DATA if data is None else data, metrics, classes=given.pop("classes", ()))
    return evaluate(
        model or nn.Identity(),
        own,
        given.pop("ranks", Ranks.alone()),
        CPU,
        given.pop("autocast", nullcontext()),
        **given,
    )


class Noting:
    """A stateful metric that notes what it's asked."""

    def __init__(self, value: Any = 3.0) -> None:
        self.value, self.told = value, list[Any]()
        self.sync_on_compute, self._to_sync = True, "own"

    def reset(self) -> None:
        self.told.append("reset")

    def update(self, *given: Any) -> None:
        self.told.append(given)

    def compute(self) -> Any:
        self.told.append((self.sync_on_compute, self._to_sync))
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize("name", ["step", "rows", "tokens", "seconds"])
@pytest.mark.parametrize("is_named", [True, False])
def test_no_metric_is_called_as_a_field_of_the_clock(name: str, is_named: bool) -> None:
    def metric(model: nn.Module, data: Any) -> float:
        return 0.0

    metric.__name__ = name
    with pytest.raises(ValueError, match=rf"A metric is called '{name}', .*\{{'mean {name}': \.\.\.\}}"):
        Evaluation(DATA, {"loss": metric, name: metric} if is_named else metric)


def test_a_metric_alone_or_in_a_list_has_its_own_name() -> None:
    assert list(Evaluation(DATA, accuracy).by_name()) == ["accuracy"]
    assert list(Evaluation(DATA, [accuracy, Stateful(Noting())]).by_name()) == ["accuracy", "Noting"]


def test_by_default_a_stateful_metric_reads_output_and_target() -> None:
    noting = Noting()
    assert run(noting, DATA[1:2], nn.Softmax(1)) == {"Noting": 3.0}
    (output, target) = noting.told[1]
    assert torch.equal(output, torch.full((2, 3), 1 / 3))
    assert torch.equal(target, DATA[1][1])
    assert noting.told[0] == "reset"
    assert noting.told[2] == (False, False), "all ranks have seen the same batches"
    assert (noting.sync_on_compute, noting._to_sync) == (True, "own")


def test_what_a_metric_gathers_is_put_back_where_it_fails() -> None:
    noting = Noting(KeyError("empty"))
    with pytest.raises(KeyError, match="empty"):
        run(noting)
    assert (noting.sync_on_compute, noting._to_sync) == (True, "own")


def test_several_values_of_one_metric_have_its_name_before_theirs() -> None:
    found = run({"f1": Noting({"macro": torch.tensor([0.5]), "micro": 2})})
    assert found == {"f1/macro": 0.5, "f1/micro": 2.0}


class Module(nn.Module):
    """A metric that is a module with a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.sync_on_compute = True  # type: ignore[assignment]
        self.told: list[Any] = []

    def reset(self) -> None:
        self.told.append("reset")

    def to(self, *given: Any, **named: Any) -> Module:  # type: ignore[override]
        self.told.append(given)
        return self

    def update(self, *given: Any) -> None:
        self.told.append("update")

    def compute(self) -> float:
        return float(self.part.sync_on_compute)  # type: ignore[arg-type]


def test_a_metric_that_is_a_module_runs_on_the_device_and_its_parts_do_not_gather() -> None:
    metric = Module()
    assert run({"m": metric}) == {"m": 0.0}
    assert metric.told == ["reset", (CPU,), "update", "update", "update"]
    assert metric.part.sync_on_compute is True


def test_what_lacks_a_part_of_a_stateful_metric_is_a_mean() -> None:
    class Half:
        def update(self) -> None:
            raise AssertionError

        def compute(self) -> None:
            raise AssertionError

        def __call__(self, model: nn.Module, data: Any) -> Tensor:
            return data[0].mean()

    assert run({"half": Half()}) == {"half": 1.0}


def test_a_scalar_weighs_as_many_rows_as_its_batch_has_and_a_loss_what_it_says() -> None:
    data = [(torch.ones(1, 2),), (torch.full((3, 2), 5.0),)]
    assert run({"mean": lambda _, rows: rows[0].mean()}, data) == {"mean": 4.0}
    assert run({"own": lambda _, rows: Loss(rows[0].sum(), 2)}, data) == {"own": 8.0}
    assert run({"none": lambda _, rows: Loss(rows[0].sum() * 0, 0.0)}, data) == {"none": 0.0}


def test_sums_are_added_in_the_order_of_the_batches() -> None:
    data = [torch.full((1, 1), value) for value in (1e16, 1.0, -1e16)]
    assert run({"sum": lambda _, rows: Loss(rows.double().sum(), 1 / 3)}, data) == {"sum": 0.0}
    assert evaluation._ordered_sum(torch.tensor([1e16, -1e16, 1.0], dtype=torch.float64)) == 1.0


@pytest.mark.parametrize("value", [2, 2.0, True, np.float32(2), torch.tensor(2), torch.tensor([[2.0]])])
def test_one_number_of_any_kind_is_a_metric(value: Any) -> None:
    assert evaluation._number("m", value) == float(value)


def test_what_is_no_number_is_refused_by_name_kind_and_shape() -> None:
    with pytest.raises(BatchError, match=r"The metric 'm' returned a Tensor of shape \(2, 1\), and a metric is one"):
        evaluation._number("m", torch.ones(2, 1))
    with pytest.raises(BatchError, match=r"The metric 'm' returned a str, and a metric is one number"):
        evaluation._number("m", "2")


def test_accuracy_takes_indices_and_probabilities() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    found = accuracy(nn.Identity(), (logits, torch.tensor([1, 2])))
    assert (float(found.sum), found.weight) == (1.0, 2.0)
    found = accuracy(nn.Identity(), (logits, torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])))
    assert (float(found.sum), found.weight) == (2.0, 2.0)


def test_of_a_model_that_has_labels_those_count_that_are_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.tensor([[1.0, 3.0], [5.0, 0.0], [5.0, 0.0]]), torch.tensor([1, 1, -100])
    monkeypatch.setattr(
        evaluation, "with_own_labels", lambda model: "its own" if isinstance(model, nn.Identity) else None
    )
    monkeypatch.setattr(evaluation, "own_logits", lambda model, data: (logits, data["labels"]))
    found = accuracy(nn.Identity(), {"labels": labels})
    assert (float(found.sum), float(found.weight)) == (1.0, 2.0)
    plain = accuracy(nn.Softmax(1), {"x": logits, "labels": torch.tensor([1, 0, 0])})
    assert (float(plain.sum), plain.weight) == (3.0, 3.0)
    other = accuracy(nn.Identity(), {"x": logits, "y": torch.tensor([1, 0, 1])})
    assert (float(other.sum), other.weight) == (2.0, 3.0)


def test_an_index_that_is_out_of_range_is_said_and_another_one_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Exception] = []
    monkeypatch.setattr(evaluation, "refuse_index", seen.append)

    def metric(model: nn.Module, data: Any) -> float:
        raise IndexError("far out")

    with pytest.raises(IndexError, match="far out") as raised:
        run(metric)
    assert seen == [raised.value]


def test_a_metric_that_reads_what_another_has_changed_is_named() -> None:
    def writes(model: nn.Module, data: Any) -> float:
        data[0].add_(1)
        return 0.0

    data = [(torch.ones(2, 3), torch.zeros(2))]
    with pytest.raises(DataError, match="The metric 'second' would read other rows"):
        run({"first": writes, "second": writes}, data)


def test_a_batch_with_lineage_is_read_as_its_data() -> None:
    batch = Batch(DATA[1], Lineage.of_rows(2, 0))
    assert run({"mean": lambda _, rows: rows[0].mean()}, [batch]) == {"mean": 1.0}


def test_each_batch_is_read_without_gradients_in_the_precision_of_the_run() -> None:
    depth, seen = [0], list[Any]()

    @contextmanager
    def autocast() -> Iterator[None]:
        depth[0] += 1
        yield
        depth[0] -= 1

    class Again:
        def __enter__(self) -> None:
            self.own = autocast()
            self.own.__enter__()

        def __exit__(self, *given: object) -> None:
            self.own.__exit__(None, None, None)

    run({"m": lambda model, data: seen.append((depth[0], torch.is_grad_enabled())) or 0.0}, autocast=Again())
    assert seen == [(1, False)] * 3
    assert depth == [0]


class LossModule(nn.Module):
    """A loss with a part, which holds what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, model: nn.Module, data: Any) -> Tensor:
        self.get_buffer("seen").add_(1)
        return data[0].mean()


def test_model_and_losses_are_in_eval_mode_meanwhile() -> None:
    module, held, model = LossModule(), LossModule(), nn.Sequential(nn.Dropout(0.5))
    model[0].eval()
    held.part.eval()

    def function(model: nn.Module, data: Any) -> Tensor:
        return held(model, data)

    parts = [module, module.part, held, held.part, model, model[0]]
    before = [one.training for one in parts]
    assert before == [True, True, True, False, True, False]
    seen: list[list[bool]] = []
    metric = {"m": lambda *_: seen.append([one.training for one in parts]) or 0.0}
    run(metric, model=model, losses=(partial(module), function))
    assert seen == [[False] * 6] * 3
    assert [one.training for one in parts] == before

    def fails(*_: Any) -> float:
        raise BatchError("no")

    with pytest.raises(BatchError, match="no"):
        run({"m": fails}, model=model, losses=[module])
    assert [one.training for one in parts] == before


@pytest.mark.parametrize(("classes", "asked"), [("a", [("a",)]), (["a", "b"], [("a", "b")]), ((), [])])
def test_whose_own_parts_run_is_said_by_name(monkeypatch: pytest.MonkeyPatch, classes: Any, asked: list[Any]) -> None:
    found: list[Any] = []
    monkeypatch.setattr(evaluation, "enabled_classes", lambda model, *names: found.append(names) or nullcontext())  # type: ignore[func-returns-value]
    run({"m": lambda *_: 0.0}, classes=classes)
    assert found == asked


class OneOfTwo(Ranks):
    """One of two ranks, whose other one has nothing to say."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.world, self.rank = 2, rank

    def gather_by_replica(self, rows: Tensor) -> Tensor:
        other = torch.zeros_like(rows)
        return torch.cat([rows, other] if self.rank == 0 else [other, rows])


@pytest.mark.parametrize("rank", [0, 1])
def test_means_are_shared_out_and_a_stateful_metric_sees_all(rank: int) -> None:
    noting, seen = Noting(), list[float]()

    def mean(model: nn.Module, data: Any) -> Tensor:
        seen.append(float(data[0][0, 0]))
        return data[0].mean()

    found = run({"mean": mean, "all": noting}, ranks=OneOfTwo(rank))
    assert seen == ([0.0, 2.0] if rank == 0 else [1.0])
    assert found == {"mean": 1.0, "all": 3.0}
    assert len(noting.told) == 1 + 3 + 1
    seen.clear()
    run({"mean": mean}, [*DATA, DATA[0]], ranks=OneOfTwo(rank))
    assert seen == ([0.0, 2.0] if rank == 0 else [1.0, 0.0])


def test_ranks_do_not_share_out_what_a_loader_shuffles() -> None:
    loader: Any = DataLoader(torch.arange(4.0)[:, None], batch_size=2, shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"this loader shuffles on each\. Give it shuffle=False"):
        run({"m": lambda *_: 0.0}, loader, ranks=OneOfTwo(0))
    assert run({"m": lambda *_: 1.0}, loader) == {"m": 1.0}
    straight: Any = DataLoader(torch.arange(4.0)[:, None], batch_size=2)  # type: ignore[arg-type]
    assert run({"m": lambda *_: 1.0}, straight, ranks=OneOfTwo(0)) == {"m": 1.0}


class Once:
    """Data that mustn't be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError


def test_metrics_are_tried_out_on_a_lists_first_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    asked: list[Any] = []
    monkeypatch.setattr(evaluation, "enabled_classes", lambda model, *names: asked.append(names) or nullcontext())  # type: ignore[func-returns-value]
    loss, model, noting = LossModule(), nn.BatchNorm1d(3), Noting()

    def metric(own: nn.Module, data: Any) -> float:
        seen.append((float(data[0][0, 0]), loss.training, own.training))
        loss(own, data)
        model.get_buffer("running_mean").add_(1)
        return 0.0

    for kind in (list, tuple):
        given = Evaluation(kind(DATA[1:]), {"m": metric, "n": noting}, classes="a")
        try_out(model, given, CPU, nullcontext(), [loss])
    assert seen == [(1.0, False, False)] * 2
    assert asked == [("a",)] * 2
    assert noting.told == []
    assert float(loss.get_buffer("seen")) == 0
    assert model.get_buffer("running_mean").tolist() == [0.0] * 3
    for data in (Once(), [], ()):
        try_out(model, Evaluation(data, {"m": metric}), CPU, nullcontext())  # type: ignore[arg-type]
    assert len(seen) == 2


def test_what_is_tried_out_and_fails_leaves_the_state_too() -> None:
    model = nn.BatchNorm1d(3)

    def metric(own: nn.Module, data: Any) -> float:
        model.get_buffer("running_mean").add_(1)
        raise BatchError("no")

    with pytest.raises(BatchError, match="no"):
        try_out(model, Evaluation(DATA, {"m": metric}), CPU, nullcontext())
    assert model.get_buffer("running_mean").tolist() == [0.0] * 3


def test_rows_and_a_ranks_share_are_no_batches() -> None:
    with pytest.raises(DataError, match="gives rows one by one, or no rows, and batches are meant"):
        Evaluation(torch.ones(3, 2))
    share: Any = DataLoader(torch.arange(4.0)[:, None], batch_size=2)  # type: ignore[arg-type]
    share.num_replicas, share.rank = 2, 0
    with pytest.raises(DataError, match="gives each of 2 ranks a share of its own"):
        Evaluation(share)


def test_a_batch_that_a_metric_changes_is_told_by_its_number() -> None:
    def writes(model: nn.Module, data: Any) -> float:
        if data[0][0, 0] == 1:
            data[0].add_(1)
        return 0.0

    data = [(torch.full((2, 3), float(i)), torch.zeros(2)) for i in range(3)]
    with pytest.raises(DataError, match="Batch 1 of the data to evaluate on was changed in place"):
        run({"m": writes}, data)


def test_what_feeds_a_stateful_metric_is_its_own() -> None:
    noting = Noting()
    assert run({"s": Stateful(noting, lambda model, data: (model, 7))}, DATA[:1]) == {"s": 3.0}
    assert noting.told[1][1] == 7


@pytest.mark.parametrize(("rows", "sizes"), [(2, [2, 2, 1]), (5, [5]), (7, [5]), (1, [1] * 5)])
def test_a_nest_is_cut_into_batches_of_so_many_rows(rows: int, sizes: list[int]) -> None:
    found = batches((torch.arange(5), torch.arange(5) + 10), rows)
    assert [len(one[0]) for one in found] == sizes
    assert torch.cat([one[1] for one in found]).tolist() == [10, 11, 12, 13, 14]
