"""Schedule-free AdamW's x, y and z in float64, each parameter counted by itself, and what narrow ones keep beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import ScheduleFreeAdamW
from cosmati.optim.schedule_free import ScheduleFree, _new_state

DOUBLE = torch.float64
NUMBERS = ("step", "weight_sum", "lr_max")


def drawn(num: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, dtype=DOUBLE, generator=generator) for _ in range(num)]


class ByHand:
    """Section 3 of 2405.15682, with Adam's denominator and a decay at y."""

    def __init__(self, start: Tensor, betas: tuple[float, float], eps: float, decay: float, power: float) -> None:
        self.x, self.y, self.z, self.v = start, start, start, torch.zeros_like(start)
        self.betas, self.eps, self.decay, self.power = betas, eps, decay, power
        self.t, self.total, self.most = 0, 0.0, 0.0

    def step(self, gradient: Tensor, lr: float) -> None:
        self.t, self.most = self.t + 1, max(self.most, lr)
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * gradient**2
        root = (self.v / (1 - self.betas[1] ** self.t)).sqrt() + self.eps
        self.z = self.z - lr * (gradient / root + self.decay * self.y)
        weight = self.most**self.power
        self.total += weight
        share = weight / self.total if self.total else 0.0
        self.x = (1 - share) * self.x + share * self.z
        self.y = (1 - self.betas[0]) * self.z + self.betas[0] * self.x


def given(optimizer: ScheduleFree, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient is None or torch.equal(gradient, parameter.grad), "gradients are left as they are"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.5, 0.0), "eps": 0.125},
        {"betas": (0.75, 0.5), "weight_decay": 0.25},
        {"weight_lr_power": 0.0},
        {"weight_lr_power": 1.0, "weight_decay": 0.5},
    ],
)
def test_who_is_absent_does_not_count_and_a_warm_up_counts_for_little(options: dict[str, Any]) -> None:
    starts = drawn(2, seed=9)
    parameters = [Parameter(start.clone()) for start in starts]
    optimizer = ScheduleFree(parameters, 0.1, **options)
    told = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "weight_lr_power": 2.0} | options
    hands = [ByHand(start, *told.values()) for start in starts]  # type: ignore[arg-type]
    rates, gradients = (0.0, 0.05, 0.1, 0.1, 0.02, 0.1), list(zip(drawn(6), drawn(6, seed=1), strict=True))
    for t, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = lr
        here = [g if (i, t) not in ((1, 0), (1, 3)) else None for i, g in enumerate(gradients[t])]
        given(optimizer, parameters, here)
        for parameter, hand, gradient in zip(parameters, hands, here, strict=True):
            if gradient is not None:
                hand.step(gradient, lr)
            if not hand.t:
                assert parameter not in optimizer.evaluation_weights()
                continue
            state = optimizer.state[parameter]
            torch.testing.assert_close(parameter.detach(), hand.y, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(state["z"], hand.z, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(optimizer.evaluation_weights()[parameter], hand.x, rtol=1e-9, atol=1e-11)
            assert [float(state[name]) for name in NUMBERS] == pytest.approx([hand.t, hand.total, hand.most], rel=1e-12)
    assert optimizer.steps_elements(optimizer.param_groups[0]) is True


def test_each_group_has_options_of_its_own() -> None:
    starts, own = drawn(2, seed=3), [{"betas": (0.5, 0.5)}, {"lr": 0.3, "weight_decay": 0.5}]
    parameters = [Parameter(start.clone()) for start in starts]
    groups = [{"params": [parameter], **one} for parameter, one in zip(parameters, own, strict=True)]
    optimizer = ScheduleFree(groups, 0.1, eps=0.0)
    hands = [
        ByHand(starts[0], (0.5, 0.5), 0.0, 0.0, 2.0),
        ByHand(starts[1], (0.9, 0.999), 0.0, 0.5, 2.0),
    ]
    for gradient in drawn(3):
        given(optimizer, parameters, [gradient, gradient])
        for hand, lr in zip(hands, (0.1, 0.3), strict=True):
            hand.step(gradient, lr)
    averages = optimizer.evaluation_weights()
    for parameter, hand in zip(parameters, hands, strict=True):
        torch.testing.assert_close(averages[parameter], hand.x, rtol=1e-9, atol=1e-11)
        assert not averages[parameter].requires_grad


def test_a_narrow_parameter_is_y_rounded_and_y_is_kept() -> None:
    start = drawn(1)[0].bfloat16()
    narrow, wide = Parameter(start.clone()), Parameter(start.float())
    pair = [ScheduleFree([one], 0.1, (0.75, 0.5), weight_decay=0.25) for one in (narrow, wide)]
    for gradient in drawn(4, seed=1):
        for optimizer, parameter in zip(pair, (narrow, wide), strict=True):
            given(optimizer, [parameter], [gradient.bfloat16().to(parameter.dtype)])
        assert torch.equal(pair[0].state[narrow]["y"], wide)
        assert torch.equal(narrow, wide.bfloat16())
    assert torch.equal(pair[0].evaluation_weights()[narrow], pair[1].evaluation_weights()[wide])
    assert "y" not in pair[1].state[wide]


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float16, torch.float32), (torch.float32, torch.float32), (DOUBLE, DOUBLE)],
)
def test_a_new_state_begins_at_the_weights_in_memory_of_its_own(dtype: torch.dtype, wide: torch.dtype) -> None:
    parameter = Parameter(drawn(1)[0].to(dtype))
    state = _new_state(parameter)
    begun = {"z": parameter, "exp_avg_sq": torch.zeros(3)} | ({"y": parameter} if dtype is not wide else {})
    assert state.keys() == begun.keys() | set(NUMBERS)
    for name, value in begun.items():
        assert state[name].dtype is wide
        assert torch.equal(state[name], value.detach().to(wide))
    assert all((state[name].dtype, state[name].item()) == (DOUBLE, 0.0) for name in NUMBERS)
    assert len({one.data_ptr() for one in (*state.values(), parameter)}) == len(state) + 1


