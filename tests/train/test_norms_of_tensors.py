"""Norms of any mix of tensors are those of NumPy in float64, and none is narrowed that is of double precision."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.train.observers.monitors.norms import _joined, _norms, _part, parameter_groups

DENSE = {
    "half": torch.tensor([3.0, 4.0], dtype=torch.float16),
    "bfloat16": torch.tensor([[0.5], [0.25]], dtype=torch.bfloat16),
    "float": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "double": torch.tensor([1.0, 2.0**-30], dtype=torch.float64),
    "complex": torch.tensor([3.0 + 4.0j, 1.0j]),
    "wide complex": torch.tensor([1.0 + 1.0j], dtype=torch.complex128),
    "scalar": torch.tensor(-2.0),
}
WIDE = {"double", "wide complex"}


def norm_by_hand(tensor: Tensor) -> float:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(np.sqrt((np.abs(wide.numpy()) ** 2).sum()))


@pytest.mark.parametrize("names", [*itertools.permutations(DENSE, 2), *[(name,) for name in DENSE], tuple(DENSE)])
def test_tensors_of_any_types_have_their_norms_together(names: tuple[str, ...]) -> None:
    found = _norms([DENSE[name] for name in names])
    assert found.shape == (len(names),)
    assert found.dtype is (torch.float64 if WIDE.intersection(names) else torch.float32)
    for name, norm in zip(names, found.tolist(), strict=True):
        assert norm == pytest.approx(norm_by_hand(DENSE[name]), rel=1e-15 if name == "double" else 1e-6)


def test_entries_of_a_sparse_tensor_that_name_one_place_are_added_first() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True)
    assert _norms([sparse, torch.tensor([2.0])]).tolist() == [5.0, 2.0]


def test_norms_of_one_region_are_joined_by_their_squares() -> None:
    found = _joined("what", ["a", "b", "a", "c"], [3.0, 1.5, 4.0, 0.0])
    assert found == {"what/a": 5.0, "what/b": 1.5, "what/c": 0.0}
    assert list(found) == ["what/a", "what/b", "what/c"]
    assert _joined("what", [], []) == {}
    assert math.isnan(_joined("n", ["a", "a"], [1.0, math.nan])["n/a"])
    with pytest.raises(ValueError, match="shorter"):
        _joined("what", ["a", "b"], [1.0])


@pytest.mark.parametrize(
    ("name", "depth", "part"),
    [
        ("a.b.c.weight", 1, "a"),
        ("a.b.c.weight", 2, "a.b"),
        ("a.b.c.weight", 3, "a.b.c"),
        ("a.b.c.weight", 4, "a.b.c"),
        ("weight", 1, "weight"),
    ],
)
def test_a_part_is_the_way_to_a_parameters_module(name: str, depth: int, part: str) -> None:
    assert _part(name, depth) == part


def watched(model: nn.Module, **regions: tuple[str, ...]) -> Any:
    """What the function reads of a run."""
    facts = SimpleNamespace(regions=tuple(regions), parameters=tuple(regions.values()))
    return SimpleNamespace(model=model, facts=facts)


class Nested(nn.Module):
    """A linear layer at the end of a way."""

    def __init__(self, *way: str) -> None:
        super().__init__()
        self.add_module(way[0], Nested(*way[1:]) if way[1:] else nn.ModuleDict({n: nn.Linear(1, 1) for n in "xy"}))


def test_groups_are_the_regions_or_else_the_first_parts_that_differ() -> None:
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    names = tuple(name for name, _ in two.named_parameters())
    assert {name: [id(p) for p in own] for name, own in parameter_groups(watched(two, all=names)).items()} == {
        "0": [id(two[0].weight), id(two[0].bias)],
        "1": [id(two[1].weight), id(two[1].bias)],
    }
    regions = {"low": ("0.weight", "1.bias"), "high": ("0.bias",)}
    assert {name: [id(p) for p in own] for name, own in parameter_groups(watched(two, **regions)).items()} == {
        "low": [id(two[0].weight), id(two[1].bias)],
        "high": [id(two[0].bias)],
    }


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        (("a",), ["a.x", "a.y"]),
        (("a", "b"), ["a.b.x", "a.b.y"]),
        (("a", "b", "c"), ["a.b.c.x", "a.b.c.y"]),
        (("a", "b", "c", "d"), ["a.b.c.d"]),
    ],
)
def test_parts_are_looked_for_four_modules_deep(way: tuple[str, ...], parts: list[str]) -> None:
    model = Nested(*way)
    names = tuple(name for name, _ in model.named_parameters())
    assert list(parameter_groups(watched(model, all=names))) == parts


def test_parameters_of_which_each_rank_holds_a_part_are_refused() -> None:
    class Piece(torch.Tensor):
        def to_local(self) -> Tensor:
            return self

    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.ones(1, 1).as_subclass(Piece))
    with pytest.raises(PlanError, match=r"GradientNorms and UpdateNorms.*sharding='full'.*Leave them out"):
        parameter_groups(watched(model, all=("weight", "bias")))
