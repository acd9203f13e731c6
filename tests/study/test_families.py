"""Families of tests, what an A/A arm shows, and ratios near the end of what was measured: by simulated studies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cosmati.records.study import Prediction, Registration, StudyRecord
from cosmati.study import comparison
from cosmati.study.comparison import (
    Comparison,
    NotReached,
    SpeedUp,
    comparisons,
    interaction,
    noise_floor,
    num_registered,
)
from cosmati.study.noise import compared_arms, noise_arm
from cosmati.study.predictions import outcomes_of
from cosmati.study.statistics import Estimate, holm
from tests.study.oracles import log_quality, study

BUDGETS = (0.25, 0.5, 1.0)


def drawn(gain: float, noise: float, key: int) -> Callable[[float, int], float]:
    """Quality of an arm so many times as fast, each run with noise of its own."""
    generator = np.random.Generator(np.random.Philox(key=[key, 41]))
    cells = {(budget, seed): generator.normal(0.0, noise) for seed in range(200) for budget in BUDGETS}
    return lambda budget, seed: 0.9 + 0.1 * math.log(gain * budget) + cells[budget, seed]


def registered(record: StudyRecord, *tests: tuple[str, str, str]) -> StudyRecord:
    predictions = tuple(Prediction(*test, 1.1) for test in tests)
    made = Registration("headlines", predictions, "2026-11-22T10:11:12+00:00", "ab" * 32, num_tests=len(tests))
    return replace(record, registration=made)


@pytest.fixture(scope="module")
def five() -> StudyRecord:
    gains = {"baseline": 1.0, "a": 1.08, "b": 1.06, "c": 1.05, "short": 0.9}
    arms = {arm: drawn(gain, 0.003, key) for key, (arm, gain) in enumerate(gains.items())}
    return study(arms | {"aa": drawn(1.0, 0.003, 9)}, budgets=BUDGETS)


def raw(record: StudyRecord) -> dict[str, float]:
    """The p-values, as speed-ups have them."""
    found = {one.arm: one.found for one in comparisons(record)}
    return {arm: one.p_value or 1.0 if isinstance(one, SpeedUp) else 1.0 for arm, one in found.items()}


def bonferronis(p_values: Sequence[float], place: int) -> float:
    """Holm's, as the closed test: the largest of all sets of hypotheses that have this one."""
    num = len(p_values)
    sets = [[p_values[k] for k in range(num) if chosen >> k & 1] for chosen in range(1 << num) if chosen >> place & 1]
    return max(min(1.0, len(one) * min(one)) for one in sets)


@pytest.mark.parametrize("num_arms", [1, 4, 5])
def test_a_study_that_registered_nothing_is_a_screening(num_arms: int) -> None:
    arms = {f"arm {k}": log_quality(0.04) for k in range(num_arms)}
    found = comparisons(study({"baseline": log_quality(), "aa": log_quality(), **arms}))
    assert [(one.arm, one.level, one.num_tests) for one in found] == [(arm, 0.05, num_arms) for arm in arms]


def test_what_was_registered_is_a_family_and_the_rest_another(five: StudyRecord) -> None:
    record = registered(five, ("a", "baseline", "seconds"), ("b", "baseline", "seconds"), ("c", "a", "seconds"))
    found = {one.arm: one for one in comparisons(record)}
    levels = {arm: (one.level, one.num_tests) for arm, one in found.items()}
    assert levels == {"a": (0.01, 3), "b": (0.01, 3), "c": (0.05, 2), "short": (0.05, 2)}
    p_values = raw(record)
    outcomes = outcomes_of(record)
    of_c = comparison.speed_up_at_equal_quality(replace(record, baseline_arm="a"), "c")
    headlines = [p_values["a"], p_values["b"], of_c.p_value or 1.0 if isinstance(of_c, SpeedUp) else 1.0]
    for place, arm in enumerate(("a", "b")):
        assert 0 < p_values[arm] < 0.2
        assert found[arm].p_value == pytest.approx(bonferronis(headlines, place))
        assert found[arm].p_value == pytest.approx(outcomes[place].p_value), "one test has one p-value on the page"
    screened = [p_values["c"], p_values["short"]]
    for place, arm in enumerate(("c", "short")):
        assert found[arm].p_value == pytest.approx(bonferronis(screened, place))
    by_step = {one.arm: one.level for one in comparisons(record, axis="step")}
    assert set(by_step.values()) == {0.05}, "another axis wasn't registered"


