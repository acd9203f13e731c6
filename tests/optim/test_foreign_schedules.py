"""A scheduler of another tool's as a schedule: the error names the one to write, and that one has the same curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from cosmati import optim
from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import PlanError
from cosmati.optim import SGD, Schedule

STEPS, LR = 40, 0.2


def rates_of(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def refused(scheduler: Any) -> str:
    with pytest.raises(PlanError) as caught:
        SGD(lr=LR, schedule=scheduler)
    return str(caught.value)


def written(message: str) -> Schedule:
    """Make the schedule that a message names."""
    rest = message.partition("Write ")[2]
    ends = [index + 1 for index, letter in enumerate(rest) if letter == ")"]
    call = next(rest[:end] for end in ends if rest[:end].count("(") == rest[:end].count(")"))
    schedule = eval(call, {name: getattr(optim, name) for name in optim.__all__})
    assert isinstance(schedule, Schedule)
    return schedule


def run(schedule: Schedule) -> list[float]:
    length = Budget(Time.parse(f"{STEPS}ba"))
    return [LR * schedule.multiplier(length.elapsed(Clock(step=step)), length) for step in range(STEPS)]


def plain_sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS, eta_min=0.02),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=10, T_mult=2, eta_min=0.01),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, total_iters=30),
        lambda o: lr_scheduler.MultiStepLR(o, [10, 25], gamma=0.5),
        lambda o: lr_scheduler.PolynomialLR(o, total_iters=30, power=2.0),
        lambda o: lr_scheduler.StepLR(o, 7, gamma=0.5),
    ],
)
def test_the_schedule_that_is_named_has_pytorchs_curve(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    optimizer = plain_sgd()
    scheduler = make(optimizer)
    message = refused(scheduler)
    assert type(scheduler).__name__ in message
    assert "'ep' in place of 'ba'" in message
    assert run(written(message)) == pytest.approx(rates_of(optimizer, scheduler), rel=1e-6, abs=1e-12)


def test_warm_up_and_cosine_in_sequence() -> None:
    """A step of warm-up counts from its end here, so that none rests: PyTorch's is one step behind."""
    optimizer = plain_sgd()
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=30),
    ]
    schedule = written(refused(lr_scheduler.SequentialLR(optimizer, parts, milestones=[10])))
    assert schedule == optim.Cosine(warmup="10ba", t_max="40ba")
    parts[1] = lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    schedule = written(refused(lr_scheduler.SequentialLR(optimizer, parts, milestones=[10])))
    assert schedule == optim.Linear(warmup="10ba", t_max="30ba", final=0.1)
    assert written(refused(lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10))) == optim.Constant(warmup="10ba")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:::transformers")
def test_transformers_schedules_are_lambdas() -> None:
    optimization = pytest.importorskip("transformers.optimization", reason="the extra `llm` isn't installed")
    cosine = optimization.get_cosine_schedule_with_warmup(plain_sgd(), 4, STEPS)
    assert written(refused(cosine)) == optim.Cosine(warmup="4ba", t_max="40ba")
    linear = optimization.get_linear_schedule_with_warmup(plain_sgd(), 4, STEPS)
    assert written(refused(linear)) == optim.Linear(warmup="4ba", t_max="40ba")
    constant = optimization.get_constant_schedule_with_warmup(plain_sgd(), 4)
    assert written(refused(constant)) == optim.Constant(warmup="4ba")
    falling = optimization.get_polynomial_decay_schedule_with_warmup(plain_sgd(), 4, STEPS, lr_end=0.02, power=2.0)
    assert written(refused(falling)) == optim.Polynomial(warmup="4ba", t_max="40ba", power=2.0, final=0.1)
    # One step behind, as PyTorch's: its first step has no rate at all.
    optimizer = plain_sgd()
    theirs = rates_of(optimizer, optimization.get_linear_schedule_with_warmup(optimizer, 4, STEPS))
    ours = run(optim.Linear(warmup="4ba", t_max="40ba"))
    assert theirs[0] == 0
    assert ours[:4] == pytest.approx(theirs[1:5])


