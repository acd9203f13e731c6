"""SGDW's step, number by number: what its state holds, what each group has of its own, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import SGDW
from cosmati.optim.sgdw import DecoupledMomentum

DOUBLE = torch.float64


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=DOUBLE)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"),
    [(0.0, False, 0.0), (0.0, True, 0.25), (0.5, False, 0.25), (0.5, True, 0.0), (0.5, True, 0.25)],
)
def test_steps_are_the_papers_and_who_is_absent_rests(momentum: float, nesterov: bool, decay: float) -> None:
    """A binary fraction everywhere, so that every number is exact."""
    parameters, x, m = [Parameter(number(8.0)), Parameter(number(-4.0))], [8.0, -4.0], [0.0, 0.0]
    optimizer = DecoupledMomentum(parameters, 0.5, momentum, nesterov, decay)
    for rate, gradients in ((0.5, (1.0, None)), (0.25, (2.0, -3.0)), (0.125, (None, 1.0)), (0.0, (4.0, 4.0))):
        optimizer.param_groups[0]["lr"] = rate
        for i, g in enumerate(gradients):
            parameters[i].grad = None if g is None else number(g)
            if g is not None:
                m[i] = momentum * m[i] + g
                step = g + momentum * m[i] if nesterov else m[i]
                x[i] = (1 - rate / 0.5 * decay) * x[i] - rate * step
        optimizer.step()
        assert [parameter.item() for parameter in parameters] == x
    for i, parameter in enumerate(parameters):
        assert {name: value.item() for name, value in optimizer.state[parameter].items()} == (
            {"momentum_buffer": m[i]} if momentum else {}
        )


def test_each_group_decays_in_proportion_to_its_own_first_rate() -> None:
    parameters = [Parameter(number(1.0)) for _ in range(3)]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:1]},
        {"params": parameters[1:2], "lr": 0.25},
        {"params": parameters[2:], "full_lr": 2.0, "weight_decay": 0.25},
    ]
    optimizer = DecoupledMomentum(groups, 0.5, weight_decay=0.5)
    assert [group["full_lr"] for group in optimizer.param_groups] == [0.5, 0.25, 2.0]
    for group, parameter in zip(optimizer.param_groups, parameters, strict=True):
        group["lr"], parameter.grad = 0.125, number(0.0)
        assert optimizer.steps_elements(group) is True
    optimizer.step()
    assert [parameter.item() for parameter in parameters] == [1 - 0.125, 1 - 0.25, 1 - 0.0625 * 0.25]


def test_a_schedule_above_the_first_rate_decays_more() -> None:
    parameter = Parameter(number(1.0))
    parameter.grad = number(0.0)
    optimizer = DecoupledMomentum([parameter], 0.5, weight_decay=0.25)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert parameter.item() == 0.5


def test_what_is_usual() -> None:
    [group] = DecoupledMomentum([Parameter(number(0.0))]).param_groups
    usual = {"lr": 0.1, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "full_lr": 0.1}
    assert {key: value for key, value in group.items() if key != "params"} == usual


def test_a_configuration_is_plain_sgd_where_it_says_no_more() -> None:
    named = [("w", Parameter(torch.ones(2, 2))), ("b", Parameter(torch.ones(2)))]
    [group] = SGDW(lr=0.25, weight_decay=0.125).build(named).param_groups
    assert {key: value for key, value in group.items() if key != "params"} == {
        "lr": 0.25,
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 0.125,
        "full_lr": 0.25,
    }


@pytest.mark.parametrize("decay_vectors", [True, False])
def test_the_configuration_says_it_all_on(decay_vectors: bool) -> None:
    named = [("w", Parameter(torch.ones(2, 2))), ("b", Parameter(torch.ones(2)))]
    made = SGDW(lr=0.25, momentum=0.5, nesterov=True, weight_decay=0.125, decay_vectors=decay_vectors)
    groups = made.build(named).param_groups
    assert [group["weight_decay"] for group in groups] == ([0.125] if decay_vectors else [0.125, 0.0])
    for group in groups:
        assert (group["lr"], group["momentum"], group["nesterov"], group["full_lr"]) == (0.25, 0.5, True, 0.25)


@pytest.mark.parametrize(
    ("lr", "momentum", "decay", "is_refused"),
    [
        (0.0, 0.0, 0.0, False),
        (1.0, 0.999, 0.999, False),
        (-1e-9, 0.0, 0.0, True),
        (0.1, -1e-9, 0.0, True),
        (0.1, 1.0, 0.0, True),
        (0.1, 0.0, -1e-9, True),
        (0.1, 0.0, 1.0, True),
        (float("nan"), 0.0, 0.0, True),
        (0.1, float("nan"), 0.0, True),
        (0.1, 0.0, float("nan"), True),
    ],
)
def test_ranges_hold_their_lower_ends_alone(lr: float, momentum: float, decay: float, is_refused: bool) -> None:
    def by_hand() -> object:
        return DecoupledMomentum([Parameter(number(0.0))], lr, momentum, weight_decay=decay)

    def configured() -> object:
        return SGDW(lr=lr, momentum=momentum, weight_decay=decay)

    told = f"SGDW can't use lr={lr}, momentum={momentum}, weight_decay={decay}. Use lr >= 0"
    of_rate = told if lr >= 0 else f"SGDW(lr={lr}): a learning rate is a number >= 0."
    for make, says in ((by_hand, told), (configured, of_rate)):
        if not is_refused:
            assert make() is not None
            continue
        with pytest.raises(PlanError) as caught:
            make()
        assert str(caught.value).startswith(says)
