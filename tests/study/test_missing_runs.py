"""Runs that diverged or aren't there, seeds that arms don't share, and qualities that were there from the start."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from cosmati.explorer.report import render_report
from cosmati.explorer.views import levels_of
from cosmati.explorer.wording import claims_of, prediction_rows
from cosmati.records.study import EvaluationPoint, Prediction, Registration, StudyRecord, StudyRun
from cosmati.study.comparison import (
    NotReached,
    SpeedUp,
    comparisons,
    crossings,
    difference_at_equal,
    interaction,
    noise_floor,
    speed_up_at_equal_quality,
)
from cosmati.study.composition import pairs, single_parts
from cosmati.study.curves import available_axes, seeds_of, tradeoff_curve
from cosmati.study.definition import Arm, RegistrationPlan, Study
from cosmati.study.divergence import diverges_near, left_out
from cosmati.study.headline import Contest, headline_claims
from cosmati.study.registration import register
from cosmati.study.statistics import Estimate
from tests.study.fake_runs import diverging_start
from tests.study.oracles import log_quality, study

Quality = Callable[[float, int], float]
SEEDS = range(8)
THREE = (0.25, 0.5, 1.0)
OF_SEED = (0.9, -0.3, 0.2, -1.6, 0.4, 1.1, -0.5, 0.1)


def seeded(gain: float = 0.0, lost: Callable[[float, int], bool] | None = None, own: float = 0.001) -> Quality:
    """Seeds matter 50 times as much as a run's own noise; some runs diverged."""
    phase = 7 + 1000 * gain

    def quality(budget: float, seed: int) -> float:
        if lost is not None and lost(budget, seed):
            return math.nan
        return log_quality(gain)(budget, 0) + 0.05 * OF_SEED[seed] + own * math.sin(phase * (seed + 1) + 13 * budget)

    return quality


def of(**arms: Callable[[float, int], float]) -> StudyRecord:
    return study({"baseline": seeded(), **arms}, seeds=SEEDS, budgets=THREE)


def without(record: StudyRecord, lost: Callable[[StudyRun], bool]) -> StudyRecord:
    return replace(record, runs=tuple(run for run in record.runs if not lost(run)))


def test_a_lost_run_takes_its_seed_out_of_both_arms_at_all_budgets() -> None:
    """The worst seed's largest run diverged: means over what is left would be better by a seventh of that seed."""
    record = of(same=seeded(0.001, lambda b, s: (b, s) == (1.0, 3)))
    found = difference_at_equal(record, "same")
    assert isinstance(found, Estimate)
    kept = [seed for seed in SEEDS if seed != 3]
    gaps = [seeded(0.001)(1.0, seed) - seeded()(1.0, seed) for seed in kept]
    interval = stats.ttest_1samp(gaps, 0.0).confidence_interval(0.95)
    assert found.n == 7
    assert found.value == pytest.approx(np.mean(gaps))
    assert found.low == pytest.approx(interval.low)
    assert found.high == pytest.approx(interval.high)
    (claim,) = claims_of(record)
    assert "1 of 24 runs of same diverged." in claim.sentence
    assert "1 of 8 seeds are left out, which same and baseline didn't both finish." in claim.sentence
    gone = without(of(same=seeded(0.001)), lambda run: (run.arm, run.budget, run.seed) == ("baseline", 1.0, 3))
    (claim,) = claims_of(gone)
    assert "diverged" not in claim.sentence
    assert "1 of 8 seeds are left out" in claim.sentence
    (whole,) = claims_of(of(same=seeded(0.001)))
    assert "left out" not in whole.sentence


def test_the_curve_that_is_drawn_is_the_one_that_is_compared() -> None:
    """An arm with three of the baseline's seeds, which are the better ones."""
    record = without(of(few=seeded(0.03)), lambda run: run.arm == "few" and run.seed not in (0, 4, 5))
    found = speed_up_at_equal_quality(record, "few", axis="step")
    assert isinstance(found, SpeedUp)
    assert found.quality == pytest.approx(np.mean([seeded()(1.0, seed) for seed in (0, 4, 5)]))
    assert (found.n, left_out(record, "few"), seeds_of(record, "few")) == (3, (5, 8), frozenset({0, 4, 5}))
    assert "5 of 8 seeds are left out" in claims_of(record)[0].sentence
    levels, start = levels_of(record, "step")
    assert levels[start].rows[0][3].endswith(f"n\u00a0=\u00a03, without 5 of 8 seeds, at {found.quality:.4f}")
    assert crossings(record, "few") == (), "over all of the baseline's seeds they would cross"
    lost = of(some=seeded(0.03, lambda b, s: (b, s) == (0.5, 3)))
    points = tradeoff_curve(lost, "some").points
    assert [(point.n, point.num_diverged) for point in points] == [(7, 0), (7, 1), (7, 0)]
    expected = np.mean([seeded(0.03)(1.0, seed) for seed in SEEDS if seed != 3])
    assert points[-1].quality.value == pytest.approx(expected)
    assert left_out(study({"baseline": log_quality(), "aa": log_quality()}), "aa") == (0, 5)


