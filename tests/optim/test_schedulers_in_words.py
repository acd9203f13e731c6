"""The words for another tool's scheduler are, attribute by attribute, the call that has its curve here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from cosmati.optim import foreign_schedules
from cosmati.optim.foreign_schedules import schedule_in_place_of

OBJECT = "what it does as an object with multiplier(fraction_elapsed, budget): no schedule here begins at 0"
PER_EPOCH = ", with 'ep' in place of 'ba' if its step() was called once an epoch"


def sgd(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


Make = Callable[[torch.optim.Optimizer], Any]
CALLS: list[tuple[Make, str]] = [
    (lambda o: torchs.CosineAnnealingLR(o, T_max=7, eta_min=0.125), "Cosine(t_max='7ba', final=0.25)"),
    (
        lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=0.05),
        "CosineWarmRestarts(cycle='3ba', growth=2, final=0.1)",
    ),
    (lambda o: torchs.ExponentialLR(o, 0.75), "Exponential(every='1ba', factor=0.75)"),
    (lambda o: torchs.LinearLR(o, 1.0, 0.25, total_iters=6), "Linear(t_max='6ba', final=0.25)"),
    (lambda o: torchs.LinearLR(o, 0.25, 1.0, total_iters=6), "Constant(warmup='6ba')"),
    (lambda o: torchs.LinearLR(o, 1.0, 1.0, total_iters=6), "Linear(t_max='6ba', final=1)"),
    (lambda o: torchs.MultiStepLR(o, [9, 4, 4], gamma=0.5), "MultiStep(milestones=('4ba', '4ba', '9ba'), factor=0.5)"),
    (lambda o: torchs.PolynomialLR(o, total_iters=8, power=2.0), "Polynomial(t_max='8ba', power=2)"),
    (lambda o: torchs.StepLR(o, 4, gamma=0.1), "Step(every='4ba', factor=0.1)"),
]


@pytest.mark.parametrize(("make", "call"), CALLS, ids=[call for _, call in CALLS])
def test_a_scheduler_of_pytorchs_is_named_with_its_call(make: Make, call: str) -> None:
    scheduler = make(sgd())
    name = type(scheduler).__name__
    assert schedule_in_place_of(scheduler) == (
        f"a PyTorch {name} sets an optimizer's rates itself. Write {call}{PER_EPOCH}"
    )


def test_the_last_rate_is_a_share_of_the_first() -> None:
    scheduler = torchs.CosineAnnealingLR(sgd(2.0), T_max=7, eta_min=0.5)
    scheduler.optimizer.param_groups[0]["lr"] = 1.0  # as it goes on
    assert "final=0.25)" in schedule_in_place_of(scheduler)
    del scheduler.optimizer.param_groups[0]["initial_lr"]
    assert "final=0.5)" in schedule_in_place_of(scheduler)
    scheduler.optimizer.param_groups[0]["initial_lr"] = 0.0
    assert "final=0.5)" in schedule_in_place_of(scheduler)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torchs.LinearLR(o, 0.25, 0.5, total_iters=6),
        torchs.ConstantLR,
        lambda o: torchs.LambdaLR(o, lambda step: 0.5**step),
    ],
)
def test_a_scheduler_that_has_no_schedule_here_is_told_so(make: Make) -> None:
    scheduler = make(sgd())
    assert schedule_in_place_of(scheduler) == (
        f"a PyTorch {type(scheduler).__name__} sets an optimizer's rates itself. Write what it does as a schedule: an "
        "object with multiplier(fraction_elapsed, budget); or give a built optimizer, keep your loop, and call both "
        "there"
    )


def test_a_step_every_epoch_is_only_told_of_what_counts_steps() -> None:
    scheduler = torchs.ExponentialLR(sgd(), 0.5)
    assert schedule_in_place_of(scheduler).endswith(PER_EPOCH)


def words(function: Any) -> str | None:
    return foreign_schedules._lambda(SimpleNamespace(lr_lambdas=[function]), 1.0)


def _get_cosine_schedule_with_warmup_lr_lambda(step: int, **_: float) -> float:
    return float(step)


def _get_linear_schedule_with_warmup_lr_lambda(step: int, **_: float) -> float:
    return float(step)


def _get_polynomial_decay_schedule_with_warmup_lr_lambda(step: int, **_: float) -> float:
    return float(step)


def _get_constant_schedule_with_warmup_lr_lambda(step: int, **_: float) -> float:
    return float(step)


def _get_wsd_schedule_lr_lambda(step: int, **_: float) -> float:
    return float(step)


COSINE = _get_cosine_schedule_with_warmup_lr_lambda


def test_a_partial_of_transformers_is_read_by_its_name_and_its_keywords() -> None:
    both = {"num_warmup_steps": 4, "num_training_steps": 40}
    assert words(functools.partial(COSINE, **both)) == "Cosine(warmup='4ba', t_max='40ba')"
    assert words(functools.partial(COSINE, **both, num_cycles=0.5)) == "Cosine(warmup='4ba', t_max='40ba')"
    linear = functools.partial(_get_linear_schedule_with_warmup_lr_lambda, **both)
    assert words(linear) == "Linear(warmup='4ba', t_max='40ba')"
    constant = functools.partial(_get_constant_schedule_with_warmup_lr_lambda, num_warmup_steps=0)
    assert words(constant) == "Constant(warmup='0ba')"
    falling = functools.partial(
        _get_polynomial_decay_schedule_with_warmup_lr_lambda, **both, power=2.0, lr_end=0.25, lr_init=0.5
    )
    assert words(falling) == "Polynomial(warmup='4ba', t_max='40ba', power=2, final=0.5)"


@pytest.mark.parametrize(
    "function",
    [
        COSINE,
        functools.partial(COSINE),
        functools.partial(COSINE, num_training_steps=4),
        functools.partial(COSINE, num_warmup_steps=4, num_cycles=1.5),
        functools.partial(_get_wsd_schedule_lr_lambda, num_warmup_steps=4),
        functools.partial(functools.partial(max), num_warmup_steps=4),
    ],
)
def test_any_other_function_has_no_name_here(function: Any) -> None:
    assert words(function) is None


def test_a_function_without_a_name_has_none_here() -> None:
    class Nameless:
        def __call__(self, step: int) -> float:
            return float(step)

    assert words(functools.partial(Nameless(), num_warmup_steps=4)) is None


def sequence(*make: Make, milestone: int = 5) -> str | None:
    optimizer = sgd()
    parts = [one(optimizer) for one in make]
    milestones = [milestone * (number + 1) for number in range(len(parts) - 1)]
    scheduler = torchs.SequentialLR(optimizer, parts, milestones=milestones)
    return foreign_schedules._in_steps(scheduler)


def rising(optimizer: torch.optim.Optimizer) -> Any:
    return torchs.LinearLR(optimizer, 0.1, 1.0, total_iters=5)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torchs.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.25)


def falling_line(optimizer: torch.optim.Optimizer) -> Any:
    return torchs.LinearLR(optimizer, 1.0, 0.2, total_iters=10)


def test_a_warm_up_and_one_more_are_one_schedule() -> None:
    assert sequence(rising, cosine) == "Cosine(warmup='5ba', t_max='25ba', final=0.5)"
    assert sequence(rising, falling_line, milestone=7) == "Linear(warmup='7ba', t_max='17ba', final=0.2)"


@pytest.mark.parametrize(
    "make",
    [
        (rising, cosine, falling_line),
        (cosine, falling_line),
        (falling_line, cosine),
        (rising, rising),
        (rising, lambda o: torchs.ExponentialLR(o, 0.5)),
    ],
)
def test_other_sequences_have_no_name_here(make: tuple[Make, ...]) -> None:
    assert sequence(*make) is None


def test_one_cycle_is_a_cosine_with_its_highest_rate() -> None:
    scheduler = torchs.OneCycleLR(sgd(), max_lr=0.5, total_steps=40, pct_start=0.25, final_div_factor=10.0)
    # It starts at 0.5 / 25, ends at a tenth of that, and its first phase at step 0.25 * 40 - 1.
    assert schedule_in_place_of(scheduler) == (
        "a PyTorch OneCycleLR sets an optimizer's rates itself. Write Cosine(warmup='10ba', t_max='40ba', "
        f"final=0.004) with lr=0.5, whose warm-up is a line{PER_EPOCH}"
    )


def composers(kind: str, module: str = "composer.optim.scheduler", **attributes: Any) -> str:
    return schedule_in_place_of(type(kind, (), {"__module__": module, **attributes})())


DECAY = {"t_max": "1dur", "alpha_f": 0.25, "t_warmup": "2ep", "power": 2.0}
FALLS = {"t_warmup": "2ep", "step_size": "3ba", "gamma": 0.5}
RESTARTS = {"t_0": "3ep", "t_mult": 2.0, "alpha_f": 0.5}
MILESTONES = {"milestones": ["2ep", "4ep"], "gamma": 0.1}


@pytest.mark.parametrize(
    ("kind", "attributes", "call"),
    [
        ("ConstantScheduler", {"t_warmup": "2ep"}, "Constant()"),
        ("ConstantWithWarmupScheduler", {"t_warmup": "2ep"}, "Constant(warmup='2ep')"),
        ("CosineAnnealingScheduler", {"t_max": "1dur", "alpha_f": 0.0}, "Cosine(t_max='1dur', final=0.0)"),
        (
            "CosineAnnealingWithWarmupScheduler",
            DECAY,
            "Cosine(warmup='2ep', t_max='1dur', final=0.25, power=2.0)",
        ),
        ("CosineAnnealingWarmRestartsScheduler", RESTARTS, "CosineWarmRestarts(cycle='3ep', growth=2.0, final=0.5)"),
        ("ExponentialScheduler", {"decay_period": "1ep", "gamma": 0.9}, "Exponential(every='1ep', factor=0.9)"),
        ("LinearScheduler", {"t_max": "1dur"}, "Linear(t_max='1dur')"),
        ("LinearWithWarmupScheduler", {"t_warmup": "1ba", "t_max": "9ba"}, "Linear(warmup='1ba', t_max='9ba')"),
        ("MultiStepScheduler", MILESTONES, "MultiStep(milestones=('2ep', '4ep'), factor=0.1)"),
        (
            "MultiStepWithWarmupScheduler",
            {**MILESTONES, "t_warmup": "1ep"},
            "MultiStep(warmup='1ep', milestones=('2ep', '4ep'), factor=0.1)",
        ),
        ("PolynomialScheduler", {"t_max": "1dur", "power": 3.0}, "Polynomial(t_max='1dur', power=3.0)"),
        ("PolynomialWithWarmupScheduler", {"t_warmup": "1ep"}, "Polynomial(warmup='1ep')"),
        ("StepScheduler", FALLS, "Step(warmup='2ep', every='3ba', factor=0.5)"),
    ],
)
def test_a_scheduler_of_composers_is_named_with_its_call(kind: str, attributes: dict[str, Any], call: str) -> None:
    assert composers(kind, **attributes) == f"Composer's {kind} needs Composer's state. Write {call}"


def test_a_peak_goes_into_the_rate_and_the_last_rate_is_a_share_of_it() -> None:
    start = "Composer's LinearScheduler needs Composer's state. Write "
    assert composers("LinearScheduler", alpha_i=2.0, alpha_f=0.5, t_max="1dur") == (
        f"{start}Linear(t_max='1dur', final=0.25) with lr times 2"
    )
    assert composers("LinearScheduler", alpha=0.5, t_max="1dur") == f"{start}Linear(t_max='1dur') with lr times 0.5"
    assert composers("LinearScheduler", alpha_i=0.5, alpha=3.0) == f"{start}Linear() with lr times 0.5"


def test_a_line_from_nought_is_a_warm_up_to_its_end() -> None:
    start = "Composer's LinearScheduler needs Composer's state. Write "
    rising = {"alpha_i": 0.0, "t_max": "0.25dur"}
    assert composers("LinearScheduler", **rising, alpha_f=2.0) == f"{start}Constant(warmup='0.25dur') with lr times 2"
    assert composers("LinearScheduler", **rising, alpha_f=1.0) == f"{start}Constant(warmup='0.25dur')"
    assert composers("LinearScheduler", **rising, alpha_f=0.0) == start + OBJECT
    assert composers("LinearScheduler", **rising) == start + OBJECT
    assert composers("LinearScheduler", **rising, alpha_f=1.0, t_warmup="1ba") == start + OBJECT


def test_what_is_no_scheduler_of_theirs_is_nothing() -> None:
    for given in (0.1, None, "cosine", object()):
        assert schedule_in_place_of(given) == ""
    assert composers("LinearScheduler", module="mine.composer.optim") == ""
    assert composers("LinearScheduler", module="composers") == ""
    assert composers("OtherScheduler") == ""


class Time:
    def to_timestring(self) -> str:
        return "3ep"


def test_times_are_plain_texts_also_in_lists() -> None:
    plain = foreign_schedules._plain
    assert plain(Time()) == "3ep"
    assert plain([Time(), "1ba", 2]) == ("3ep", "1ba", 2)
    assert plain((1, [Time()])) == (1, ("3ep",))
    assert plain(0.5) == 0.5
    odd = SimpleNamespace(to_timestring="3ep")
    assert plain(odd) is odd
