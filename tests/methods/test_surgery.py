"""New parameters in the groups of old ones, new layers in the places of old ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cosmati.methods.building_blocks import surgery
from cosmati.methods.building_blocks.surgery import join_groups, replace_in_groups, replace_modules, shared_parameters


def test_joins_every_group_that_holds_the_parameter() -> None:
    old, other, new = (nn.Parameter(torch.full((2,), value)) for value in (1.0, 1.0, 3.0))
    first = torch.optim.SGD([{"params": [other], "lr": 0.1}, {"params": [old], "lr": 0.2}])
    second, third = torch.optim.Adam([("old", old)]), torch.optim.SGD([other], lr=0.1)
    join_groups([first, second, third], old, {"new": new})
    assert [len(group["params"]) for group in first.param_groups] == [1, 2], "equal values aren't the same parameter"
    assert first.param_groups[1]["params"][1] is new
    assert second.param_groups[0]["param_names"] == ["old", "new"]
    assert len(third.param_groups[0]["params"]) == 1
    single = torch.optim.SGD([old], lr=0.5)
    join_groups(single, old, {"new": new})
    join_groups(None, old, {"new": new})
    new.sum().backward()
    single.step()
    assert new.tolist() == [2.5, 2.5]


def optimizer_of(*parameters: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD([(f"p{i}", parameter) for i, parameter in enumerate(parameters)], lr=0.1, momentum=0.9)


def test_new_parameters_stand_where_the_old_one_stood() -> None:
    before, old, after = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = optimizer_of(before, old, after)
    replace_in_groups(optimizer, old, {"a": first, "b": second})
    group = optimizer.param_groups[0]
    assert [id(p) for p in group["params"]] == [id(p) for p in (before, first, second, after)]
    assert group["param_names"] == ["p0", "a", "b", "p2"]
    replace_in_groups(optimizer, first, {})
    assert [id(p) for p in group["params"]] == [id(p) for p in (before, second, after)]
    assert group["param_names"] == ["p0", "b", "p2"]
    replace_in_groups(None, old, {"c": first})
    nameless = torch.optim.SGD([old], lr=0.1)
    replace_in_groups([nameless], old, {"c": first})
    assert nameless.param_groups[0]["params"] == [first]


def test_a_weight_that_has_been_stepped_loses_its_state_in_words() -> None:
    old, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = optimizer_of(old, other)
    old.grad = other.grad = torch.ones(2)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"SGD had stepped a weight that surgery replaces by new: its state") as caught:
        replace_in_groups(optimizer, old, {"new": nn.Parameter(torch.zeros(1))})
    assert caught[0].filename != surgery.__file__, "it points at who asked for the surgery's caller"
    assert set(optimizer.state) == {other}
    with pytest.warns(UserWarning, match="replaces by nothing"):
        replace_in_groups(optimizer, other, {})


def test_layers_change_places_wherever_they_stand() -> None:
    shared, new = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    kept = nn.ReLU()
    model = nn.Sequential(shared, nn.Sequential(kept, shared)).eval()
    calls: list[int] = []
    handle = shared.register_forward_hook(lambda *_: calls.append(1))
    assert replace_modules(model, {shared: new}) is model
    assert model[0] is model[1][1] is new
    assert model[1][0] is kept
    assert not new.training
    model(torch.ones(1, 2))
    assert calls == [1, 1], "hooks go along"
    handle.remove()
    model(torch.ones(1, 2))
    assert calls == [1, 1], "and their handles still remove them"
    root = nn.Sequential(kept)
    assert replace_modules(kept, {kept: root}) is root
    model.register_module("empty", None)
    assert replace_modules(model, {kept: nn.GELU()}) is model
    assert isinstance(model[1][0], nn.GELU)


def test_tied_weights_are_those_that_two_modules_hold() -> None:
    first, second, third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    assert shared_parameters(nn.Sequential(first, second, third)) == {id(first.weight)}
    assert shared_parameters(nn.Sequential(third, third)) == set(), "one module in two places holds it once"
