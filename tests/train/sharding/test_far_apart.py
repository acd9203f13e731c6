"""What several ranks and one process compute is told apart beyond the order of sums: by how much, of what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cosmati.core.virtual_shards import VirtualShards
from cosmati.train.parts_compared import _far_apart, _Seen, _tolerance

FLOAT32, FLOAT64, BFLOAT16 = torch.float32, torch.float64, torch.bfloat16


def compared(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-3) -> set[str]:
    return _far_apart(_Seen({}, one, True), _Seen({}, other, True), tolerance)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((FLOAT64,), (1e-9, 1e-12)),
        ((FLOAT32,), (1e-3, 4e-6)),
        ((FLOAT32, FLOAT64), (1e-3, 4e-6)),
        ((BFLOAT16, FLOAT32), (5e-2, 2e-3)),
        ((), (1e-3, 4e-6)),
    ],
)
def test_the_tolerance_follows_from_the_types_of_what_was_summed(
    kinds: tuple[torch.dtype, ...], expected: tuple[float, float]
) -> None:
    shards = VirtualShards(2)
    for kind in kinds:
        shards.total([torch.ones(3, dtype=kind)] * 2)
    assert _tolerance(shards) == expected


@pytest.mark.parametrize("tolerance", [1e-9, 1e-3, 5e-2])
@pytest.mark.parametrize("name", ["the loss", "statistics", "the buffer b", "the gradient of a"])
def test_what_is_further_apart_than_sums_lead_is_named(tolerance: float, name: str) -> None:
    value = {name: torch.full((4,), 3.0, dtype=FLOAT64)}
    assert compared({name: value[name] * (1 + 0.9 * tolerance)}, value, tolerance) == set()
    assert compared({name: value[name] * (1 + 1.1 * tolerance)}, value, tolerance) == {name}


def test_a_gradient_that_is_noise_beside_the_others_is_let_be() -> None:
    large = torch.ones(100)  # of norm 10
    for noise, found in ((0.9e-4, set[str]()), (1.1e-4, {"the gradient of key.bias"})):
        one = {"the gradient of weight": large, "the gradient of key.bias": torch.tensor([noise])}
        other = {**one, "the gradient of key.bias": torch.tensor([0.0])}
        assert compared(one, other) == found
    loss, none = ({"the loss": torch.tensor(value), "the gradient of a": large} for value in (1e-4, 0.0))
    assert compared(loss, none) == {"the loss"}


def test_what_one_side_has_not_and_other_shapes_and_draws_are_told_exactly() -> None:
    value = {"the gradient of a": torch.ones(2, 2)}
    assert compared(value, {}) == compared({}, value) == {"the gradient of a"}
    assert compared(value, {"the gradient of a": torch.ones(4)}) == {"the gradient of a"}
    draws = torch.full((5000,), 200, dtype=torch.uint8)
    assert compared({"draws": draws}, {"draws": draws.clone()}) == set()
    moved = draws.clone()
    moved[7] += 1
    assert compared({"draws": moved}, {"draws": draws}) == {"draws"}


def test_what_moves_as_far_by_itself_says_nothing() -> None:
    name = "the gradient of a"
    one, other = _Seen({}, {name: torch.tensor([1.0])}, True), _Seen({}, {name: torch.tensor([0.5])}, True)
    for by, expected in ((0.0, {name}), (0.1, {name}), (0.2, set[str]())):
        moved = _Seen({}, {name: torch.tensor([0.5 - by])}, True)
        assert _far_apart(one, other, 1e-3, moved) == expected


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_alike_where_it_is_the_same(odd: float) -> None:
    for name in ("the loss", "the gradient of a"):
        value = {name: torch.tensor([odd, 1.0])}
        assert compared(value, {name: torch.tensor([odd, 1.0])}) == set()
        assert compared(value, {name: torch.tensor([2.0, 1.0])}) == {name}
        assert compared({name: torch.tensor([2.0, 1.0])}, value) == {name}
        assert compared(value, {name: torch.tensor([odd, 1.1])}) == {name}


def test_complex_buffers_are_compared_with_both_their_parts() -> None:
    name = "the buffer rotations"
    value = torch.polar(torch.ones(4), torch.arange(4.0))
    assert compared({name: value}, {name: value.clone()}) == set()
    assert compared({name: value}, {name: value.conj().resolve_conj()}) == {name}
