"""A method's state is tensors by name, which a checkpoint holds; whatever else it keeps there is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from cosmati.core.loss import Classification
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

ROWS = torch.ones(8, 6), torch.arange(8) % 3


@dataclass(frozen=True, kw_only=True)
class Counting(Method):
    """Counts the steps that it has seen, in whatever it is given to begin with."""

    stage: ClassVar[Stage] = Stage.AVERAGE
    first: Any = 0
    then: Any = None

    def init(self, weights: Pieces) -> State:
        return {"count": self.first} if self.first is not None else None  # type: ignore[return-value]

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        return {"count": state["count"] + 1} if self.then is None else self.then


def trained(method: Method, budget: str, folder: Path | None = None) -> Trainer:
    torch.manual_seed(0)
    config = RunConfig(budget=budget, num_threads=1, run_folder=folder, change=("budget",))
    trainer = Trainer(
        nn.Linear(6, 3), Classification(3), [ROWS] * 9, optimizers=[SGD(lr=0.1)], methods=[method], config=config
    )
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("method", "held"),
    [
        (Counting(), "count: int"),
        (Counting(first=[torch.zeros(1)]), "count: list"),
        (Counting(first=None), "NoneType"),
        (Counting(first=torch.zeros(1), then={"a": torch.zeros(1), "b": None}), "a: Tensor, b: NoneType"),
        (Counting(first=torch.zeros(1), then=[]), "list"),
    ],
)
def test_what_isnt_a_tensor_is_refused_by_name(method: Method, held: str) -> None:
    with pytest.raises(PlanError, match=rf"Counting's state is {held}, where checkpoints hold a dict of tensors"):
        trained(method, "2ba")


@pytest.mark.parametrize("first", [torch.zeros(()), torch.zeros(2, 2, dtype=torch.float64)])
def test_tensors_come_back(first: torch.Tensor, tmp_path: Path) -> None:
    trained(Counting(first=first), "2ba", tmp_path)
    again = trained(Counting(first=first), "5ba", tmp_path)
    (state,) = again.methods.states.values()
    assert torch.equal(state["count"], torch.full_like(first, 5.0))
