"""Layer freezing against the rule, written apart: count layers, freeze the first ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage
from cosmati.errors import PlanError
from cosmati.methods.layer_freezing import LayerFreezing, freeze_layers

torch.set_num_threads(1)


def model(num_layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(num_layers)))


def position(net: nn.Module, step: int, steps: int = 100) -> Position:
    return Position(Clock(step=step), Budget(Time.parse(f"{steps}ba")), 0, 0, net, None)


def names(net: nn.Module) -> list[str]:
    return [name for name, parameter in net.named_parameters() if parameter.requires_grad]


@pytest.mark.long
@given(st.integers(0, 100), st.floats(0, 1), st.floats(0, 1), st.integers(1, 8))
def test_as_many_layers_as_the_ramp_says(step: int, start: float, level: float, num_layers: int) -> None:
    net = model(num_layers)
    frozen = LayerFreezing(freeze_start=start, freeze_level=level).frozen(names(net), position(net, step))
    due = 0.0 if step / 100 <= start else level * (step / 100 - start) / (1 - start) * (num_layers - 1)
    count = len(frozen) // 2
    assert count in {math.floor(due), math.floor(due + 1e-8)}
    assert frozen == {f"{i}.0.{kind}" for i in range(count) for kind in ("weight", "bias")}


def test_ramp_by_hand() -> None:
    net = model(6)
    method = LayerFreezing(freeze_start=0.5, freeze_level=1.0)
    counts = [len(method.frozen(names(net), position(net, step))) // 2 for step in (0, 50, 59, 60, 80, 100)]
    assert counts == [0, 0, 0, 1, 3, 5]


def test_only_grows() -> None:
    net = model(7)
    method = LayerFreezing(freeze_start=0.2, freeze_level=0.9)
    before: frozenset[str] = frozenset()
    for step in range(101):
        now = method.frozen(names(net), position(net, step))
        assert before <= now
        before = now
    assert len(before) == 10


@pytest.mark.parametrize("options", [{"freeze_level": 0.0}, {"freeze_start": 1.0}])
def test_off_freezes_nothing(options: dict[str, float]) -> None:
    net = model()
    assert all(not LayerFreezing(**options).frozen(names(net), position(net, step)) for step in range(101))


def test_shared_weights_freeze_with_their_last_use() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.body = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

    net = Tied()
    frozen = LayerFreezing(freeze_start=0.0).frozen(names(net), position(net, 100))
    assert frozen == {"body.weight", "body.bias", "norm.weight", "norm.bias"}


def test_a_module_with_children_and_parameters_is_a_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(2, 8))
            self.attention = nn.MultiheadAttention(8, 2)
            self.head = nn.Linear(8, 2)

    net = Net()
    method = LayerFreezing(freeze_start=0.0)
    at_steps = [method.frozen(names(net), position(net, step)) for step in (34, 67, 100)]
    assert at_steps[0] == {"position"}
    assert at_steps[1] == {"position", "attention.in_proj_weight", "attention.in_proj_bias"}
    assert at_steps[2] == {name for name in names(net) if not name.startswith("head")}


def test_names_only_what_is_trainable() -> None:
    net = model(4)
    net[0].requires_grad_(False)
    frozen = LayerFreezing(freeze_start=0.0).frozen(names(net), position(net, 67))
    assert frozen == {"1.0.weight", "1.0.bias"}


def test_function_takes_layers_out_of_the_optimizers() -> None:
    net = model(5)
    first = torch.optim.SGD(net[:3].parameters(), 0.1)
    second = torch.optim.AdamW(net[3:].parameters(), 0.1)
    count, fraction = freeze_layers(net, [first, second], 0.8, 0.2, 1.0)
    assert (count, fraction) == (3, pytest.approx(0.75))
    assert first.param_groups[0]["params"] == []
    assert len(second.param_groups[0]["params"]) == 4
    assert names(net) == ["3.0.weight", "3.0.bias", "4.0.weight", "4.0.bias"]
    again, _ = freeze_layers(net, second, 1.0, 0.2, 1.0)
    assert again == 4
    assert names(net) == ["4.0.weight", "4.0.bias"]
    assert freeze_layers(model(), second, 0.5) == (0, 0.0)


@pytest.mark.parametrize("elapsed", [0.55, 0.7, 0.83, 1.0])
def test_function_equals_method(elapsed: float) -> None:
    net = model(8)
    by_method = LayerFreezing().frozen(names(net), position(net, round(elapsed * 100)))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    everything = set(names(net))
    freeze_layers(net, optimizer, elapsed)
    assert everything - set(names(net)) == by_method
    assert len(optimizer.param_groups[0]["params"]) == 16 - len(by_method)


def test_refuses_options() -> None:
    assert LayerFreezing.stage is Stage.ROUTE
    for options in ({"freeze_start": 1.5}, {"freeze_level": -0.1}, {"freeze_level": math.nan}):
        with pytest.raises(PlanError, match="fractions"):
            LayerFreezing(**options)