def test_tests_of_other_studies_count_in_the_family(five: StudyRecord) -> None:
    record = registered(five, ("a", "baseline", "seconds"))
    (alone,) = [one for one in comparisons(record) if one.arm == "a"]
    assert (alone.level, alone.num_tests, alone.p_value) == (0.01, 1, pytest.approx(raw(record)["a"]))
    made = record.registration
    assert made is not None
    for num_tests, level in ((4, 0.01), (5, 0.05)):
        wider = replace(made, num_tests=num_tests)
        assert num_registered(wider) == num_tests
        (found,) = [one for one in comparisons(replace(record, registration=wider)) if one.arm == "a"]
        assert (found.level, found.num_tests) == (level, num_tests)
        assert found.p_value == pytest.approx(num_tests * raw(record)["a"])


def test_an_arm_that_falls_short_keeps_its_own_p_value_in_the_registered_family(five: StudyRecord) -> None:
    record = registered(five, ("short", "baseline", "seconds"), ("a", "baseline", "seconds"))
    found = {one.arm: one for one in comparisons(record)}
    assert isinstance(found["short"].best, NotReached)
    p_values = raw(record)
    assert found["short"].p_value == pytest.approx(bonferronis([p_values["short"], p_values["a"]], 0))
    assert found["a"].p_value == pytest.approx(bonferronis([1.0, p_values["a"]], 1)), "predicted and not reached"


def test_a_double_below_the_baselines_best_has_an_interval() -> None:
    """Nothing but noise: half of doubles don't get to the baseline's best, and about 95 % of intervals hold 1."""
    held = below = 0
    for key in range(24):
        record = study({"baseline": drawn(1.0, 0.003, key), "aa": drawn(1.0, 0.003, key)}, budgets=BUDGETS)
        floor = noise_floor(record)
        assert floor is not None
        found = floor.speed_up
        assert isinstance(found, SpeedUp)
        assert found.low is not None
        assert found.high is not None
        means = [
            max(
                np.mean([run.final.quality for run in record.runs if (run.arm, run.budget) == (arm, budget)])
                for budget in BUDGETS
            )
            for arm in ("baseline", "aa")
        ]
        assert found.quality == pytest.approx(min(means))
        assert (found.ratio < 1) == (means[1] < means[0])
        held += found.low <= 1.0 <= found.high
        below += found.ratio < 1
        assert 0 < found.low < found.ratio < found.high < math.inf
    assert 6 <= below <= 18
    assert held >= 21


def parts_and_both(together: float, key: int, alone: float = 1.3) -> StudyRecord:
    """Two parts 1.3 times as fast each, and both together, at two budgets over which curves are straight."""
    arms = {"baseline": 1.0, "x": alone, "y": 1.3, "both": together}
    return study(
        {arm: drawn(gain, 0.004, 50 * key + k) for k, (arm, gain) in enumerate(arms.items())}, budgets=(0.5, 1.0)
    )


def test_an_interaction_is_open_where_its_speed_up_is() -> None:
    opened = {"above": 0, "below": 0}
    for key in range(10):
        found = interaction(parts_and_both(1.96, key), "both", ["x", "y"])
        speed_up = comparison.speed_up_at_equal_quality(parts_and_both(1.96, key), "both")
        if isinstance(found, Estimate):
            assert isinstance(speed_up, SpeedUp)
            assert (found.high == math.inf) == (speed_up.high == math.inf)
            assert found.low is not None
            assert 0.0 < found.low < 1.96 / 1.69
            opened["above"] += found.high == math.inf
        back = interaction(parts_and_both(1.5, key, alone=1.96), "both", ["x", "y"])
        if isinstance(back, Estimate):
            assert back.high is not None
            assert 1.5 / 1.3 / 1.96 < back.high < math.inf
            opened["below"] += back.low == 0.0
    assert min(opened.values()) >= 4
    inside = interaction(parts_and_both(1.6, 0, alone=1.2), "both", ["x", "y"])
    assert isinstance(inside, Estimate)
    assert inside.low is not None
    assert inside.high is not None
    assert 0 < inside.low < 1.6 / 1.2 / 1.3 < inside.high < math.inf


@pytest.mark.parametrize(("gain", "is_near_the_end"), [(3.8, True), (2.0, False)])
def test_draws_beyond_the_span_do_not_narrow_a_ratio(gain: float, is_near_the_end: bool) -> None:
    """Near four times as fast, which is all that these budgets can show, many draws are cut off there."""
    record = study({"baseline": drawn(1.0, 0.004, 0), "far": drawn(gain, 0.004, 3)}, budgets=BUDGETS)
    found = comparison.speed_up_at_equal_quality(record, "far")
    exact = comparison.estimate

    def cutless(*args: Any, cut: tuple[bool, bool], **others: Any) -> Estimate:
        assert cut[1] or not is_near_the_end
        return exact(*args, **others)

    with mock.patch.object(comparison, "estimate", cutless):
        unaware = comparison.speed_up_at_equal_quality(record, "far")
    assert isinstance(found, SpeedUp)
    assert isinstance(unaware, SpeedUp)
    assert found.error is not None
    assert unaware.error is not None
    assert not found.is_at_least
    if is_near_the_end:
        assert found.error > 1.1 * unaware.error
        assert found.high == math.inf
    else:
        assert found == unaware


