"""Values of the further schedules at single moments, by hand: before, on and after each fall, and at the ends."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from cosmati.core.clock import Budget, Time
from cosmati.errors import PlanError
from cosmati.optim.more_schedules import CosineWarmRestarts, Exponential, LinearToZero, MultiStep, Polynomial, Step

TEN = Budget(Time.parse("10ba"))
HALF = (1 + math.cos(math.pi / 2)) / 2
QUARTER = (1 + math.cos(math.pi / 4)) / 2


def at(schedule: Any, *moments: float, budget: Budget = TEN) -> list[float]:
    return [schedule.multiplier(moment, budget) for moment in moments]


def test_steps_fall_at_each_span_and_a_warm_up_does_not_move_them() -> None:
    assert at(Step(every="2ba", factor=0.5), 0.0, 0.199, 0.2, 0.3999, 0.4, 0.8, 1.0) == [
        1,
        1,
        0.5,
        0.5,
        0.25,
        2**-4,
        2**-5,
    ]
    assert at(Step(every="0.2dur", factor=0.0), 0.1, 0.2, 0.9) == [1, 0, 0]
    assert at(Step(every="4ba"), 0.5) == [0.1]
    # The first step of a warm-up of four has a quarter of the rate.
    assert at(Step(every="2ba", factor=0.5, warmup="4ba"), 0.0, 0.1, 0.2, 0.3, 0.4) == pytest.approx(
        [0.25, 0.5, 0.375, 0.5, 0.25]
    )
    assert at(Step(every="0.1dur", factor=0.5), 0.1 + 0.2 - 1e-12, 0.3 - 1e-6) == [2**-3, 2**-2]
    assert at(Step(every="1ba", factor=2.0), 0.0, 0.3) == [1, 8]


def test_milestones_count_whatever_their_order_and_twice_where_they_stand_twice() -> None:
    moments = (0.0, 0.2999, 0.3, 0.6, 0.9, 1.0)
    assert at(MultiStep(milestones=("6ba", "0.3dur", "6ba")), *moments) == pytest.approx([1, 1, 0.1, 1e-3, 1e-3, 1e-3])
    assert at(MultiStep(milestones=("0ba",), factor=0.5), 0.0) == [0.5]
    assert at(MultiStep(milestones=()), *moments) == [1] * 6
    warmed = MultiStep(milestones=("1ba", "5ba"), factor=0.5, warmup="2ba")
    assert at(warmed, 0.0, 0.1, 0.2, 0.5) == pytest.approx([0.5, 0.5, 0.5, 0.25])


def test_an_exponential_falls_by_its_factor_in_its_span_after_the_warm_up() -> None:
    assert at(Exponential(every="2ba", factor=0.25), 0.0, 0.1, 0.2, 0.4) == pytest.approx([1, 0.5, 0.25, 0.0625])
    warmed = Exponential(every="2ba", factor=0.25, warmup="4ba")
    assert at(warmed, 0.0, 0.1, 0.2, 0.3) == pytest.approx([0.25, 0.5, 0.75, 1])
    # A decay starts from the warm-up's last step, which has the whole rate.
    assert at(warmed, 0.4, 0.5) == pytest.approx([0.5, 0.25])
    epochs = Budget(Time.parse("4ep"), steps_per_epoch=5)
    assert at(Exponential(), 0.0, 0.25, 0.5, budget=epochs) == pytest.approx([1, 0.95, 0.95**2])
    assert at(Exponential(every="1dur", factor=2.0), 0.5, 1.0) == pytest.approx([math.sqrt(2), 2])


def test_cycles_of_one_length_start_again() -> None:
    cycles = CosineWarmRestarts(cycle="4ba", final=0.5)
    assert at(cycles, 0.0, 0.1, 0.2, 0.4, 0.5, 0.8) == pytest.approx(
        [1, 0.5 + 0.5 * QUARTER, 0.75, 1, 0.5 + 0.5 * QUARTER, 1]
    )
    assert at(CosineWarmRestarts(cycle="1dur"), 0.0, 0.5, 0.999999) == pytest.approx([1, HALF, 0], abs=1e-5)
    assert at(CosineWarmRestarts(cycle="0.1dur", final=0.5), 0.3 - 1e-13, 0.3 + 1e-13, 0.7) == pytest.approx([1, 1, 1])


def test_cycles_grow_by_their_factor() -> None:
    for growth, starts in ((2.0, (0.0, 0.1, 0.3, 0.7)), (3.0, (0.0, 0.1, 0.4))):
        cycles = CosineWarmRestarts(cycle="1ba", growth=growth)
        assert at(cycles, *starts) == pytest.approx([1] * len(starts))
        lengths = [growth**number / 10 for number in range(len(starts))]
        middles = [start + length / 2 for start, length in zip(starts, lengths, strict=True) if start + length < 1]
        assert at(cycles, *middles) == pytest.approx([HALF] * len(middles))
        assert at(cycles, *(start - 1e-4 for start in starts[1:])) == pytest.approx([0] * (len(starts) - 1), abs=1e-4)


def test_cycles_are_counted_from_the_warm_ups_end() -> None:
    for growth in (1.0, 2.0):
        warmed = CosineWarmRestarts(cycle="2ba", growth=growth, warmup="4ba")
        assert at(warmed, 0.0, 0.1, 0.3, 0.4, 0.5, 0.6) == pytest.approx([0.25, 0.5, 1, 1, HALF, 1])


def test_a_polynomial_ends_at_its_end_or_before() -> None:
    assert at(Polynomial(), 0.0, 0.5, 0.9, 1.0) == pytest.approx([1, 0.25, 0.01, 0])
    assert at(Polynomial(power=3, final=0.5), 0.0, 0.5, 1.0) == pytest.approx([1, 0.5 + 0.5 / 8, 0.5])
    assert at(Polynomial(power=1, final=0.5, t_max="5ba"), 0.2, 0.5, 0.9) == pytest.approx([0.8, 0.5, 0.5])
    assert at(Polynomial(power=1, final=2.0), 0.0, 0.5, 1.0) == pytest.approx([1, 1.5, 2])
    assert at(Polynomial(power=1, warmup="4ba"), 0.0, 0.1, 0.3, 1.0) == pytest.approx([0.25, 0.5, 1, 0])
    assert at(Polynomial(power=1, warmup="4ba"), 0.4) == pytest.approx([1 - 0.1 / 0.7])


def test_a_line_ends_at_0() -> None:
    assert at(LinearToZero(), 0.0, 0.25, 1.0) == pytest.approx([1, 0.75, 0])
    assert at(LinearToZero(warmup="4ba"), 0.0, 0.1, 0.3, 0.4, 1.0) == pytest.approx([0.25, 0.5, 1, 1 - 0.1 / 0.7, 0])


@pytest.mark.parametrize(
    ("kind", "required", "options", "says"),
    [
        (Step, {}, {"every": "0ba"}, "every='0ba' is no span. Give a time > 0"),
        (Step, {"every": "1ba"}, {"factor": -1e-9}, "factor=-1e-09 is no multiplier of a learning rate"),
        (Step, {"every": "1ba"}, {"factor": math.inf}, "factor=inf is no multiplier"),
        (Step, {"every": "1ba"}, {"factor": math.nan}, "factor=nan is no multiplier"),
        (MultiStep, {}, {"milestones": "3ep"}, "milestones='3ep' is one string. Give a tuple: ('3ep',)."),
        (MultiStep, {}, {"milestones": ("1ba", "late")}, "'late' is not a time"),
        (MultiStep, {"milestones": ()}, {"factor": -1.0}, "factor=-1.0 is no multiplier"),
        (Exponential, {}, {"every": "0ep"}, "every='0ep' is no span"),
        (Exponential, {}, {"factor": 0.0}, "factor=0.0 would end the run's learning at once"),
        (Exponential, {}, {"factor": -1.0}, "factor=-1.0 is no multiplier"),
        (CosineWarmRestarts, {}, {"cycle": "0dur"}, "cycle='0dur' is no span"),
        (CosineWarmRestarts, {"cycle": "1ba"}, {"growth": 0.999}, "growth=0.999: cycles that shrink have no end"),
        (CosineWarmRestarts, {"cycle": "1ba"}, {"growth": math.inf}, "growth=inf: cycles"),
        (CosineWarmRestarts, {"cycle": "1ba"}, {"final": -0.1}, "final=-0.1"),
        (Polynomial, {}, {"power": 0.0}, "power=0.0 makes no decay"),
        (Polynomial, {}, {"power": math.inf}, "power=inf makes no decay"),
        (Polynomial, {}, {"final": -0.1}, "final=-0.1"),
        (Polynomial, {}, {"t_max": "soon"}, "'soon' is not a time"),
    ],
)
def test_what_makes_no_curve_is_refused(
    kind: Any, required: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError) as caught:
        kind(**required, **options)
    assert says in str(caught.value)
    if required:
        kind(**required)
        with pytest.raises(PlanError, match="'soon' is not a time"):
            kind(**required, warmup="soon")


def test_the_last_numbers_that_make_a_curve_are_taken() -> None:
    assert at(Exponential(every="1ba", factor=1e-300), 0.0) == [1]
    assert at(Polynomial(power=1e-9), 0.5) == pytest.approx([1])
    assert at(CosineWarmRestarts(cycle="1ba", growth=1, final=0), 0.05) == pytest.approx([HALF])


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Step, "1ba"),
        (MultiStep, ("1ba",)),
        (Exponential, "1ba"),
        (CosineWarmRestarts, "1ba"),
        (Polynomial, 2.0),
        (LinearToZero, "1ba"),
    ],
)
def test_numbers_of_a_curve_are_given_by_name_and_stay(kind: Any, value: object) -> None:
    with pytest.raises(TypeError, match="takes its settings by name"):
        kind(value)
    required = {Step: {"every": "1ba"}, MultiStep: {"milestones": ("1ba",)}, CosineWarmRestarts: {"cycle": "1ba"}}
    given: Any = required.get(kind, {})
    made = kind(**given)
    with pytest.raises(FrozenInstanceError):
        made.warmup = "1ba"
