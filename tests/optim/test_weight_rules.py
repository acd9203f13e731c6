"""Cautious decay and steps on a sphere, entry by entry and by the formula, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim.weights import check_spheres, decay_where_agreed, more_options, radius_of, step_on_sphere


def test_decay_is_taken_where_the_update_moves_towards_zero() -> None:
    values = [-2.0, -1e-30, 0.0, 1e-30, 3.0]
    weight = torch.tensor([[w] * 5 for w in values])
    update = torch.tensor([values] * 5)

    def sign(number: float) -> int:
        return (number > 0) - (number < 0)

    expected = [[w * 0.75 if sign(u) * sign(w) >= 0 else w for u in values] for w in values]
    decay_where_agreed(weight, update, 0.25)
    assert torch.allclose(weight, torch.tensor(expected), rtol=1e-6, atol=0)
    assert weight[0, 3] == -2.0, "the signs differ, though the product is too small for its type"
    assert weight[0, 1] == -1.5


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2, 2)])
@pytest.mark.parametrize("lr", [0.1, 0.5])
def test_a_step_on_a_sphere_is_the_formula(shape: tuple[int, ...], lr: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, update = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    radius = radius_of(weight)
    assert float(radius) == pytest.approx(math.sqrt(sum(x * x for x in weight.flatten().tolist())))
    r, u = float(radius), update.flatten().tolist()
    norm = math.sqrt(sum(x * x for x in u))
    moved = [w - lr * r * x / norm for w, x in zip(weight.flatten().tolist(), u, strict=True)]
    length = math.sqrt(sum(x * x for x in moved))
    step_on_sphere(weight, update * 7, radius, lr)
    assert weight.flatten().tolist() == pytest.approx([r * x / length for x in moved])
    assert float(radius_of(weight)) == pytest.approx(r)


def test_an_update_of_zeros_leaves_weights_where_they_are() -> None:
    weight = torch.tensor([[3.0, 4.0]])
    step_on_sphere(weight, torch.zeros(1, 2), radius_of(weight), 0.5)
    assert weight.tolist() == [[3.0, 4.0]]
    assert radius_of(weight.bfloat16()).dtype == torch.float32
    assert radius_of(weight.double()).dtype == torch.float64


def test_only_options_that_are_on_are_in_a_group() -> None:
    assert more_options(cautious=False, hyperball=False) == {}
    assert more_options(cautious=True, hyperball=False) == {"cautious": True}
    assert more_options(cautious=False, hyperball=True) == {"hyperball": True}


def test_what_cannot_be_kept_on_a_sphere_is_refused() -> None:
    good, flat, zero = Parameter(torch.ones(2, 2)), Parameter(torch.ones(3)), Parameter(torch.zeros(2, 3))
    on = {"hyperball": True, "weight_decay": 0.0}
    check_spheres("Muon", [good, Parameter(torch.zeros(2, 2, device="meta"))], on)
    check_spheres("Muon", [flat, zero], {"hyperball": False, "weight_decay": 0.1})
    check_spheres("Muon", [flat, zero], {"weight_decay": 0.1})
    with pytest.raises(PlanError, match=r"Muon can.t use hyperball=True with weight_decay=0\.1"):
        check_spheres("Muon", [good], on | {"weight_decay": 0.1})
    with pytest.raises(PlanError, match=r"1 parameter\(s\) have less than two dimensions \(shapes \[\(3,\)\]\)"):
        check_spheres("Muon", [good, flat], on)
    with pytest.raises(PlanError, match=r"1 of them begin at 0 \(shapes \[\(2, 3\)\]\)"):
        check_spheres("Muon", [good, zero], on)
