"""What several ranks and one process compute is told apart beyond the order of sums: by how much, of what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from cosmati.train.assembly import Assembly
from cosmati.train.parts_compared import _far_apart

FLOAT32, FLOAT64, BFLOAT16 = torch.float32, torch.float64, torch.bfloat16


def compared(one: dict[str, Tensor], other: dict[str, Tensor], *kinds: torch.dtype, precision: str = "float32") -> Any:
    parameters = [SimpleNamespace(tensor=torch.empty(0, dtype=kind)) for kind in kinds or (FLOAT32,)]
    run = SimpleNamespace(
        layout=SimpleNamespace(parameters=parameters), config=SimpleNamespace(precision=precision), generators=None
    )
    return _far_apart(cast("Assembly", run))(one, other)


@pytest.mark.parametrize(
    ("kinds", "precision", "tolerance"),
    [
        ((FLOAT64,), "float32", 1e-9),
        ((FLOAT32,), "float32", 1e-3),
        ((FLOAT32, FLOAT64), "float32", 1e-3),
        ((FLOAT32,), "bfloat16", 5e-2),
        ((BFLOAT16, FLOAT32), "float32", 5e-2),
    ],
)
def test_the_tolerance_follows_from_what_products_are_taken_in(kinds: Any, precision: str, tolerance: float) -> None:
    for name in ("the loss", "statistics", "the gradient of a"):
        value = {name: torch.full((4,), 3.0, dtype=FLOAT64)}
        near = {name: value[name] * (1 + 0.9 * tolerance)}
        far = {name: value[name] * (1 + 1.1 * tolerance)}
        assert compared(near, value, *kinds, precision=precision) == set()
        assert compared(far, value, *kinds, precision=precision) == {name}


def test_a_gradient_that_is_noise_beside_the_others_is_let_be() -> None:
    large = torch.ones(100)  # of norm 10
    for noise, found in ((0.9e-4, set[str]()), (1.1e-4, {"the gradient of key.bias"})):
        one = {"the gradient of weight": large, "the gradient of key.bias": torch.tensor([noise])}
        other = {**one, "the gradient of key.bias": torch.tensor([0.0])}
        assert compared(one, other) == found
    assert compared({"the loss": torch.tensor(1e-4), "the gradient of a": large}, {"the loss": torch.tensor(0.0)})


def test_what_one_side_has_not_and_other_shapes_and_draws_are_told_exactly() -> None:
    value = {"the gradient of a": torch.ones(2, 2)}
    assert compared(value, {}) == compared({}, value) == {"the gradient of a"}
    assert compared(value, {"the gradient of a": torch.ones(4)}) == {"the gradient of a"}
    draws = torch.full((5000,), 200, dtype=torch.uint8)
    assert compared({"draws": draws}, {"draws": draws.clone()}) == set()
    moved = draws.clone()
    moved[7] += 1
    assert compared({"draws": moved}, {"draws": draws}) == {"draws"}
