"""Blocks are the children of a model's lists that have a forward and parameters all of their own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from cosmati.train.layout import blocks
from cosmati.train.layout.blocks import blocks_in


def layer() -> nn.Linear:
    return nn.Linear(2, 2)


class Model(nn.Module):
    """Whatever it's given, by name."""

    def __init__(self, **parts: nn.Module | None) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, rows: Tensor) -> Tensor:
        return rows


def test_lists_come_before_sequences_and_sequences_stand_in_for_them() -> None:
    one, two, three = layer(), layer(), layer()
    assert blocks_in(Model(a=nn.Sequential(one, two), b=nn.ModuleList([three]))) == [three]
    assert blocks_in(Model(a=nn.Sequential(one, two), b=three)) == [one, two]
    assert blocks_in(Model(a=one, b=two)) == []
    assert blocks_in(nn.Sequential(one, two)) == [one, two]
    assert blocks_in(nn.ModuleList([one, two])) == [one, two]


def test_blocks_stand_in_the_models_order_and_once() -> None:
    one, two, three = layer(), layer(), layer()
    assert blocks_in(Model(a=nn.ModuleList([two, one]), b=nn.ModuleList([three, two]))) == [two, one, three]


def test_what_has_no_forward_or_no_parameters_is_no_block() -> None:
    within = nn.ModuleDict({"a": layer()})
    inner = nn.ModuleList([layer()])
    assert blocks_in(Model(a=nn.ModuleList([nn.ReLU(), within, inner, nn.Identity()]))) == [inner[0]]
    assert [blocks._is_block(one) for one in (nn.ReLU(), within, inner, layer(), nn.Module())] == [
        False,
        False,
        False,
        True,
        False,
    ]


def test_a_block_within_a_block_is_a_part_of_it() -> None:
    inner, outer = layer(), layer()
    holder = Model(a=nn.ModuleList([inner]), b=layer())
    assert blocks_in(Model(a=nn.ModuleList([holder, outer]))) == [holder, outer]
    assert blocks_in(nn.Sequential(nn.Sequential(inner), outer)) != [inner, outer]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_a_list_has_several_times_runs_as_often(times: int) -> None:
    one, two = layer(), layer()
    assert blocks_in(Model(a=nn.ModuleList([one] * times + [two]))) == ([one, two] if times == 1 else [two])
    assert blocks_in(Model(a=nn.Sequential(*[one] * times, two))) == ([one, two] if times == 1 else [two])
    assert blocks_in(Model(a=nn.ModuleList([one, two]), b=nn.ModuleList([one]))) == [one, two]


def test_parameters_that_occur_elsewhere_leave_their_block_to_the_rest() -> None:
    one, two, three, head = layer(), layer(), layer(), layer()
    head.weight = one.weight
    assert blocks_in(Model(a=nn.ModuleList([one, two, three]), head=head)) == [two, three]
    two.bias = three.bias
    assert blocks_in(Model(a=nn.ModuleList([one, two, three]), head=head)) == []
    assert blocks_in(Model(a=nn.ModuleList([one, two, three]))) == [one]
    tied = layer()
    tied.bias = tied.weight
    assert blocks_in(Model(a=nn.ModuleList([tied]))) == [tied], "twice within one block"


def test_each_parameter_is_known_by_the_blocks_that_have_it() -> None:
    shared, one, two, head = layer(), Model(own=layer()), Model(own=layer()), layer()
    one.shared = two.shared = shared
    model: Any = Model(a=nn.ModuleList([one, two]), head=head)
    model.shared = shared
    found = blocks._holding(model, {id(one), id(two)})
    assert found == {
        **{id(p): {id(one), id(two), None} for p in shared.parameters()},
        **{id(p): {id(one)} for p in one.own.parameters()},
        **{id(p): {id(two)} for p in two.own.parameters()},
        **{id(p): {None} for p in head.parameters()},
    }
    assert blocks._holding(one, {id(one)}) == {
        id(p): {id(one)} for part in (one.own, shared) for p in part.parameters()
    }
    assert blocks_in(model) == []
