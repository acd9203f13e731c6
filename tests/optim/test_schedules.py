"""Schedules against their closed forms, and the laws of continuity and dilation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import PlanError
from cosmati.optim.schedules import WSD, Constant, Cosine, Linear, Schedule

WARMUPS = st.sampled_from(["0ba", "1ba", "7ba", "0.1dur", "0.35dur", "0.5dur"])
SCHEDULES = st.one_of(
    st.builds(lambda w: Constant(warmup=w), WARMUPS),
    st.builds(lambda w, f: Linear(warmup=w, final=f), WARMUPS, st.sampled_from([0.0, 0.1, 2.0])),
    st.builds(lambda w, f: Cosine(warmup=w, final=f), WARMUPS, st.sampled_from([0.0, 0.1])),
    st.builds(
        lambda kind, w, t: kind(warmup=w, t_max=t, final=0.1),
        st.sampled_from([Linear, Cosine]),
        WARMUPS,
        st.sampled_from(["0.6dur", "0.9dur", "1.5dur"]),
    ),
    st.builds(
        lambda w, d, f: WSD(warmup=w, decay=d, final=f),
        WARMUPS,
        st.sampled_from(["0.2dur", "10ba", "0.5dur"]),
        st.sampled_from([0.0, 0.3]),
    ),
)


def budget(steps: float, ratio: float = 1.0) -> Budget:
    return Budget(Time.parse(f"{steps}ba"), ratio=ratio)


def run(schedule: Schedule, length: Budget) -> list[float]:
    assert length.num_steps is not None
    return [schedule.multiplier(length.elapsed(Clock(step=s)), length) for s in range(length.num_steps)]


def test_warm_up_ends_where_the_decay_starts_and_no_step_is_wasted() -> None:
    assert run(Constant(warmup="4ba"), budget(8)) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    # 4 steps of warm-up; the decay starts from 1 with step 3, and reaches 0 after the last step.
    assert run(Linear(warmup="4ba"), budget(8)) == pytest.approx([0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2])
    assert run(Linear(), budget(4)) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert run(Constant(), budget(3)) == [1, 1, 1]


def test_cosine_against_its_formula() -> None:
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * s / 20)) / 2 for s in range(20)]
    assert run(Cosine(final=0.1), budget(20)) == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_wsd_against_its_formula(shape: str) -> None:
    rates = run(WSD(warmup="5ba", decay="10ba", final=0.2, shape=shape), budget(50))  # type: ignore[arg-type]
    for step, rate in enumerate(rates):
        progress = max(0.0, (step - 40) / 10)
        fall = math.sqrt(progress) if shape == "sqrt" else progress
        assert rate == pytest.approx(min(1.0, (step + 1) / 5) * (1 - 0.8 * fall), abs=1e-12)


def test_wsd_without_decay_is_constant() -> None:
    assert run(WSD(warmup="2ba", decay="0ba"), budget(9)) == run(Constant(warmup="2ba"), budget(9))


@given(SCHEDULES, st.floats(0, 1), st.floats(0, 1e-3))
def test_continuous(schedule: Schedule, start: float, gap: float) -> None:
    """The steepest of all falls is the whole height over the shortest span, 1 / 200 of the run."""
    length = budget(200)
    here, there = (schedule.multiplier(min(1.0, e), length) for e in (start, start + gap))
    assert abs(here - there) <= 400 * gap + 1e-9


@pytest.mark.long
@given(SCHEDULES, st.floats(0, 1), st.sampled_from([0.5, 2.0, 3.7]))
def test_dilates_with_the_budget(schedule: Schedule, elapsed: float, ratio: float) -> None:
    """A longer run is the same curve; the length of one step is all that may differ."""
    plain, dilated = budget(2000), budget(2000, ratio)
    shift = abs(1 / 2000 - 1 / round(2000 * ratio))
    # The steepest ramp is one of 1 step in 2000.
    shortest = 1 / 2000 if getattr(schedule, "warmup", "") == "1ba" else 7 / 2000
    distance = abs(schedule.multiplier(elapsed, plain) - schedule.multiplier(elapsed, dilated))
    assert distance <= 2 * shift / shortest + 1e-9


@given(SCHEDULES, st.integers(30, 80))
def test_stays_between_its_ends(schedule: Schedule, steps: int) -> None:
    rates = run(schedule, budget(steps))
    assert min(rates) > 0
    assert max(rates) <= max(1.0, getattr(schedule, "final", 1.0)) + 1e-12


def test_dilated_warm_up_counts_dilated_steps() -> None:
    assert run(Constant(warmup="4ba"), budget(8, 2.0))[:9] == pytest.approx([(s + 1) / 8 for s in range(8)] + [1])


def test_epochs_are_steps_where_their_length_is_known() -> None:
    in_epochs = Budget(Time.parse("4ep"), steps_per_epoch=5)
    assert run(Cosine(warmup="1ep"), in_epochs) == pytest.approx(run(Cosine(warmup="5ba"), budget(20)))


def test_seconds_have_no_step_length() -> None:
    seconds = Budget(Time.parse("90sec"))
    schedule = Linear(warmup="9sec")
    assert [schedule.multiplier(e, seconds) for e in (0.0, 0.05, 0.1, 0.55, 1.0)] == pytest.approx([0, 0.5, 1, 0.5, 0])


@pytest.mark.parametrize(
    ("make", "mend"),
    [
        (lambda: Constant(warmup="soon"), "not a time"),
        (lambda: Linear(final=-1.0), "final=-1"),
        (lambda: Cosine(final=math.nan), "final=nan"),
        (lambda: WSD(shape="cubic"), "'linear' or 'sqrt'"),
        (lambda: WSD(decay="late"), "not a time"),
    ],
)
def test_refuses_options(make: object, mend: str) -> None:
    with pytest.raises(PlanError, match=mend):
        make()  # type: ignore[operator]


def test_refuses_what_does_not_fit_the_run() -> None:
    with pytest.raises(PlanError, match="whole run"):
        run(Constant(warmup="10ba"), budget(10))
    with pytest.raises(PlanError, match="longer than the run"):
        run(WSD(warmup="5ba", decay="6ba"), budget(10))
    with pytest.raises(PlanError, match="can't be placed"):
        run(Linear(warmup="1ep"), budget(10))


def test_all_are_schedules() -> None:
    assert all(isinstance(schedule, Schedule) for schedule in (Constant(), Linear(), Cosine(), WSD()))
