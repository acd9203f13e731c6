"""Averages that an optimizer keeps are gathered from its owners, and cut as weights are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.optim.schedule_free import ScheduleFree
from cosmati.train.averaging import averaged_weights


class Cut:
    """A layout that says how it was asked: state of optimizers comes whole from it, and leaves as methods' pieces."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def pieces(self) -> list[tuple[str, Parameter]]:
        return [("w", self.weight)]

    def whole_state(self, tensors: dict[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        return {f"{name}": value + (1 if of_optimizers else 100) for name, value in tensors.items()}

    def own_state(self, tensors: dict[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        return {name: value * (100 if of_optimizers else 2) for name, value in tensors.items()}


def test_averages_come_whole_from_optimizers_and_are_cut_as_weights() -> None:
    weight = Parameter(torch.eye(2))
    optimizer = ScheduleFree([weight], lr=0.1)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    (own,) = optimizer.evaluation_weights().values()
    assembly: Any = SimpleNamespace(
        plan=SimpleNamespace(methods=()), layout=Cut(weight), optimizers=[SimpleNamespace(optimizer=optimizer)]
    )
    at: Any = None
    found = averaged_weights(assembly, {}, at)
    assert found is not None
    assert found.keys() == {"w"}
    assert torch.equal(found["w"], (own + 1) * 2)
