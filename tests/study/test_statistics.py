"""Intervals against scipy, closed forms and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from cosmati.study.statistics import (
    estimate,
    mean_estimate,
    resample_counts,
    resampled_means,
    student_p_value,
    student_quantile,
)


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 7, 10, 31])
def test_student_equals_scipy(dof: int) -> None:
    for probability in (0.5, 0.9, 0.95, 0.99):
        assert student_quantile(probability, dof) == pytest.approx(stats.t.ppf((1 + probability) / 2, dof), rel=1e-9)
    for t in (0.0, 0.3, -1.7, 4.0):
        assert student_p_value(t, dof) == pytest.approx(2 * stats.t.sf(abs(t), dof), abs=1e-12)


def test_mean_has_students_interval() -> None:
    values = [0.91, 0.93, 0.90, 0.97]
    found = mean_estimate(values)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.p_value == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert found.n == 4


def test_one_value_has_no_interval() -> None:
    found = mean_estimate([0.5])
    assert (found.value, found.low, found.high, found.p_value, found.n) == (0.5, None, None, None, 1)


def test_many_seeds_are_drawn_the_same_each_time() -> None:
    first, second = resample_counts(8), resample_counts(8)
    assert (first == second).all()
    assert (first.sum(axis=1) == 8).all()
    assert (first[0] == 1).all()
    assert not (resample_counts(8, stream=1) == first).all()


def test_absent_runs_are_left_out_of_means() -> None:
    table = np.array([[1.0, np.nan], [3.0, 5.0]])
    means = resampled_means(np.array([[1.0, 1.0], [2.0, 0.0], [1.0, 2.0]]), table)
    np.testing.assert_allclose(means, [[2.0, 5.0], [1.0, np.nan], [7 / 3, 5.0]])


def test_ratio_is_symmetric() -> None:
    values = np.array([2.0, 1.8, 2.2, 2.1])
    there, back = estimate(values, 4, is_ratio=True), estimate(1 / values, 4, is_ratio=True)
    assert there.low is not None
    assert there.low == pytest.approx(1 / back.high)
    assert there.p_value == pytest.approx(back.p_value)


def test_unreached_resamples_open_the_interval() -> None:
    values = np.array([2.0, 2.0, 1.9, 0.0])
    found = estimate(values, 3, is_ratio=True)
    assert found.low == 0.0
    assert found.high is not None
    assert math.isfinite(found.high)
    assert found.p_value is None


@pytest.mark.parametrize("n", [3, 5, 8])
def test_coverage_is_about_95_percent(n: int) -> None:
    generator = np.random.Generator(np.random.Philox(7))
    hits = 0
    for sample in generator.normal(0.9, 0.02, size=(400, n)):
        found = mean_estimate(list(sample))
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.9 <= found.high
    assert 0.92 <= hits / 400 <= 0.98
