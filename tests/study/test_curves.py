"""Curves and comparisons on synthetic studies with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq

from cosmati.errors import RunError
from cosmati.explorer.figures import axis_scale
from cosmati.study.comparison import (
    NotReached,
    SpeedUp,
    area_between,
    comparisons,
    crossings,
    difference_at_equal,
    interaction,
    noise_floor,
    speed_up_at_equal_quality,
)
from cosmati.study.curves import (
    Means,
    available_axes,
    best_within,
    pareto_frontier,
    reach,
    tradeoff_curve,
)
from cosmati.study.statistics import Estimate, Freedom
from tests.study.oracles import SECONDS, log_quality, study

GAIN = 0.1 * math.log(1.5)


def speed_up(*args: object, **kwargs: object) -> SpeedUp:
    found = speed_up_at_equal_quality(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(found, SpeedUp), found
    return found


def test_known_speed_up_is_found() -> None:
    found = speed_up(study({"baseline": log_quality(), "fast": log_quality(GAIN)}), "fast")
    assert found.ratio == pytest.approx(1.5, rel=1e-9)
    assert found.low == pytest.approx(1.5, rel=1e-6)
    assert (found.n, found.quality) == (5, pytest.approx(0.9))
    assert not found.is_at_least


def test_pace_is_speed_up_in_seconds_and_not_in_steps() -> None:
    record = study({"baseline": log_quality(), "cheap": log_quality()}, pace={"cheap": 0.5})
    assert speed_up(record, "cheap").ratio == pytest.approx(2.0)
    assert speed_up(record, "cheap", axis="step").ratio == pytest.approx(1.0)


def test_losses_mirror_accuracies() -> None:
    up = study({"baseline": log_quality(), "fast": log_quality(GAIN)})
    down = study(
        {"baseline": lambda b, s: -log_quality()(b, s), "fast": lambda b, s: -log_quality(GAIN)(b, s)},
        higher_is_better=False,
    )
    assert speed_up(down, "fast").ratio == pytest.approx(speed_up(up, "fast").ratio)
    assert speed_up(down, "fast").quality == pytest.approx(-0.9)
    assert area_between(down, "fast") == area_between(up, "fast")
    assert [arm for arm, _ in pareto_frontier(down)] == [arm for arm, _ in pareto_frontier(up)]


def test_no_speed_up_is_quoted_where_it_is_not_reached() -> None:
    found = speed_up_at_equal_quality(study({"baseline": log_quality(), "worse": log_quality(-0.05)}), "worse")
    assert isinstance(found, NotReached)
    assert "worse never reaches accuracy 0.9; its best is 0.85" in found.reason


def test_better_at_the_smallest_budget_is_a_bound() -> None:
    record = study({"baseline": log_quality(), "great": log_quality(0.5)})
    found = speed_up(record, "great")
    assert found.is_at_least
    assert found.ratio == pytest.approx(4.0)
    assert (found.low, found.high) == (pytest.approx(4.0), math.inf)
    assert found.p_value is not None
    assert found.p_value < 0.01
    dear = speed_up(study({"baseline": log_quality(), "great": log_quality(0.5)}, pace={"great": 8.0}), "great")
    assert (dear.ratio, dear.high, dear.p_value) == (pytest.approx(0.5), math.inf, None), "it may be faster, or slower"
    (far,) = comparisons(study({"baseline": log_quality(), "far": log_quality(-0.5)}, pace={"baseline": 8.0}))
    assert isinstance(far.found, SpeedUp)
    assert (far.found.ratio, far.found.low, far.found.p_value) == (pytest.approx(2.0), 0.0, None)
    both = speed_up_at_equal_quality(record, "great", quality=0.1)
    assert isinstance(both, NotReached)


def test_a_wobbling_reach_opens_the_interval() -> None:
    edge = study({"baseline": log_quality(), "edge": lambda b, s: log_quality(0.002 * (s - 1.9))(b, s)})
    found = speed_up(edge, "edge")
    assert found.low == 0.0
    assert found.p_value is None


def test_one_seed_and_one_budget() -> None:
    lone = study({"baseline": log_quality(), "fast": log_quality(GAIN)}, seeds=[0])
    found = speed_up(lone, "fast")
    assert (found.n, found.low, found.high, found.p_value) == (1, None, None, None)
    single = study({"baseline": log_quality(), "fast": log_quality(GAIN)}, budgets=[1.0], seeds=[0])
    assert speed_up(single, "fast").is_at_least
    assert isinstance(area_between(single, "fast"), NotReached)
    assert crossings(single, "fast") == ()
    assert len(tradeoff_curve(single, "fast").points) == 1


@pytest.mark.long
@given(
    st.lists(st.floats(0.1, 0.9), min_size=2, max_size=6),
    st.lists(st.floats(1.0, 3.0), min_size=6, max_size=6),
    st.floats(0.05, 0.95),
)
@settings(max_examples=80, deadline=None)
def test_reach_equals_a_fine_scan(quality: list[float], factors: list[float], target: float) -> None:
    position = np.cumprod([1.1 * factor for factor in factors[: len(quality)]])
    means = Means(position[None], np.array(quality)[None], 1, Freedom(0, 0))
    found, is_bound = reach(means, np.array([target]))
    # The points themselves too: a peak lies between the steps of any scan.
    scan = np.union1d(np.geomspace(position[0], position[-1], 20001), position)
    reached = [
        at
        for at, q in zip(scan, PchipInterpolator(np.log(position), quality)(np.log(scan)), strict=True)
        if q >= target - 1e-12
    ]
    if not reached:
        assert found[0] == math.inf or found[0] == pytest.approx(position[int(np.argmax(quality))], rel=1e-3)
        return
    assert found[0] == pytest.approx(reached[0], rel=1e-3)
    assert is_bound[0] == (quality[0] > target or (quality[0] == target and quality[1] <= target))


def test_best_within_is_flat_after_the_last_budget() -> None:
    means = Means(np.array([[1.0, 100.0, 1000.0]] * 4), np.array([[0.1, 0.5, 0.3]] * 4), 1, Freedom(0, 0))
    at_10 = PchipInterpolator(np.log([1.0, 100.0, 1000.0]), [0.1, 0.5, 0.3])(math.log(10.0))
    np.testing.assert_allclose(best_within(means, np.array([0.5, 10.0, 500.0, 1e6])), [-np.inf, at_10, 0.5, 0.5])


def test_difference_at_equal_cost() -> None:
    record = study({"baseline": log_quality(), "fast": log_quality(0.02)}, pace={"fast": 0.5})
    found = difference_at_equal(record, "fast")
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(0.02)
    at = difference_at_equal(record, "fast", position=SECONDS / 2)
    assert isinstance(at, Estimate)
    assert at.value == pytest.approx(0.02 + 0.1 * math.log(2))
    none = difference_at_equal(record, "fast", position=1.0)
    assert isinstance(none, NotReached)


def test_pairing_removes_what_the_seeds_share() -> None:
    def noisy(gain: float) -> object:
        return lambda b, s: log_quality(gain)(b, s) + 0.05 * math.sin(13 * s)

    record = study({"baseline": noisy(0.0), "fast": noisy(0.01)}, seeds=range(8))  # type: ignore[dict-item]
    paired = difference_at_equal(record, "fast")
    assert isinstance(paired, Estimate)
    assert paired.low == pytest.approx(0.01)
    spread = tradeoff_curve(record, "fast").points[-1].quality
    assert spread.high is not None
    assert spread.high - spread.value > 0.01


def test_area_is_the_mean_gap() -> None:
    found = area_between(study({"baseline": log_quality(), "up": log_quality(0.03)}), "up")
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(0.03)
    tilted = study({"baseline": log_quality(), "tilt": log_quality(0.07, slope=0.15)})
    area = area_between(tilted, "tilt")
    assert isinstance(area, Estimate)
    assert area.value == pytest.approx(0.07 + 0.05 * math.log(0.25) / 2)


def test_crossing_is_where_the_lines_meet() -> None:
    record = study({"baseline": log_quality(), "early": log_quality(-0.03, slope=0.05)})
    assert crossings(record, "early") == (pytest.approx(SECONDS * math.exp(-0.6)),)
    assert crossings(study({"baseline": log_quality(), "up": log_quality(0.1)}), "up") == ()


def test_crossing_on_a_knot_is_counted_once() -> None:
    record = study({"baseline": lambda b, s: 0.5, "swing": lambda b, s: b}, budgets=[0.25, 0.5, 1.0])
    assert crossings(record, "swing") == (pytest.approx(0.5 * SECONDS),)


def test_pareto_equals_brute_force() -> None:
    record = study(
        {"baseline": log_quality(), "a": log_quality(0.02, slope=0.2), "b": log_quality(-0.02)},
        pace={"b": 0.7},
    )
    points = [(arm.name, point) for arm in record.arms for point in tradeoff_curve(record, arm.name).points]

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1] and one != other

    place = {key: (pair[1].position.value, pair[1].quality.value) for key, pair in enumerate(points)}
    expected = {key for key in place if not any(beats(place[other], place[key]) for other in place)}
    found = pareto_frontier(record)
    assert {(arm, p.budget) for arm, p in found} == {(points[key][0], points[key][1].budget) for key in expected}
    assert 0 < len(found) < len(points)


def test_interaction_of_parts_that_multiply_is_one() -> None:
    arms = {
        "baseline": log_quality(),
        "x": log_quality(GAIN),
        "y": log_quality(0.1 * math.log(1.2)),
        "x+y": log_quality(0.1 * math.log(1.8)),
    }
    record = study(arms, methods={"x": ("X",), "y": ("Y",), "x+y": ("X", "Y")})
    found = interaction(record, "x+y", ["x", "y"])
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(1.0)
    less = study(arms | {"x+y": log_quality(GAIN)}, methods={"x": ("X",), "y": ("Y",), "x+y": ("X", "Y")})
    antagonism = interaction(less, "x+y", ["x", "y"])
    assert isinstance(antagonism, Estimate)
    assert antagonism.value == pytest.approx(1 / 1.2)
    unreached = study(arms | {"y": log_quality(-0.1)}, methods={"x": ("X",), "y": ("Y",), "x+y": ("X", "Y")})
    assert isinstance(interaction(unreached, "x+y", ["x", "y"]), NotReached)


def test_noise_floor_of_a_double() -> None:
    assert noise_floor(study({"baseline": log_quality()})) is None
    record = study({"baseline": log_quality(), "aa": log_quality(0.001)}, seeds=range(4))
    floor = noise_floor(record)
    assert floor is not None
    assert floor.difference == pytest.approx(0.001, abs=0.001)
    assert isinstance(floor.speed_up, SpeedUp)
    assert floor.speed_up.n == 4
    assert floor.speed_up.low is not None
    assert floor.speed_up.low < 1 < (floor.speed_up.high or 0)


def test_arms_without_a_seed_in_common_have_the_smaller_number() -> None:
    record = study({"baseline": log_quality(), "aa": log_quality(0.001)}, seeds=range(4))
    fewer = replace(record, runs=tuple(run for run in record.runs if run.seed != 3))
    assert speed_up(fewer, "aa").n == 3
    other = replace(record, runs=tuple(run for run in record.runs if run.seed != 103))
    assert speed_up(other, "aa").n == 3


def test_a_diverged_run_is_counted_and_in_no_mean() -> None:
    record = study({"baseline": log_quality(), "wild": lambda b, s: math.nan if (b, s) == (1.0, 0) else 0.8})
    last = tradeoff_curve(record, "wild").points[-1]
    assert (last.n, last.num_diverged, last.quality.value) == (4, 1, pytest.approx(0.8))


def test_a_study_without_runs_or_arms_says_so() -> None:
    record = replace(study({"baseline": log_quality(), "fast": log_quality()}), runs=())
    assert isinstance(speed_up_at_equal_quality(record, "fast"), NotReached)
    assert isinstance(difference_at_equal(record, "fast"), NotReached)
    with pytest.raises(RunError, match="no arm 'slow'"):
        speed_up_at_equal_quality(record, "slow")


def test_axes_that_were_not_counted_are_refused() -> None:
    record = study({"baseline": log_quality(), "fast": log_quality()})
    assert available_axes(record) == ("seconds", "step", "rows", "flops")
    with pytest.raises(RunError, match="tokens"):
        speed_up_at_equal_quality(record, "fast", axis="tokens")


@pytest.mark.long
def test_coverage_of_the_speed_up() -> None:
    """Noise of its own in each arm: about 95 % of the intervals hold the true ratio."""
    generator = np.random.Generator(np.random.Philox(11))
    hits = 0
    for _ in range(150):
        noise = generator.normal(0.0, 0.003, size=(2, 4, 5))
        arms = {
            name: (lambda b, s, i=i, g=g, noise=noise: 0.9 + 0.1 * math.log(b) + g + noise[i, int(b * 4) - 1, s])
            for i, (name, g) in enumerate([("baseline", 0.0), ("fast", GAIN)])
        }
        found = speed_up(study(arms), "fast")
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.5 <= found.high
    assert 0.88 <= hits / 150 <= 1.0


THREE = (0.25, 0.5, 1.0)


def bent(*heights: float) -> Callable[[float, int], float]:
    """Quality by these heights at three budgets."""
    return lambda b, s: heights[THREE.index(b)]


def scipys(*heights: float) -> PchipInterpolator:
    return PchipInterpolator(np.log(np.array(THREE) * SECONDS), heights)


def test_all_readings_are_off_the_curve_that_is_drawn() -> None:
    base, own = (0.5, 0.7, 0.8), (0.5, 0.79, 0.84)
    record = study({"baseline": bent(*base), "own": bent(*own)}, budgets=THREE)
    needs = math.exp(brentq(lambda at: scipys(*own)(at) - 0.8, math.log(500.0), math.log(1000.0)))
    assert speed_up(record, "own").ratio == pytest.approx(1000.0 / needs)
    at = difference_at_equal(record, "own", position=600.0)
    assert isinstance(at, Estimate)
    assert at.value == pytest.approx(scipys(*own)(math.log(600.0)) - scipys(*base)(math.log(600.0)))
    area = area_between(record, "own")
    assert isinstance(area, Estimate)
    integral = scipys(*own).integrate(*np.log([250.0, 1000.0])) - scipys(*base).integrate(*np.log([250.0, 1000.0]))
    assert area.value == pytest.approx(integral / math.log(4))
    x, y = tradeoff_curve(record, "own").line()
    np.testing.assert_allclose(y, scipys(*own)(np.log(x)), rtol=1e-12)
    assert (x[0], x[-1], len(x)) == (pytest.approx(250.0), pytest.approx(1000.0), 27)
    assert {0.5, 0.79, 0.84} <= {round(value, 12) for value in y}, "the points are among the places"


def test_the_common_range_is_where_gaps_are_measured() -> None:
    base, own = (0.5, 0.7, 0.8), (0.55, 0.79, 0.84)
    record = study({"baseline": bent(*base), "own": bent(*own)}, budgets=THREE, pace={"own": 0.6})
    area = area_between(record, "own")
    assert isinstance(area, Estimate)
    ends = np.log([250.0, 600.0])
    shifted = scipys(*own).integrate(*(ends - math.log(0.6)))
    assert area.value == pytest.approx((shifted - scipys(*base).integrate(*ends)) / (ends[1] - ends[0]))
    apart = study({"baseline": bent(*base), "own": bent(*own)}, budgets=THREE, pace={"own": 0.2})
    assert isinstance(area_between(apart, "own"), NotReached)


def test_curves_may_cross_twice_between_two_budgets() -> None:
    """One is straight, the other sags below it: at the budgets it's the better one throughout."""
    straight, sagging = (0.0, 0.5, 1.0), (0.45, 0.501, 1.001)
    record = study({"baseline": bent(*straight), "own": bent(*sagging)}, budgets=THREE)

    def gap(at: float) -> float:
        return float(scipys(*sagging)(at) - scipys(*straight)(at))

    middle = math.log(700.0)
    assert gap(middle) < 0
    roots = brentq(gap, math.log(500.0), middle), brentq(gap, middle, math.log(1000.0))
    assert crossings(record, "own") == (pytest.approx(math.exp(roots[0])), pytest.approx(math.exp(roots[1])))


