"""Who catches an error in mid-step and goes on has the run that never failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cosmati.core.batch import Data
from cosmati.core.method import Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.methods import GradientClipping
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.trainer import Trainer

pytestmark = pytest.mark.long


class Failing(Observer):
    """Fails once, at a place of the third step."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        self.place, self.error, self.step, self.has_failed = place, error, 0, False

    def on_step(self, outcome: StepOutcome) -> None:
        self.step = outcome.clock.step
        self.fail("report")

    def fail(self, place: str) -> None:
        if place == self.place and self.step == (3 if place == "report" else 2) and not self.has_failed:
            self.has_failed = True
            raise self.error(place)


@dataclass(frozen=True, kw_only=True)
class FailingMethod(Method):
    """Fails between backward and commit."""

    stage: ClassVar[Stage] = Stage.GRADIENT
    failing: Failing

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        self.failing.fail("gradients")
        return gradients


def _trained(num_microbatches: int, place: str, error: type[BaseException]) -> dict[str, Tensor]:
    failing = Failing(place, error)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(128, 5, generator=generator), torch.randint(3, (128,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def loss(model: nn.Module, data: Data) -> Tensor:
        value = cross_entropy(model(data[0]), data[1])
        failing.fail("loss")
        return value

    def hook(gradient: Tensor) -> None:
        failing.fail("backward")

    model[0].weight.register_hook(hook)
    trainer = Trainer(
        model,
        loss,
        InMemory(rows, 32),
        optimizers=[AdamW(lr=0.01)],
        methods=[GradientClipping(clipping_type="value", clipping_threshold=0.1), FailingMethod(failing=failing)],
        observers=[failing],
        config=RunConfig(budget="5ba", num_microbatches=num_microbatches, num_threads=1),
    )
    if place:
        with pytest.raises(error, match=place):
            trainer.fit()
        assert all(p.grad is None for p in model.parameters())
    trainer.fit()
    assert failing.has_failed == bool(place)
    return model.state_dict()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["loss", "backward", "gradients", "report"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_going_on_after_an_error(num_microbatches: int, place: str, error: type[BaseException]) -> None:
    whole, failed = _trained(num_microbatches, "", error), _trained(num_microbatches, place, error)
    assert all(torch.equal(whole[name], failed[name]) for name in whole)


@dataclass(frozen=True, kw_only=True)
class OfDictionaries(Method):
    """Returns what hooks returned in earlier releases."""

    stage: ClassVar[Stage] = Stage.GRADIENT

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        return dict(gradients.tensors)  # type: ignore[return-value]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_dictionary_of_gradients_is_refused_by_name(num_microbatches: int) -> None:
    model = nn.Linear(5, 3)
    rows = torch.randn(8, 5), torch.randint(3, (8,))
    trainer = Trainer(
        model,
        lambda model, data: cross_entropy(model(data[0]), data[1]),
        InMemory(rows, 8),
        optimizers=[AdamW(lr=0.01)],
        methods=[OfDictionaries()],
        config=RunConfig(budget="1ba", num_microbatches=num_microbatches, num_threads=1),
    )
    with pytest.raises(PlanError, match=r"OfDictionaries.gradients returned a dict.*gradients\.map"):
        trainer.fit()
