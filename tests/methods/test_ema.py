"""EMA against the sum of its weights in float64, its clock, and what governance asks of it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage, State
from cosmati.errors import PlanError
from cosmati.methods.ema import EMA, compute_ema
from cosmati.testing.pieces import weights_of

torch.set_num_threads(1)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(2, 2))


def at(model: nn.Module, step: int, budget: Budget) -> Position:
    return Position(Clock(step=step), budget, 0, 0, model, None)


def weights(step: int) -> float:
    return math.sin(step) + step / 7


def follow(
    method: EMA,
    steps: int,
    budget: Budget,
    learnt: dict[int, frozenset[str]] | None = None,
    state: State | None = None,
    first: int = 1,
) -> tuple[State, Two]:
    """Set the weights to a known curve, step by step; b moves only where it learns."""
    model = Two()
    state = method.init(weights_of(model)) if state is None else state
    for step in range(1, steps + 1):
        moved = (learnt or {}).get(step, frozenset({"a", "b"}))
        with torch.no_grad():
            for name in moved:
                model.get_parameter(name).fill_(weights(step))
        if step >= first:
            state = method.after(state, weights_of(model), at(model, step, budget), moved if learnt else None)
    return state, model


def averages(method: EMA, state: State, budget: Budget) -> dict[str, Tensor]:
    found = method.evaluation_weights(state, at(Two(), 0, budget))
    assert found is not None
    return dict(found)


def expected(smoothing: float, steps: list[int]) -> float:
    average = weights(steps[0])
    for step in steps[1:]:
        average = smoothing * average + (1 - smoothing) * weights(step)
    return average


HUNDRED = Budget(Time.parse("100ba"))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 60), st.floats(0.5, 50), st.integers(1, 7), st.integers(0, 30))
def test_against_the_recursion(steps: int, half_life: float, interval: int, start: int) -> None:
    method = EMA(half_life=f"{half_life!r}ba", update_interval=f"{interval}ba", ema_start=f"{start}ba")
    state, model = follow(method, steps, HUNDRED)
    due = [step for step in range(1, steps + 1) if step % interval == 0 and step >= start]
    if not due:
        assert state == {}
        assert method.evaluation_weights(state, at(model, steps, HUNDRED)) is None
        return
    value = expected(2 ** (-interval / half_life), due)
    found = averages(method, state, HUNDRED)
    torch.testing.assert_close(found["a"], torch.full((3,), value), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["b"], torch.full((2, 2), value), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "budget", "half_life_steps"),
    [
        ({"half_life": "20ba"}, HUNDRED, 20),
        ({"half_life": "20ba"}, Budget(Time.parse("100ba"), ratio=2.0), 40),
        ({"half_life": "0.2dur"}, HUNDRED, 20),
        ({"half_life": "5ep"}, Budget(Time.parse("25ep"), steps_per_epoch=4), 20),
        ({"half_life": "5ep", "update_interval": "1ba"}, Budget(Time.parse("25ep"), steps_per_epoch=4), 20),
        ({"half_life": "160sp"}, Budget(Time.parse("100ba"), rows_per_step=8), 20),
        ({"half_life": "20ba", "update_interval": "5ba"}, HUNDRED, 20),
        ({"half_life": "20ba"}, Budget(Time.parse("90sec")), 20),
        ({"smoothing": 0.5 ** (1 / 20)}, HUNDRED, 20),
    ],
)
def test_the_first_weight_has_halved_after_a_half_life(
    options: dict[str, Any], budget: Budget, half_life_steps: int
) -> None:
    method = EMA(**options)
    model = Two()
    nn.init.ones_(model.a)
    state: State = {}
    start = 0
    for step in range(1, 100):
        if state and not start:
            # The copy was taken in the step before; from here on the weights are zero.
            start = step - 1
            nn.init.zeros_(model.a)
        state = method.after(state, weights_of(model), at(model, step, budget), None)
        if start and step == start + half_life_steps:
            break
    torch.testing.assert_close(averages(method, state, budget)["a"], torch.full((3,), 0.5))


def test_starts_when_told() -> None:
    method = EMA(half_life="10ba", ema_start="0.5dur")
    assert follow(method, 49, HUNDRED)[0] == {}
    state, model = follow(method, 50, HUNDRED)
    assert torch.equal(averages(method, state, HUNDRED)["a"], model.a)


@pytest.mark.parametrize("options", [{"half_life": "0ba"}, {"smoothing": 0.0}])
def test_off(options: dict[str, Any]) -> None:
    method = EMA(**options)
    assert method.claims == frozenset()
    assert follow(method, 5, HUNDRED)[0] == {}
    assert EMA().claims == frozenset({"evaluation weights"})


def test_leaves_the_model_alone() -> None:
    state, model = follow(EMA(half_life="3ba"), 9, HUNDRED)
    assert torch.equal(model.a, torch.full((3,), weights(9)))
    assert all(value.data_ptr() != model.a.data_ptr() for value in state.values())
    assert not any(value.requires_grad for value in state.values())


def test_what_has_not_learnt_is_left_out() -> None:
    learnt = {3: frozenset({"a"}), 4: frozenset[str](), 5: frozenset({"a"})}
    method = EMA(smoothing=0.9)
    state, _ = follow(method, 6, HUNDRED, learnt)
    found = averages(method, state, HUNDRED)
    torch.testing.assert_close(found["a"], torch.full((3,), expected(0.9, [1, 2, 3, 5, 6])))
    torch.testing.assert_close(found["b"], torch.full((2, 2), expected(0.9, [1, 2, 6])))


def test_what_moved_between_updates_is_taken() -> None:
    """b learns in step 5, between the updates of steps 4 and 8, and not after."""
    only_a = dict.fromkeys((6, 7, 8, 9, 10, 11, 12), frozenset({"a"}))
    method = EMA(smoothing=0.9, update_interval="4ba")
    state, _ = follow(method, 12, HUNDRED, only_a)
    found = averages(method, state, HUNDRED)
    expected_b = 0.9 * weights(4) + 0.1 * weights(5)
    torch.testing.assert_close(found["b"], torch.full((2, 2), expected_b))
    torch.testing.assert_close(found["a"], torch.full((3,), expected(0.9, [4, 8, 12])))


@pytest.mark.parametrize("interval", ["1ba", "3ba"])
@pytest.mark.parametrize("stop", [0, 1, 4, 6, 9])
def test_resumes_with_the_same_bits(interval: str, stop: int) -> None:
    learnt = {5: frozenset({"a"}), 7: frozenset({"b"})}
    method = EMA(half_life="4ba", update_interval=interval, ema_start="2ba")
    whole, _ = follow(method, 12, HUNDRED, learnt)
    half, _ = follow(method, stop, HUNDRED, learnt)
    saved = {name: value.clone() for name, value in half.items()}
    resumed, _ = follow(method, 12, HUNDRED, learnt, state=saved, first=stop + 1)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_frozen_and_narrow_parameters() -> None:
    model = Two().bfloat16()
    model.b.requires_grad_(False)
    method = EMA(smoothing=0.999)
    nn.init.ones_(model.a)
    state = method.after({}, weights_of(model), at(model, 1, HUNDRED), None)
    nn.init.zeros_(model.a)
    for step in range(2, 12):
        state = method.after(state, weights_of(model), at(model, step, HUNDRED), None)
    found = averages(method, state, HUNDRED)
    assert set(found) == {"a"}
    # bfloat16 would have stayed at 1: a thousandth is less than its precision.
    torch.testing.assert_close(found["a"], torch.full((3,), 0.999**10))


def test_function_averages_parameters_and_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = copy.deepcopy(model)
    model(torch.randn(8, 3)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    before = {name: value.double() for name, value in average.state_dict().items()}
    compute_ema(model, average, 0.75)
    for name, value in average.state_dict().items():
        latest = model.state_dict()[name]
        mixed = 0.75 * before[name] + 0.25 * latest.double() if value.is_floating_point() else latest.double()
        torch.testing.assert_close(value.double(), mixed, atol=1e-6, rtol=1e-6)
    assert int(average.state_dict()["1.num_batches_tracked"]) == 1


def test_function_equals_method() -> None:
    model = Two()
    nn.init.uniform_(model.a, generator=torch.Generator().manual_seed(0))
    average = copy.deepcopy(model)
    method = EMA(smoothing=0.99)
    state = method.after({}, weights_of(model), at(model, 1, HUNDRED), None)
    for step in range(2, 6):
        nn.init.uniform_(model.a, generator=torch.Generator().manual_seed(step))
        state = method.after(state, weights_of(model), at(model, step, HUNDRED), None)
        compute_ema(model, average)
    assert torch.equal(averages(method, state, HUNDRED)["a"], average.a)


def test_function_refuses() -> None:
    with pytest.raises(PlanError, match="differ in a, b, bias, weight"):
        compute_ema(Two(), nn.Linear(2, 2))
    with pytest.raises(PlanError, match="smoothing=2"):
        compute_ema(Two(), Two(), 2)


@pytest.mark.parametrize(
    ("options", "mend"),
    [
        ({"half_life": None}, "Give half_life"),
        ({"smoothing": 1.0}, r"not in \[0, 1\)"),
        ({"half_life": "3 moons"}, "not a time"),
        ({"ema_start": "5sec"}, "host's clock"),
        ({"update_interval": "5sec"}, "host's clock"),
    ],
)
def test_refuses_options(options: dict[str, Any], mend: str) -> None:
    with pytest.raises(PlanError, match=mend):
        EMA(**options)


def test_refuses_a_span_that_has_no_length() -> None:
    assert EMA.stage is Stage.AVERAGE
    with pytest.raises(PlanError, match="no step number"):
        follow(EMA(half_life="2ep"), 1, Budget(Time.parse("90sec")))
