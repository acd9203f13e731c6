"""SAM's second pass over a step: the same route as the first, and the parameters put back as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from cosmati.core.loss import Classification
from cosmati.core.method import Method, Position, Stage
from cosmati.data.in_memory import InMemory
from cosmati.methods import SAM
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class FirstLayerFrozen(Method):
    """The first layer never learns."""

    stage: ClassVar[Stage] = Stage.ROUTE

    def frozen(self, parameters: Sequence[str], at: Position) -> frozenset[str]:
        return frozenset(name for name in parameters if name.startswith("layers.0."))


def _moved(rate: float, num_microbatches: int, *methods: Method) -> set[str]:
    """Train three steps, and return the names of the parameters that aren't what they were, bit for bit."""
    generator = torch.Generator().manual_seed(2)
    rows: tuple[Tensor, Tensor] = (
        torch.randn(24, 5, generator=generator),
        torch.randint(3, (24,), generator=generator),
    )
    torch.manual_seed(0)
    model = MLP((5, 8, 8, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = RunConfig(budget="3ba", num_microbatches=num_microbatches, num_threads=1)
    source = InMemory(rows, 8)
    Trainer(
        model, Classification(3), source, optimizers=[SGD(lr=rate, momentum=0.9)], methods=methods, config=config
    ).fit()
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_is_frozen_stays_so_in_the_second_pass(num_microbatches: int) -> None:
    learning = {f"layers.{layer}.{name}" for layer in (1, 2) for name in ("weight", "bias")}
    assert _moved(0.1, num_microbatches, FirstLayerFrozen(), SAM(rho=0.5)) == learning


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_parameters_are_put_back_bit_for_bit(num_microbatches: int) -> None:
    """At a learning rate of 0 nothing may move; with rho at 50, w + e - e is another number than w."""
    assert _moved(0.0, num_microbatches, SAM(rho=50.0)) == set()
    assert len(_moved(0.1, num_microbatches, SAM(rho=50.0))) == 6