def test_no_seed_that_both_finished_is_no_ratio_and_is_drawn() -> None:
    record = of(torn=seeded(0.03, lambda b, s: b == THREE[s % 3]))
    assert len(tradeoff_curve(record, "torn").points) == 3
    found = speed_up_at_equal_quality(record, "torn")
    assert isinstance(found, NotReached)
    assert "no seed has a finite quality at all of their budgets" in found.reason
    assert "8 of 24 runs of torn diverged" in claims_of(record)[0].sentence


def test_arms_at_other_budgets_are_paired_by_seed() -> None:
    record = of(dear=seeded(0.05))
    base, dear = (0.5, 1.0), (0.25, 0.5)
    apart = without(record, lambda run: run.budget not in (dear if run.arm == "dear" else base))
    (claim,) = claims_of(apart)
    assert "n\u00a0=\u00a08" in claim.sentence
    assert "One seed" not in claim.sentence
    assert "left out" not in claim.sentence


def test_a_run_that_diverged_before_its_first_step_takes_no_axis_away() -> None:
    record = of(fast=seeded(0.05))
    nowhere = EvaluationPoint(0, 0.0, math.nan)
    broken = replace(
        record,
        runs=tuple(
            replace(run, final=nowhere, points=(nowhere,), seconds_by_part={}) if run.run_id == "fast-1.0-7" else run
            for run in record.runs
        ),
    )
    assert available_axes(broken) == available_axes(record) == ("seconds", "step", "rows", "flops")
    assert available_axes(replace(record, runs=())) == ()
    page = render_report(title="t", studies=[broken])
    assert "No run of this study has finished" not in page


@pytest.mark.parametrize(("num_lost", "verdict"), [(0, "faster"), (1, "faster"), (2, "diverged"), (5, "diverged")])
def test_an_arm_that_diverges_is_not_told_faster(num_lost: int, verdict: str) -> None:
    """Where it's read off: between the budgets 0.5 and 1, of which 16 runs are."""
    record = of(fast=seeded(0.05, lambda b, s: b == 1.0 and s < num_lost))
    (claim,) = claims_of(record)
    assert (claim.verdict, claim.figure == "—") == (verdict, verdict == "diverged")
    (one,) = comparisons(record)
    assert one.is_shown is (verdict == "faster")
    assert (f"{num_lost} of 24 runs of fast diverged." in claim.sentence) is (num_lost > 0)


def test_what_diverges_elsewhere_or_is_slower_counts_in_words_alone() -> None:
    (early,) = claims_of(of(fast=seeded(0.05, lambda b, s: b == 0.25 and s < 3)))
    assert early.verdict == "faster"
    (slow,) = claims_of(of(slow=seeded(-0.05, lambda b, s: b == 1.0 and s < 3)))
    assert slow.verdict == "slower"
    between = of(fast=seeded(0.05, lambda b, s: b == 0.5))
    assert diverges_near(between, "fast", 600.0, "seconds"), "no run of the budget between is left"
    assert not diverges_near(between, "fast", 1000.0, "seconds"), "at a budget by itself"
    flattering = study(
        {"baseline": seeded(0.0, lambda b, s: b == 1.0 and s < 2), "slow": seeded(-0.05)}, seeds=SEEDS, budgets=THREE
    )
    (claim,) = claims_of(flattering)
    assert (claim.verdict, "2 of 24 runs of baseline diverged" in claim.sentence) == ("diverged", True)


def at(*heights: float) -> Callable[[float, int], float]:
    return lambda b, s: heights[THREE.index(b)] + 0.0002 * math.sin(31 * b * (s + 1) + heights[0])


def test_what_the_baseline_had_from_the_start_is_a_bound() -> None:
    """It overfits, and was as good at a budget that wasn't run: no figure tells the arm faster."""
    record = study({"baseline": at(0.5, 0.45, 0.4), "arm": at(0.48, 0.51, 0.515)}, budgets=THREE, pace={"arm": 0.25})
    found = speed_up_at_equal_quality(record, "arm")
    assert isinstance(found, SpeedUp)
    assert (found.is_at_most, found.low, found.p_value) == (True, 0.0, None)
    assert found.ratio > 1
    (claim,) = claims_of(record)
    assert (claim.verdict, claim.figure) == ("no difference shown", "—")
    swapped = speed_up_at_equal_quality(replace(record, baseline_arm="arm"), "baseline", quality=0.5)
    assert isinstance(swapped, SpeedUp)
    rising = study({"baseline": at(0.5, 0.6, 0.7), "arm": at(0.55, 0.65, 0.75)}, budgets=THREE)
    exact = speed_up_at_equal_quality(rising, "arm", quality=tradeoff_curve(rising, "baseline").points[0].quality.value)
    assert isinstance(exact, SpeedUp)
    assert (exact.is_at_least, exact.is_at_most) == (True, False), "the next budget is better, so it rose to there"