def test_y_is_made_for_narrow_parameters_that_load_a_wide_state_and_for_no_others() -> None:
    wide = [Parameter(one.float()) for one in drawn(2)]
    first = ScheduleFree(wide, 0.1)
    given(first, wide, [torch.ones(3), None])
    narrow = [Parameter(one.detach().bfloat16()) for one in wide]
    again = ScheduleFree(narrow, 0.1)
    again.load_state_dict(first.state_dict())
    y = again.state[narrow[0]]["y"]
    assert y.dtype is torch.float32
    assert torch.equal(y, narrow[0].float())
    assert y.requires_grad is False
    assert not again.state.get(narrow[1]), "that one has not been stepped"
    same = ScheduleFree([Parameter(one.detach().clone()) for one in wide], 0.1)
    same.load_state_dict(first.state_dict())
    assert all("y" not in state for state in same.state.values())
    given(again, narrow, [torch.ones(3).bfloat16(), None])
    kept = again.state[narrow[0]]["y"].clone()
    third = ScheduleFree([Parameter(one.detach().clone()) for one in narrow], 0.1)
    third.load_state_dict(again.state_dict())
    assert torch.equal(third.state[third.param_groups[0]["params"][0]]["y"], kept), "it isn't made from the rounded"


def test_what_is_usual_and_what_the_configuration_says_on() -> None:
    [group] = ScheduleFree([Parameter(torch.ones(1))]).param_groups
    usual = {"lr": 2.5e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "weight_lr_power": 2.0}
    assert {key: value for key, value in group.items() if key != "params"} == usual
    named = [("w", Parameter(torch.ones(2, 2))), ("b", Parameter(torch.ones(2)))]
    options: dict[str, Any] = {"lr": 0.5, "betas": (0.7, 0.8), "eps": 0.25, "weight_lr_power": 3.0}
    for decay_vectors, decays in ((True, [0.125]), (False, [0.125, 0.0])):
        built = ScheduleFreeAdamW(weight_decay=0.125, decay_vectors=decay_vectors, **options).build(named)
        assert [one["weight_decay"] for one in built.param_groups] == decays
        assert all({key: one[key] for key in options} == options for one in built.param_groups)
    [plain] = ScheduleFreeAdamW(lr=2.5e-3, weight_decay=0.5).build(named).param_groups
    assert {key: value for key, value in plain.items() if key != "params"} == usual | {"weight_decay": 0.5}
    assert ScheduleFreeAdamW.owns == {"evaluation weights"}


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "weight_lr_power"])
def test_numbers_below_0_are_refused_by_hand_and_in_a_configuration(name: str) -> None:
    for make in (lambda **more: ScheduleFree([Parameter(torch.ones(1))], **more), ScheduleFreeAdamW):
        make(**{"lr": 0.5, name: 0.0})
        with pytest.raises(PlanError, match=rf"{name}=-1\.0"):
            make(**{"lr": 0.5, name: -1.0})


def test_a_share_of_the_average_lies_inside_0_and_1() -> None:
    for make in (lambda **more: ScheduleFree([Parameter(torch.ones(1))], **more), ScheduleFreeAdamW):
        make(lr=0.1, betas=(1e-9, 0.0))
        with pytest.raises(PlanError, match=r"betas=\(0\.0, 0\.5\): at 0 nothing is averaged"):
            make(lr=0.1, betas=(0.0, 0.5))
        for betas in ((1.0, 0.5), (0.5, 1.0), (0.5, -0.1)):
            with pytest.raises(PlanError, match=r"ScheduleFreeAdamW can't use betas=.*betas in \[0, 1\)"):
                make(lr=0.1, betas=betas)