def test_one_cycle_is_close() -> None:
    optimizer = plain_sgd()
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=STEPS)
    message = refused(scheduler)
    assert "with lr=0.2, whose warm-up is a line" in message
    theirs = [optimizer.param_groups[0]["lr"]]
    for _ in range(STEPS - 1):
        optimizer.step()
        scheduler.step()
        theirs.append(optimizer.param_groups[0]["lr"])
    ours = run(written(message))
    assert max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) < 0.2 * LR
    assert ours[11] == pytest.approx(theirs[11])


@pytest.mark.parametrize(
    "make",
    [
        lr_scheduler.ReduceLROnPlateau,
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
        lambda o: lr_scheduler.LinearLR(o, 0.2, 0.8, total_iters=10),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 3)], milestones=[5]
        ),
    ],
)
def test_what_has_no_schedule_here_is_told_the_ways_out(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    message = refused(make(plain_sgd()))
    assert "multiplier(fraction_elapsed, budget)" in message
    assert "keep your loop" in message


@dataclass
class ComposersTime:
    text: str

    def to_timestring(self) -> str:
        return self.text


def composers(kind: str, **attributes: Any) -> Any:
    return type(kind, (), {"__module__": "composer.optim.scheduler", **attributes})()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (composers("CosineAnnealingScheduler", t_max="1dur", alpha_f=0.1), optim.Cosine(t_max="1dur", final=0.1)),
        (
            composers("CosineAnnealingWithWarmupScheduler", t_warmup=ComposersTime("2ep"), t_max="0.8dur", alpha_f=0.0),
            optim.Cosine(warmup="2ep", t_max="0.8dur"),
        ),
        (composers("LinearScheduler", t_max="5ep", alpha_f=0.0), optim.Linear(t_max="5ep")),
        (composers("MultiStepScheduler", milestones=["2ep", "4ep"], gamma=0.1),
         optim.MultiStep(milestones=("2ep", "4ep"))),
        (composers("StepScheduler", step_size="3ep", gamma=0.5), optim.Step(every="3ep", factor=0.5)),
        (composers("ExponentialScheduler", decay_period="1ep", gamma=0.9), optim.Exponential(every="1ep", factor=0.9)),
        (composers("PolynomialScheduler", power=3.0, t_max="1dur", alpha_f=0.0), optim.Polynomial(power=3.0)),
        (composers("ConstantWithWarmupScheduler", t_warmup="10ba"), optim.Constant(warmup="10ba")),
    ],
)  # fmt: skip
def test_composers_schedulers_are_told_their_names_here(given: Any, expected: Schedule) -> None:
    assert written(refused(given)) == expected


@pytest.mark.parametrize(
    ("given", "expected", "peak"),
    [
        (composers("LinearScheduler", alpha_i=0.5, alpha_f=0.1, t_max="1dur"), optim.Linear(final=0.2), "0.5"),
        (
            composers("LinearScheduler", alpha_i=0.0, alpha_f=2.0, t_max="0.25dur"),
            optim.Constant(warmup="0.25dur"),
            "2",
        ),
        (composers("ConstantWithWarmupScheduler", t_warmup="10ba", alpha=3.0), optim.Constant(warmup="10ba"), "3"),
    ],
)
def test_the_peak_of_composers_schedulers_goes_into_the_rate(given: Any, expected: Schedule, peak: str) -> None:
    message = refused(given)
    assert written(message) == expected
    assert f" with lr times {peak}" in message


@pytest.mark.parametrize("attributes", [{"alpha_f": 0.0}, {"alpha_f": 1.0, "t_warmup": "10ba"}])
def test_composers_lines_from_zero_that_have_no_name_here(attributes: dict[str, Any]) -> None:
    message = refused(composers("LinearWithWarmupScheduler", alpha_i=0.0, t_max="1dur", **attributes))
    assert "multiplier(fraction_elapsed, budget)" in message


def test_anything_else_is_no_schedule() -> None:
    assert "is no schedule" in refused(0.1)
    assert "is no schedule" in refused(type("CosineAnnealingScheduler", (), {})())
