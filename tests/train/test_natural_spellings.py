"""What people write first works, or the error has the line that does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati import Classification, Evaluation, InMemory, Loss, RunConfig, Stateful, Trainer, accuracy
from cosmati.core.method import Method, Stage
from cosmati.errors import DataError
from cosmati.methods import ALL, EMA, LabelSmoothing
from cosmati.optim import SGD, Cosine

ROWS = (torch.arange(96.0).reshape(24, 4).sin(), torch.arange(24) % 3)


def trained(**changes: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    torch.manual_seed(0)
    given = {"optimizers": [SGD(lr=0.1)], "config": RunConfig(budget="2ep", progress=False)} | changes
    trainer = Trainer(nn.Linear(4, 3), Classification(3), InMemory(ROWS, 8), **given)
    return dict(trainer.model.state_dict()), dict(trainer.fit().metrics)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_one_method_or_optimizer_needs_no_list() -> None:
    listed, _ = trained(optimizers=[SGD(lr=0.1)], methods=[LabelSmoothing(smoothing=0.2)])
    alone, _ = trained(optimizers=SGD(lr=0.1), methods=LabelSmoothing(smoothing=0.2))
    assert same(listed, alone)
    assert not same(alone, trained()[0])


def test_an_optimizer_of_pytorchs_needs_no_list_either() -> None:
    found = []
    for is_listed in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(
            model,
            Classification(3),
            InMemory(ROWS, 8),
            optimizers=[optimizer] if is_listed else optimizer,
            config=RunConfig(budget="2ep", progress=False),
        ).fit()
        found.append(model.state_dict())
    assert same(*found)


def mean_logit(model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
    return Loss(model(data[0]).mean(1).sum(), float(len(data[0])))


class Largest:
    def reset(self) -> None:
        self.largest = 0.0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.largest = max(self.largest, float(output.max()))

    def compute(self) -> float:
        return self.largest


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (accuracy, {"accuracy"}),
        ([accuracy, mean_logit], {"accuracy", "mean_logit"}),
        ((accuracy, Stateful(Largest())), {"accuracy", "Largest"}),
        (Largest(), {"Largest"}),
    ],
)
def test_metrics_in_a_list_or_alone_are_called_as_they_are(given: Any, names: set[str]) -> None:
    by_name = {"accuracy": accuracy, "mean_logit": mean_logit, "Largest": Stateful(Largest())}
    expected = trained(evaluation=Evaluation([ROWS], {name: by_name[name] for name in names}))[1]
    assert trained(evaluation=Evaluation([ROWS], given))[1] == expected
    assert set(expected) == names


@pytest.mark.parametrize("given", [[accuracy, accuracy], [lambda model, data: 0.0], lambda model, data: 0.0])
def test_metrics_without_names_of_their_own_are_asked_for_them(given: Any) -> None:
    with pytest.raises(ValueError, match=r"(accuracy|<lambda>)\. Name them: Evaluation\(data, \{'accuracy': \.\.\."):
        Evaluation([ROWS], given)


@pytest.mark.parametrize("name", ["step", "rows", "tokens", "seconds"])
def test_no_metric_takes_a_name_of_the_clock(name: str) -> None:
    """Its value would stand in place of the clock's in every line of the run's evaluations."""
    with pytest.raises(ValueError, match=f"A metric is called '{name}'.*Give it another one: .'mean {name}'"):
        Evaluation([ROWS], {"accuracy": accuracy, name: accuracy})


@pytest.mark.parametrize(
    ("made", "call"),
    [
        (lambda: LabelSmoothing(0.1), r"LabelSmoothing\(smoothing=0\.1\)"),
        (lambda: EMA("10ba"), r"EMA\(half_life='10ba'\)"),
        (lambda: SGD(0.1), r"SGD\(lr=0\.1\)"),
        (lambda: SGD(0.1, momentum=0.9), r"SGD\(lr=0\.1, momentum=0\.9\)"),
    ],
)
def test_settings_without_names_are_told_by_which(made: Callable[[], object], call: str) -> None:
    with pytest.raises(TypeError, match=f"takes its settings by name: {call}"):
        made()


def test_every_method_tells_its_first_setting() -> None:
    for kind in ALL:
        names = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
        if names:
            with pytest.raises(TypeError, match=rf"{kind.__name__}\({names[0]}=7\)"):
                kind(7)  # type: ignore[call-arg]


def test_a_tuple_of_tensors_is_no_list_of_batches() -> None:
    options = {"optimizers": SGD(lr=0.1), "config": RunConfig(budget="1ep", progress=False)}
    with pytest.raises(DataError, match=r"Give InMemory\(data, rows_per_step=32\) to train on"):
        Trainer(nn.Linear(4, 3), Classification(3), ROWS, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"batches\(data, 32\) to evaluate on"):
        Evaluation(ROWS, accuracy)


def test_a_class_of_the_users_own_may_take_what_it_likes() -> None:
    class Plain(Method):
        stage = Stage.LABEL

        def __init__(self, amount: float, *, more: int = 0) -> None:
            self.amount, self.more = amount, more

    assert (Plain(3.0).amount, Plain(3.0, more=2).more) == (3.0, 2)
    with pytest.raises(TypeError, match="positional arguments"):
        Plain(1.0, 2)  # type: ignore[misc]


@pytest.mark.parametrize("kind", [partial(LabelSmoothing, smoothing=0.3), partial(SGD, lr=0.2, schedule=Cosine())])
def test_configurations_are_copied_and_pickled_as_before(kind: Callable[[], object]) -> None:
    one = kind()
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == dataclasses.replace(one) == one  # type: ignore[type-var]
