"""SAM against its formula in float64, and on a function whose sharpness is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.methods.sam import SAM

torch.set_num_threads(1)


def position(step: int = 0) -> Position:
    return Position(Clock(step=step), Budget(Time.parse("10ba")), 0, 0, nn.Identity(), None)


def gradients(seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (4, 3), "bias": (4,), "scale": ()}
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def perturbed(method: SAM, values: dict[str, Tensor], step: int = 0) -> dict[str, Tensor] | None:
    found = method.perturbation(Pieces(values), Pieces(values), position(step))
    return None if found is None else dict(found.tensors)


@pytest.mark.long
@given(st.integers(0, 99), st.floats(1e-3, 10), st.floats(1e-3, 1e3))
def test_against_the_formula(seed: int, rho: float, scale: float) -> None:
    values = gradients(seed, scale)
    kept = {name: value.clone() for name, value in values.items()}
    found = perturbed(SAM(rho=rho), values)
    assert found is not None
    assert list(found) == list(values)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in values.values()))
    for name, value in values.items():
        torch.testing.assert_close(found[name].double(), rho * value.double() / norm, atol=1e-6, rtol=1e-5)
        assert torch.equal(value, kept[name]), "the gradients stay"
    length = math.sqrt(sum(float(value.double().square().sum()) for value in found.values()))
    assert length == pytest.approx(rho, rel=1e-5)


def test_zero_gradient_stays_where_it_is() -> None:
    zero = {"weight": torch.zeros(3)}
    found = perturbed(SAM(), zero)
    assert found is not None
    assert torch.equal(found["weight"], torch.zeros(3))


def test_last_step_of_each_interval() -> None:
    values = gradients()
    passes = [perturbed(SAM(interval=3), values, step) is not None for step in range(7)]
    assert passes == [False, False, True, False, False, True, False]
    assert all(perturbed(SAM(), values, step) is not None for step in range(3))


def test_off() -> None:
    values = gradients()
    assert perturbed(SAM(rho=0.0), values) is None
    assert SAM(rho=0.0).couples == frozenset()
    assert SAM().couples == {"regions"}
    assert perturbed(SAM(), {}) is None, "a step in which nothing learns"


def test_leaves_the_sharp_minimum() -> None:
    """Two minima at equal height: a sharp one at -1, whose basin ends at -0.727, and a flat one at +1."""

    def loss(x: Tensor) -> Tensor:
        return torch.minimum(20 * (x + 1) ** 2, 0.5 * (x - 1) ** 2)

    def descend(rho: float) -> float:
        x = torch.tensor(-0.9, requires_grad=True)
        for _ in range(200):
            (gradient,) = torch.autograd.grad(loss(x), x)
            offset = perturbed(SAM(rho=rho), {"x": gradient})
            if offset is not None:
                moved = (x + offset["x"]).detach().requires_grad_()
                (gradient,) = torch.autograd.grad(loss(moved), moved)
            x = (x - 0.02 * gradient).detach().requires_grad_()
        return x.item()

    assert descend(0.0) == pytest.approx(-1, abs=0.01)
    assert descend(0.5) > -0.6


@pytest.mark.parametrize(
    "options", [{"rho": -1.0}, {"rho": math.nan}, {"rho": math.inf}, {"epsilon": 0.0}, {"interval": 0}]
)
def test_refuses_options(options: dict[str, Any]) -> None:
    assert SAM.stage is Stage.AGAIN
    with pytest.raises(PlanError, match="SAM can't use"):
        SAM(**options)
