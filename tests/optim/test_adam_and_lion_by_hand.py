"""Bounded AdamW's and Lion's steps over loops of single numbers: each decay, each group, and who is absent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import Constant, Lion
from cosmati.optim.adamw import BoundedAdamW
from cosmati.optim.lion import SignMomentum

DOUBLE = torch.float64
GRADIENTS = [(1.0, -2.0, 0.5, 0.0), (-3.0, -1.0, 0.25, 1.0), (0.5, 4.0, -2.0, -1.0)]
START = (1.0, -1.0, 2.0, -3.0)


def row(values: tuple[float, ...] | list[float]) -> Tensor:
    return torch.tensor([values], dtype=DOUBLE)


def sign(value: float) -> float:
    return math.copysign(1.0, value) if value else 0.0


def options_of(optimizer: torch.optim.Optimizer, place: int = 0) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[place].items() if key != "params"}


def decayed(x: float, u: float, rate: float, *, cautious: bool) -> float:
    return x if cautious and u * x < 0 else x - rate * x


class AdamByHand:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = {"betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.0, **options}
        self.x, self.m, self.v, self.t = [*START], [0.0] * 4, [0.0] * 4, 0
        self.radius = math.sqrt(sum(value**2 for value in START))

    def step(self, gradient: tuple[float, ...]) -> None:
        (b1, b2), eps, decay = (self.options[name] for name in ("betas", "eps", "weight_decay"))
        self.t += 1
        updates = []
        for i, g in enumerate(gradient):
            self.m[i], self.v[i] = b1 * self.m[i] + (1 - b1) * g, b2 * self.v[i] + (1 - b2) * g * g
            updates.append(self.m[i] / (1 - b1**self.t) / (math.sqrt(self.v[i] / (1 - b2**self.t)) + eps))
        if self.options.get("hyperball"):
            length = math.sqrt(sum(u * u for u in updates))
            moved = [x - 0.25 * self.radius * u / length for x, u in zip(self.x, updates, strict=True)]
            now = math.sqrt(sum(x * x for x in moved))
            self.x = [self.radius * x / now for x in moved]
            return
        cautious = bool(self.options.get("cautious"))
        self.x = [
            decayed(x, u, 0.25 * decay, cautious=cautious) - 0.25 * u for x, u in zip(self.x, updates, strict=True)
        ]


class LionByHand:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = {"betas": (0.5, 0.75), "weight_decay": 0.0, **options}
        self.x, self.m = [*START], [0.0] * 4

    def step(self, gradient: tuple[float, ...]) -> None:
        (b1, b2), decay = self.options["betas"], self.options["weight_decay"]
        cautious = bool(self.options.get("cautious"))
        for i, g in enumerate(gradient):
            u = sign(b1 * self.m[i] + (1 - b1) * g)
            self.x[i] = decayed(self.x[i], u, 0.25 * decay, cautious=cautious) - 0.25 * u
            self.m[i] = b2 * self.m[i] + (1 - b2) * g


SHARED: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.5},
    {"weight_decay": 0.5, "cautious": True},
    {"cautious": True},
    {"betas": (0.0, 0.0)},
]


@pytest.mark.parametrize(
    ("kind", "by_hand", "own", "more"),
    [
        (BoundedAdamW, AdamByHand, [*SHARED, {"hyperball": True}], {"eps": 0.125}),
        (SignMomentum, LionByHand, SHARED, {}),
    ],
)
def test_each_group_steps_by_its_own_options(kind: Any, by_hand: Any, own: list[dict[str, Any]], more: Any) -> None:
    twice = [one for one in own for _ in range(2)]
    parameters = [Parameter(row(START)) for _ in twice]
    groups = [{"params": [*parameters[2 * i : 2 * i + 2]], **one} for i, one in enumerate(own)]
    optimizer = kind(groups, 0.25, (0.5, 0.75), weight_decay=0.0, **more)
    hands = [by_hand(one) for one in twice]
    for t, gradient in enumerate(GRADIENTS):
        for i, (parameter, hand) in enumerate(zip(parameters, hands, strict=True)):
            is_absent = i % 2 == 1 and t == 1
            parameter.grad = None if is_absent else row(gradient)
            if not is_absent:
                hand.step(gradient)
        optimizer.step()
        for parameter, hand in zip(parameters, hands, strict=True):
            assert parameter.tolist()[0] == pytest.approx(hand.x, rel=1e-10, abs=1e-12)
            assert parameter.grad is None or torch.equal(parameter.grad, row(gradient)), "gradients stay as they are"
    for parameter, hand in zip(parameters, hands, strict=True):
        state = optimizer.state[parameter]
        if kind is SignMomentum:
            assert state.keys() == {"momentum_buffer"}
            assert state["momentum_buffer"].tolist()[0] == pytest.approx(hand.m, rel=1e-10)
            continue
        is_round = bool(hand.options.get("hyperball"))
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} | ({"radius"} if is_round else set())
        assert int(state["step"]) == hand.t
        assert state["exp_avg"].tolist()[0] == pytest.approx(hand.m, rel=1e-10)
        assert state["exp_avg_sq"].tolist()[0] == pytest.approx(hand.v, rel=1e-10)
        assert not is_round or float(state["radius"]) == pytest.approx(hand.radius)


def test_elements_are_stepped_by_themselves_but_on_a_sphere() -> None:
    weight = Parameter(row(START))
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [Parameter(row(START))], "hyperball": True}]
    adam = BoundedAdamW(groups, weight_decay=0.0)
    assert [adam.steps_elements(group) for group in adam.param_groups] == [True, False]
    lion = SignMomentum([weight])
    assert lion.steps_elements(lion.param_groups[0]) is True


def test_what_is_usual_and_what_is_off_leaves_no_trace() -> None:
    weight = Parameter(row(START))
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    lion = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    assert options_of(BoundedAdamW([weight])) == adam
    assert options_of(SignMomentum([weight])) == lion
    for more in ({"cautious": True}, {"hyperball": True, "weight_decay": 0.0}):
        assert options_of(BoundedAdamW([weight], **more)) == adam | more
    assert options_of(SignMomentum([weight], cautious=True)) == lion | {"cautious": True}


def test_lions_configuration_says_it_all_on() -> None:
    named = [("w", Parameter(torch.ones(2, 2))), ("b", Parameter(torch.ones(2)))]
    usual = Lion(lr=0.5, weight_decay=0.25).build(named)
    assert [options_of(usual)] == [{"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.25}]
    assert len(usual.param_groups) == 1
    told = Lion(lr=0.5, betas=(0.25, 0.75), weight_decay=0.25, decay_vectors=False, cautious=True).build(named)
    expected = {"lr": 0.5, "betas": (0.25, 0.75), "cautious": True}
    assert [options_of(told, place) for place in (0, 1)] == [expected | {"weight_decay": decay} for decay in (0.25, 0)]
    assert Lion(lr=0.5).build(named).param_groups[0]["weight_decay"] == 0.0
    assert Lion(lr=0.5).schedule == Constant()


@pytest.mark.parametrize(
    "wrong", [{"betas": (1.0, 0.5)}, {"betas": (0.5, 1.0)}, {"betas": (-0.5, 0.5)}, {"weight_decay": -1.0}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    weight = Parameter(row(START))
    lion, adam = (lambda **more: SignMomentum([weight], **more)), (lambda **more: BoundedAdamW([weight], **more))
    for make, name in ((lion, "Lion"), (Lion, "Lion"), (adam, "AdamW")):
        make(lr=0.0, betas=(0.0, 0.0), weight_decay=0.0)
        with pytest.raises(PlanError, match=f"^{name} can't use betas="):
            make(**{"lr": 0.1, **wrong})
    for make, name in ((lion, "Lion"), (adam, "AdamW")):
        with pytest.raises(PlanError, match=rf"^{name} can't use .*lr=-1\.0"):
            make(lr=-1.0)
    adam(eps=0.0)
    with pytest.raises(PlanError, match=r"^AdamW can't use .*eps=-1\.0"):
        adam(eps=-1.0)


def test_what_cannot_be_kept_on_a_sphere_is_refused_in_any_group() -> None:
    matrix, vector, zero = Parameter(torch.eye(2)), Parameter(torch.ones(2)), Parameter(torch.zeros(2, 2))
    for parameter, says in ((vector, "less than two dimensions"), (zero, "begin at 0")):
        with pytest.raises(PlanError, match=rf"^Hyperball keeps .*{says}"):
            BoundedAdamW([{"params": [matrix]}, {"params": [parameter]}], hyperball=True, weight_decay=0.0)
        BoundedAdamW([matrix, parameter], cautious=True)
    with pytest.raises(PlanError, match=r"^AdamW can't use hyperball=True with weight_decay=0\.01"):
        BoundedAdamW([matrix], hyperball=True)
