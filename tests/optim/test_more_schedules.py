"""The further schedules against torch's schedulers and closed forms, and the laws of dilation."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import PlanError
from cosmati.optim.more_schedules import CosineWarmRestarts, Exponential, LinearToZero, MultiStep, Polynomial, Step
from cosmati.optim.schedules import Constant, Linear, Schedule

WARMUPS = st.sampled_from(["0ba", "8ba", "0.1dur", "0.35dur"])
SMOOTH = st.one_of(
    st.builds(lambda w, f: Exponential(warmup=w, every="0.1dur", factor=f), WARMUPS, st.floats(0.5, 1)),
    st.builds(lambda w, p, f: Polynomial(warmup=w, power=p, final=f), WARMUPS, st.floats(1, 3), st.floats(0, 1)),
    st.builds(lambda w: LinearToZero(warmup=w), WARMUPS),
)
ALL = st.one_of(
    SMOOTH,
    st.builds(lambda w, f: Step(warmup=w, every="25ba", factor=f), WARMUPS, st.floats(0.01, 1)),
    st.builds(lambda w: MultiStep(warmup=w, milestones=("0.5dur", "0.75dur")), WARMUPS),
    st.builds(
        lambda w, g, f: CosineWarmRestarts(warmup=w, cycle="0.2dur", growth=g, final=f),
        WARMUPS,
        st.sampled_from([1.0, 1.5, 2.0]),
        st.floats(0, 0.5),
    ),
)


def budget(steps: int, ratio: float = 1.0) -> Budget:
    return Budget(Time.parse(f"{steps}ba"), ratio=ratio)


def run(schedule: Schedule, length: Budget) -> list[float]:
    assert length.num_steps is not None
    return [schedule.multiplier(length.elapsed(Clock(step=s)), length) for s in range(length.num_steps)]


def torch_run(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 60), st.integers(1, 20), st.floats(0.1, 1))
def test_steps_against_torch(steps: int, every: int, factor: float) -> None:
    theirs = torch_run(lambda o: lr_scheduler.StepLR(o, every, factor), steps)
    assert run(Step(every=f"{every}ba", factor=factor), budget(steps)) == pytest.approx(theirs)
    milestones = (every, 2 * every + 1)
    theirs = torch_run(lambda o: lr_scheduler.MultiStepLR(o, milestones, factor), steps)
    schedule = MultiStep(milestones=tuple(f"{m}ba" for m in reversed(milestones)), factor=factor)
    assert run(schedule, budget(steps)) == pytest.approx(theirs)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 60), st.floats(0.5, 1))
def test_exponential_against_torch(steps: int, factor: float) -> None:
    theirs = torch_run(lambda o: lr_scheduler.ExponentialLR(o, factor), steps)
    assert run(Exponential(every="1ba", factor=factor), budget(steps)) == pytest.approx(theirs)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 3))
def test_restarts_against_torch(steps: int, cycle: int, growth: int) -> None:
    theirs = torch_run(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, cycle, growth, 0.1), steps)
    ours = run(CosineWarmRestarts(cycle=f"{cycle}ba", growth=growth, final=0.1), budget(steps))
    assert ours == pytest.approx(theirs, abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 60), st.floats(0.5, 3))
def test_polynomial_against_torch(steps: int, power: float) -> None:
    theirs = torch_run(lambda o: lr_scheduler.PolynomialLR(o, steps, power), steps)
    assert run(Polynomial(power=power), budget(steps)) == pytest.approx(theirs)


@pytest.mark.long
@given(st.integers(2, 60), WARMUPS)
def test_a_line_to_zero_is_a_line(steps: int, warmup: str) -> None:
    length = budget(20 + steps)
    assert run(LinearToZero(warmup=warmup), length) == run(Linear(warmup=warmup), length)
    assert run(LinearToZero(warmup=warmup), length) == pytest.approx(run(Polynomial(warmup=warmup, power=1), length))
    assert 0 < run(LinearToZero(warmup=warmup), length)[-1] <= 1


@given(SMOOTH, st.floats(0, 1), st.floats(0, 1e-3))
def test_smooth_ones_have_no_jump(schedule: Schedule, start: float, gap: float) -> None:
    """Warm-up included; the steepest is 8 steps of 200."""
    here, there = (schedule.multiplier(min(1.0, e), budget(200)) for e in (start, start + gap))
    assert abs(here - there) <= 30 * gap + 1e-9


@given(ALL, st.integers(0, 999), st.sampled_from([2.0, 3.0]))
def test_dilates_with_the_budget(schedule: Schedule, step: int, ratio: float) -> None:
    """The same curve on a run 2 or 3 times as long: only the length of a step in the warm-up differs."""
    plain, dilated = budget(1000), budget(1000, ratio)
    short, long = (b.elapsed(Clock(step=round(step * r))) for b, r in ((plain, 1.0), (dilated, ratio)))
    distance = abs(schedule.multiplier(short, plain) - schedule.multiplier(long, dilated))
    # One step of 8 is 1/8, and a dilated one a half or a third of that; cosines are shifted by the same.
    assert distance <= 0.1251


@pytest.mark.long
@given(ALL, st.integers(60, 120))
def test_warm_up_rises_to_one_and_multiplies_nothing_after(schedule: Schedule, steps: int) -> None:
    rates = run(schedule, budget(steps))
    assert 0 < rates[0] <= 1
    assert all(0 < rate <= 1 + 1e-12 for rate in rates)


def test_decays_start_from_one_where_the_warm_up_ends() -> None:
    for schedule in (
        Exponential(warmup="4ba", every="2ba", factor=0.5),
        Polynomial(warmup="4ba"),
        LinearToZero(warmup="4ba"),
    ):
        rates = run(schedule, budget(20))
        assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1])
        assert rates[4] < 1


def test_cycles_that_fill_the_rest_of_the_run_do_not_restart_in_its_last_step() -> None:
    rates = run(CosineWarmRestarts(warmup="4ba", cycle="4ba"), budget(20))
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1])
    assert rates[4::4] == pytest.approx([1, 1, 1, 1])
    assert rates[7::4] == pytest.approx([(1 + math.cos(0.75 * math.pi)) / 2] * 4)


def test_off_values_are_constant() -> None:
    constant = run(Constant(warmup="3ba"), budget(30))
    for schedule in (
        Step(warmup="3ba", every="2ba", factor=1.0),
        MultiStep(warmup="3ba", milestones=()),
        Exponential(warmup="3ba", every="2ba", factor=1.0),
        CosineWarmRestarts(warmup="3ba", cycle="4ba", final=1.0),
        Polynomial(warmup="3ba", final=1.0),
    ):
        assert run(schedule, budget(30)) == constant


def test_epochs_are_placed_by_their_length() -> None:
    length = Budget(Time.parse("10ep"), steps_per_epoch=7)
    rates = run(MultiStep(milestones=("3ep", "6ep"), factor=0.5), length)
    assert rates == [1.0] * 21 + [0.5] * 21 + [0.25] * 28


@pytest.mark.parametrize(
    ("make", "mend"),
    [
        (lambda: Step(every="0ba"), "is no span"),
        (lambda: Step(every="2ba", factor=-0.1), "factor=-0.1"),
        (lambda: MultiStep(milestones="3ep"), "one string"),  # type: ignore[arg-type]
        (lambda: MultiStep(milestones=("late",)), "not a time"),
        (lambda: Exponential(factor=0.0), "number > 0"),
        (lambda: CosineWarmRestarts(cycle="3ba", growth=0.5), "growth=0.5"),
        (lambda: CosineWarmRestarts(cycle="3ba", final=-1), "final=-1"),
        (lambda: Polynomial(power=0), "power=0"),
        (lambda: Polynomial(final=math.inf), "final=inf"),
        (lambda: LinearToZero(warmup="soon"), "not a time"),
    ],
)
def test_refuses_options(make: Callable[[], object], mend: str) -> None:
    with pytest.raises(PlanError, match=mend):
        make()


def test_refuses_what_does_not_fit_the_run() -> None:
    with pytest.raises(PlanError, match="can't be placed"):
        run(Step(every="1ep"), budget(10))
    with pytest.raises(PlanError, match="whole run"):
        run(LinearToZero(warmup="10ba"), budget(10))
