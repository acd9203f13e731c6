"""What couples regions at times only is found: a counter's parity, and a region that is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.train.assembly import ScheduledOptimizer
from cosmati.train.couplings import counts_together, method_coupling


class EveryFewSteps(torch.optim.SGD):
    """Doubles the gradients of every second or third step, by a counter for all parameters."""

    couples: frozenset[str] = frozenset()
    period = 2
    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups if self.count % self.period == 0 else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        return super().step(closure)


@pytest.mark.parametrize("period", [2, 3])
def test_a_counter_for_all_is_told_whatever_it_is_divided_by(period: int) -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = EveryFewSteps(parameters, lr=0.1)
    optimizer.period = period
    weights = Pieces({"a": parameters[0], "b": parameters[1]}, {"a": 0, "b": 1})
    told = counts_together([ScheduledOptimizer(optimizer, None, (), frozenset())], weights)
    assert told == ("EveryFewSteps counts the steps in which another region alone has learnt",)


def _at(step: int) -> Position:
    return Position(Clock(step=step), Budget(Time.parse("9ba")), 1, 0, nn.Identity(), Classification(2))


class LeavesOut(Method):
    """Takes a region away where the other one's gradient is short (or, turned round, where it's long)."""

    stage = Stage.GRADIENT
    couples: frozenset[str] = frozenset()

    def __init__(self, *, if_long: bool) -> None:
        self.if_long = if_long

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        if len(gradients.names) < 2:
            return gradients
        longest = max(float(one.norm()) for one in gradients.tensors.values())
        return gradients.only(["a"]) if (longest > 100) == self.if_long else gradients


@pytest.mark.parametrize("if_long", [False, True])
def test_a_method_that_takes_a_region_away_because_of_another_is_told(*, if_long: bool) -> None:
    tensors: dict[str, Tensor] = {name: nn.Parameter(torch.zeros(3)) for name in ("a", "b")}
    weights = Pieces(tensors, {"a": 0, "b": 1})
    told = method_coupling(LeavesOut(if_long=if_long), weights, _at)
    assert told.endswith("lets one region's gradients act on another's")