def test_saturated_ties_have_no_figure() -> None:
    record = study({"baseline": lambda b, s: 1.0, "arm": lambda b, s: 1.0}, budgets=THREE, pace={"arm": 0.8})
    (claim,) = claims_of(record)
    assert (claim.verdict, claim.figure) == ("not reached", "—")
    assert "Both arms have accuracy 1, or better, at their smallest budget already." in claim.sentence
    single = speed_up_at_equal_quality(replace(record, runs=tuple(r for r in record.runs if r.budget == 1.0)), "arm")
    assert isinstance(single, SpeedUp), "one budget shows times at an equal quality"
    assert single.ratio == pytest.approx(1.25)
    assert not single.is_at_least
    assert not single.is_at_most


@pytest.mark.parametrize("gain", [-0.0004, 0.0, 0.0004])
def test_a_dear_arm_is_told_slower_wherever_its_best_falls(gain: float) -> None:
    arms = {"baseline": seeded(own=0.01), "dear": seeded(gain, own=0.01)}
    record = study(arms, seeds=SEEDS, budgets=THREE, pace={"dear": 3.0})
    (one,) = comparisons(record)
    assert isinstance(one.found, SpeedUp)
    assert one.is_shown
    assert one.found.high is not None
    assert one.found.high < 0.6
    base, own = (np.array([[quality(b, s) for b in THREE] for s in SEEDS]).mean(axis=0) for quality in arms.values())
    assert one.found.quality == pytest.approx(min(base.max(), own.max()))


def test_what_was_not_counted_is_not_measured() -> None:
    axes = ("tokens", "step", "joules")
    predictions = tuple(Prediction("fast", "baseline", axis, 1.1) for axis in axes)
    record = of(fast=seeded(0.05))
    record = replace(record, registration=Registration("f", predictions, "2026-01-01T00:00:00+00:00", "0" * 64))
    rows = prediction_rows(record)
    assert [row[3] for row in rows] == ["not measured", "met", "not measured"]
    assert "no count of tokens" in rows[0][2]
    assert "no count of tokens" in render_report(title="t", studies=[record])


def test_a_prediction_along_what_no_run_counts_is_refused_before_the_runs(tmp_path: Path) -> None:
    plan = RegistrationPlan(family="f", predictions=(Prediction("fast", "baseline", "flops", 1.1),))
    arms = {name: Arm(start=diverging_start) for name in ("baseline", "fast")}
    made = Study(
        name="s",
        task="t",
        arms=arms,
        budgets=(1.0,),
        seeds=(0,),
        quality="loss",
        higher_is_better=False,
        registration=plan,
    )
    with pytest.raises(ValueError, match="count no flops"):
        register(made, tmp_path, has_runs=False)


def test_the_noise_floor_is_the_largest_gap() -> None:
    record = study({"baseline": at(0.5, 0.6, 0.7), "aa": at(0.5, 0.63, 0.71)}, budgets=THREE)
    floor = noise_floor(record)
    assert floor is not None
    assert floor.budget == 0.5
    assert floor.difference == pytest.approx(0.03, abs=0.001)


def test_an_interaction_beyond_the_smallest_budget_is_not_measured() -> None:
    ratios = {"a": 1.3, "b": 1.3, "ab": 8.0}
    record = study({"baseline": log_quality()} | {arm: log_quality(0.1 * math.log(r)) for arm, r in ratios.items()})
    assert isinstance(interaction(record, "ab", ["a", "b"]), NotReached)
    assert isinstance(interaction(record, "a", ["ab", "b"]), NotReached)


def test_two_arms_of_one_part_both_stand_and_no_pair_has_an_unknown_one() -> None:
    methods = {"first": ("A(1)",), "second": ("A(2)",), "pair": ("A(1)", "B"), "three": ("A(1)", "B", "C"), "c": ("C",)}
    arms = {"baseline": log_quality()} | {arm: log_quality(0.01 * k) for k, arm in enumerate(methods, 1)}
    record = study(arms, methods=methods)
    assert {name: one.arm for name, one in single_parts(record).items()} == {
        "A(1)": "first",
        "A(2)": "second",
        "C": "c",
    }
    assert pairs(record) == (), "nothing is known of B alone"


def test_a_headline_with_an_open_end_has_none() -> None:
    record = study({"baseline": log_quality(), "edge": lambda b, s: log_quality(0.002 * (s - 1.9))(b, s)})
    record = replace(record, arms=tuple(replace(arm, opponent="plain", source="s") for arm in record.arms))
    contest = Contest(task="text", study=record, arm="edge", opponent="baseline", date="2026-01-01", commit="0")
    (claim,) = headline_claims([contest], axes=("seconds",))
    assert (claim.low, claim.p) == (None, None)
    assert claim.high is not None
