"""What an observer or a loop of the user's own sets between steps, and forward reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.trainer import Trainer
from tests.train.promises.swapped import TAXONOMY, Case, Positions, leaked


class Tempered(nn.Module):
    """A temperature that somebody else sets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tau = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.tau

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.between(self.first(rows)))
        return output


class Tau(Observer):
    """Sets what forward reads from what a step's loss was."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.model: Tempered | None = None

    def on_step(self, outcome: StepOutcome) -> None:
        assert self.model is not None
        if self.where == "attribute":
            self.model.tau = 1 + float(outcome.loss)
        elif self.where == "buffer":
            self.model.scale.fill_(1 + float(outcome.loss))
        else:
            self.model.teacher.data.fill_(float(outcome.loss))


class Set(Tempered):
    """A buffer and a frozen parameter that somebody else sets, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.teacher = nn.Parameter(torch.zeros(()), requires_grad=False)

    def between(self, hidden: Tensor) -> Tensor:
        return super().between(hidden) * self.scale + self.teacher


@pytest.mark.parametrize("where", ["attribute", "buffer", "teacher"])
def test_what_an_observer_sets_carries_content(where: str) -> None:
    def run(swapped: int | None) -> Trainer:
        torch.manual_seed(0)
        observer, case = Tau(where), Case(Set, ("first.*", "teacher"), ("second.*",))
        model = observer.model = Set()
        source = Positions(case.make, case.swap, swapped)
        trainer = Trainer(
            model,
            Classification(3),
            source,
            optimizers=[SGD(lr=0.1)],
            policy=case.policy(),
            taxonomy=TAXONOMY,
            observers=[observer],
            config=RunConfig(budget="6ba", num_microbatches=4, num_threads=1),
        )
        trainer.fit()
        return trainer

    one, other = run(None), run(5)
    # The control: the last step's denied rows are there, beside what the trainer itself has learnt.
    name = {"attribute": "tau", "buffer": "scale", "teacher": "teacher"}[where]
    assert getattr(one.model, name) != getattr(other.model, name)
    assert not {"first.weight", "first.bias"} & set(leaked(one, other))
    for promise in (Promise.NO_DIRECT_WRITE, Promise.PARITY):
        assert not one.plan.holds(promise)
    assert f"{name} changes between steps, and what sets it may follow from any row" in str(one.plan)
    # A buffer and a parameter are in each checkpoint.
    assert one.plan.holds(Promise.RESUME) == one.plan.holds(Promise.ELASTIC) == (where != "attribute")


class Books:
    """A loss that's a method of what a loop keeps its books in."""

    def __init__(self) -> None:
        self.epoch, self.losses, self.best = 0, [0.0], 9.0

    def loss(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(data[0]), data[1])


class ByString(Books):
    def loss(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, data) * getattr(self, "best", 1.0)


def best_of(kept: Books) -> float:
    return kept.best


class ByHelper(Books):
    def loss(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, data) * best_of(self)


class AsAWhole(Books):
    def loss(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, data) * list(vars(self).values())[-1]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Books, ""),
        (ByString, "loss.best "),
        (ByHelper, "loss.best "),
        (AsAWhole, "loss.best, loss.losses "),
    ],
)
def test_books_that_no_code_of_the_loss_reads_withdraw_nothing(kind: type[Books], told: str) -> None:
    books, config = kind(), RunConfig(budget="5ba", num_threads=1)
    with Trainer(nn.Linear(6, 3), books.loss, optimizers=[SGD(lr=0.1)], config=config) as trainer:
        for step in range(5):
            trainer.step((torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)))
            books.epoch, books.best = step, books.best / 2
            books.losses.append(books.best)
    assert trainer.plan.holds("resume") == trainer.plan.holds("parity") == (not told)
    assert f"{told}changes between steps" in str(trainer.plan) or not told


def test_what_follows_from_the_position_may_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tempered, "forward_caches", ("tau",), raising=False)
    model, config = Tempered(), RunConfig(budget="5ba", num_threads=1)
    with Trainer(model, Classification(3), optimizers=[SGD(lr=0.1)], config=config) as trainer:
        for step in range(5):
            model.tau = 1 / (1 + step)
            trainer.step((torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)))
    assert trainer.plan.holds("resume")
    assert trainer.plan.holds("parity")
