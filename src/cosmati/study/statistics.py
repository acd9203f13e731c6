"""Means over seeds, their resamples, and estimates with intervals.

A statistic is computed once on the measured means (row 0) and once on each bootstrap resample of the seeds
(the other rows), with the same seeds drawn for all arms. The interval is Student's t around the measured
value on the bootstrap's standard error times sqrt(n / (n - 1)). For a mean that is exactly Student's
interval, so it stays honest at three seeds, where percentiles of a bootstrap cover far too little (Hesterberg
2015, doi:10.1080/00031305.2015.1089789). Ratios are treated as logarithms.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95
NUM_RESAMPLES = 2000
MAX_ENUMERATED = 5


@dataclass(frozen=True)
class Estimate:
    """A value from `n` seeds, with its 95 % interval and two-sided p-value where n allows them.

    With one seed `low`, `high` and `p_value` are None: one run shows no spread. An infinite end means that
    the statistic isn't bounded on that side in more than 2.5 % of the resamples.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    p_value: float | None = None


def student_quantile(probability: float, dof: int) -> float:
    """Return t with P(|T| <= t) = `probability` for Student's T with `dof` degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_mass(middle, dof) < probability else (low, middle)
    return math.sqrt(dof) * math.tan(low)


def student_p_value(t: float, dof: int) -> float:
    """Return the two-sided p-value P(|T| > |t|)."""
    return max(0.0, 1.0 - _student_mass(math.atan(abs(t) / math.sqrt(dof)), dof))


def _student_mass(angle: float, dof: int) -> float:
    """P(|T| <= sqrt(dof) tan(angle)): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    cosine, total = math.cos(angle), 0.0
    term = cosine if dof % 2 else 1.0
    for k in range(1 if dof % 2 else 0, dof - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine * cosine
    if dof % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def resample_counts(num_seeds: int, *, stream: int = 0) -> Array:
    """Return how often each seed is drawn, shape (1 + resamples, num_seeds); row 0 is the sample itself.

    In stream 0 up to five seeds are enumerated, so nothing is random. All else is drawn with Philox, keyed by
    `num_seeds` and `stream`: the same arguments always give the same counts, other streams independent ones.
    """
    if stream == 0 and num_seeds <= MAX_ENUMERATED:
        draws = np.array(list(itertools.product(range(num_seeds), repeat=num_seeds)))
        counts = np.stack([(draws == seed).sum(axis=1) for seed in range(num_seeds)], axis=1)
    else:
        generator = np.random.Generator(np.random.Philox(key=[num_seeds, stream]))
        counts = generator.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=NUM_RESAMPLES)
    return np.concatenate([np.ones((1, num_seeds)), counts]).astype(np.float64)


def resampled_means(counts: Array, table: Array) -> Array:
    """Average `table` of shape (seeds, budgets) over seeds, weighted by each row of `counts`.

    NaN in the table is a run that isn't there; a mean of none is NaN. Shape (rows of counts, budgets).
    """
    present = ~np.isnan(table)
    weight = counts @ present.astype(np.float64)
    total = counts @ np.where(present, table, 0.0)
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)


def estimate(values: Array, n: int, *, is_ratio: bool = False) -> Estimate:
    """Make an estimate of `values`: the measured one first, the resampled ones after it.

    Resampled values may be infinite (a quality that is never reached). Where more than 2.5 % are, that end of
    the interval is open: 0 or infinity for a ratio, infinity otherwise, and there is no p-value.
    """
    measured = float(values[0])
    if n < 2 or not math.isfinite(measured):
        return Estimate(measured, None, None, n)
    with np.errstate(divide="ignore"):
        scaled = np.log(values) if is_ratio else values
    resampled = scaled[1:][~np.isnan(scaled[1:])]
    tail = (1 - LEVEL) / 2
    open_low, open_high = (resampled == -np.inf).mean() > tail, (resampled == np.inf).mean() > tail
    spread = float(np.std(resampled[np.isfinite(resampled)])) * math.sqrt(n / (n - 1))
    half = student_quantile(LEVEL, n - 1) * spread
    low = -math.inf if open_low else float(scaled[0]) - half
    high = math.inf if open_high else float(scaled[0]) + half
    p_value = None if open_low or open_high else _p_value(float(scaled[0]), spread, n)
    if is_ratio:
        low, high = math.exp(low), math.exp(high)
    return Estimate(measured, low, high, n, p_value)


def _p_value(value: float, spread: float, n: int) -> float:
    if spread <= 1e-12 * abs(value):
        return 1.0 if value == 0.0 else 0.0
    return student_p_value(value / spread, n - 1)


def mean_estimate(values: list[float]) -> Estimate:
    """Return the mean of `values` with Student's interval."""
    table = np.asarray(values, dtype=np.float64)[:, None]
    return estimate(resampled_means(resample_counts(len(values)), table)[:, 0], len(values))