def test_a_power_law_read_off_three_budgets() -> None:
    """Straight lines read 1.37 for 1.4."""
    record = study(
        {"baseline": lambda b, s: -2 - 0.6 * b**-0.35, "own": lambda b, s: -2 - 0.6 * (1.4 * b) ** -0.35},
        budgets=THREE,
    )
    assert speed_up(record, "own").ratio == pytest.approx(1.4, rel=0.002)


def test_processor_time_is_an_axis_where_every_run_has_it() -> None:
    record = study({"baseline": log_quality(), "fast": log_quality(0.05)})
    assert "cpu_seconds" not in available_axes(record)
    # The fast arm takes twice the processor time of the seconds that it takes, as with two threads.
    factor = {"baseline": 1.0, "fast": 2.0}
    runs = tuple(
        replace(run, final=replace(run.final, cpu_seconds=factor[run.arm] * run.final.seconds)) for run in record.runs
    )
    timed = replace(record, runs=runs)
    assert available_axes(timed)[:2] == ("seconds", "cpu_seconds")
    by_time, by_cpu = speed_up(timed, "fast"), speed_up(timed, "fast", axis="cpu_seconds")
    assert by_cpu.ratio == pytest.approx(by_time.ratio / 2)
    assert "cpu_seconds" not in available_axes(replace(record, runs=(*runs[:-1], record.runs[-1])))
    title, unit = axis_scale(timed, "cpu_seconds")
    assert (title, unit) == ("CPU time (min)", 60.0)