def test_a_verdict_goes_by_the_adjusted_p_value() -> None:
    """The test alone would be enough at 0.05, with an interval beyond 1; among four of them it isn't."""
    found = SpeedUp(1.5, 1.1, 2.0, 8, 0.9, 3.0, 2.0, 0.02, is_at_least=False, is_at_most=False)
    verdicts = [
        Comparison("fast", found, found, p_value, 0.05, 4).is_shown for p_value in (*holm([0.02, 0.5, 0.6, 0.7]), None)
    ]
    assert verdicts == [False] * 5
    assert Comparison("fast", found, found, 0.049, 0.05, 1).is_shown


def test_a_registered_family_at_the_screenings_level_is_registered() -> None:
    """Five tests were registered, so their level is 0.05: that is a screening, and registered all the same."""
    arms = {f"x{k}": drawn(1.5, 0.002, k) for k in range(5)} | {"later": drawn(1.5, 0.002, 7)}
    record = study({"baseline": drawn(1.0, 0.002, 11), **arms}, budgets=BUDGETS)
    made = Registration("f", tuple(Prediction(f"x{k}", "baseline", "seconds", 1.1) for k in range(5)), "2026", "0", 5)
    found = {one.arm: one for one in comparisons(replace(record, registration=made))}
    assert {one.level for one in found.values()} == {0.05}
    assert {arm for arm, one in found.items() if one.is_registered} == {f"x{k}" for k in range(5)}
    assert all(one.is_shown and one.is_screening for one in found.values())
    few = Registration("f", made.predictions[:4], "2026", "0", 4)
    headlines = {one.arm: one for one in comparisons(replace(record, registration=few))}
    assert {arm for arm, one in headlines.items() if not one.is_screening} == {f"x{k}" for k in range(4)}
    by_step = comparisons(replace(record, registration=made), axis="step")
    assert not any(one.is_registered for one in by_step), "registered was the comparison by seconds"


def doubled(double: str, *, methods: tuple[str, ...] = (), of_baseline: tuple[str, ...] = ()) -> StudyRecord:
    """The arm `aa` with a recipe of this text, twice as fast as its baseline."""
    record = study({"baseline": drawn(1.0, 0.002, 1), "aa": drawn(2.0, 0.002, 2)}, budgets=BUDGETS)
    base, other = record.arms
    text = '{"name": "baseline", "seed": 0, "lr": 0.1}'
    arms = replace(base, recipe_text=text, methods=of_baseline), replace(other, recipe_text=double, methods=methods)
    return replace(record, arms=arms)


@pytest.mark.parametrize(
    "record",
    [
        doubled('{"name": "aa", "seed": 1000, "lr": 0.1}'),
        doubled('{"lr": 0.1}', methods=("EMA",), of_baseline=("EMA", "Muon")),
    ],
)
def test_the_baseline_with_other_seeds_is_noise_and_compared_with_nothing(record: StudyRecord) -> None:
    assert comparisons(record) == ()
    assert noise_floor(record) is not None
    assert noise_arm(record) == "aa"


@pytest.mark.parametrize(
    "record",
    [
        doubled('{"name": "aa", "lr": 0.1}', methods=("AutoAugment",)),
        doubled('{"name": "aa", "lr": 0.2}'),
        doubled("lr: 0.1"),
        doubled("[" * 100_000),
    ],
)
def test_an_arm_aa_that_does_something_else_is_an_arm(record: StudyRecord) -> None:
    (one,) = comparisons(record)
    assert one.arm == "aa"
    assert isinstance(one.found, SpeedUp)
    assert one.found.ratio == pytest.approx(2.0, rel=0.05)
    assert one.is_shown
    assert noise_floor(record) is None
    assert [arm.name for arm in compared_arms(record)] == ["aa"]


@pytest.mark.parametrize("name", ["vision", "language"])
def test_the_committed_studies_have_their_double(name: str) -> None:
    """Their recipes have the arm's name in them."""
    text = (Path("benchmarks") / "results" / "evidence" / name / "study.json").read_text(encoding="utf-8")
    assert noise_arm(StudyRecord.from_json(text)) == "aa"
