"""What a model holds under two names is told under both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.isolated import Isolated
from cosmati.errors import PlanError
from cosmati.routing.gradient_routing import GradientMask, _of_cuts
from cosmati.routing.regions import partition_parameters
from cosmati.routing.selectors import BlockRange, RegionSelector
from cosmati.train.identity import describe_model
from cosmati.train.isolation import _owners

TWICE = {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}


class Shared(nn.Module):
    """Two blocks, and a norm, that stand in it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.again = self.layers
        self.norm = nn.BatchNorm1d(2)
        self.last = self.norm


def test_an_identity_names_parameters_and_buffers_under_each_name() -> None:
    told = describe_model(Shared())
    names = TWICE | {name.replace("layers", "again") for name in TWICE}
    parameters, buffers = told["parameters"], told["buffers"]
    assert isinstance(parameters, dict)
    assert isinstance(buffers, dict)
    assert parameters.keys() == names | {"norm.weight", "norm.bias", "last.weight", "last.bias"}
    assert buffers.keys() == {f"{n}.{b}" for n in ("norm", "last") for b in nn.BatchNorm1d(2).state_dict()} - {
        f"{n}.{p}" for n in ("norm", "last") for p in ("weight", "bias")
    }


def test_blocks_and_norms_are_found_under_the_second_name() -> None:
    blocks = RegionSelector(params=("layers.*",), blocks=BlockRange(container="again"))
    regions = partition_parameters(Shared(), {"blocks": blocks, "norms": RegionSelector(tag=("norm",))})
    assert [set(own) for own in regions.parameters] == [TWICE, {"norm.weight", "norm.bias"}]
    assert dict(regions.aliases)["again.1.bias"] == "layers.1.bias"
    assert dict(regions.aliases)["last.bias"] == "norm.bias"


class Own(Isolated):
    def __init__(self, class_name: str) -> None:
        super().__init__(class_name)
        self.weight = nn.Parameter(torch.ones(2))


def test_a_parameter_is_owned_by_all_that_hold_it() -> None:
    model = nn.Module()
    model.a, model.b, model.c, model.shared = Own("a"), Own("b"), Own("c"), nn.Linear(1, 2)
    model.b.weight = model.a.weight
    model.shared.bias = model.c.weight
    model.again = model.shared
    assert _owners(model) == {"a.weight": {"a", "b"}, "c.weight": {"c", ""}, "shared.weight": {""}}


def test_isolated_modules_under_two_names_own_what_they_hold() -> None:
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.own = Own("a")
    model.second = model.layer.own
    assert _owners(model) == {"layer.own.weight": {"a"}}


@pytest.mark.parametrize("name", ["layers.1", "again.1", "last"])
def test_what_is_cut_is_named_by_either_name(name: str) -> None:
    model = Shared()
    passing: Any = SimpleNamespace(model=model, class_names=("a", "b"), class_ids=torch.tensor([0, 1, 1]))
    (mask,) = _of_cuts((GradientMask(classes="b", module=name, weight=0.25),), passing)
    assert mask.module is dict(model.named_modules(remove_duplicate=False))[name]
    assert mask.factor.tolist() == [1.0, 0.25, 0.25]
    with pytest.raises(PlanError, match="there is no module 'gone'"):
        list(_of_cuts((GradientMask(classes="b", module="gone"),), passing))
