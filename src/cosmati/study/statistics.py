"""How means of runs might have come out, and estimates with intervals.

A statistic of the mean curves is computed on the measured means and on normal draws of their error, whose covariance is
that of whole seeds: what a seed brings to all its runs, and what each run has of its own, at every budget and in every
arm as they are. No variances are pooled, since they differ between budgets and arms. The interval is Student's t on the
spread of the draws, with n - 1 degrees of freedom; of a linear statistic it's exactly that of the seeds' own values.
`python -m benchmarks.statistics` shows what it covers.
Ratios are treated as logarithms. Where costs were profiled apart from the runs, theirs is a second error, and degrees
of freedom are Satterthwaite's (1946, doi:10.2307/3002019), rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95
NUM_DRAWS = 1000
"""Of each kind, or more where there are more seeds."""
COST_STREAM = 1 << 32


@dataclass(frozen=True)
class Estimate:
    """A value from `n` seeds, with its 95 % interval, two-sided p-value and standard error where n allows them.

    With one seed these are None: one run shows no spread. An infinite end, or a ratio's 0, means that the statistic
    isn't bounded on that side in more than 2.5 % of the draws. A ratio's errors are its logarithm's. `cost_error` is
    the part of the error that comes from profiled costs: more seeds don't make it smaller, more turns do.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    p_value: float | None = None
    error: float | None = None
    cost_error: float = 0.0


class Freedom(NamedTuple):
    """Degrees of freedom of the errors; none of seeds at one seed, none of costs without profiles."""

    seeds: int
    cost: int = 0


@dataclass(frozen=True)
class Draws:
    """Tables of means, measured and drawn.

    Attributes:
        values: shape (1 + draws, quantities, budgets): the measured means, then draws of them. The measured ones alone
            where there aren't two whole seeds.
        n: whole seeds, which are behind means and errors.
        freedom: their degrees of freedom.
    """

    values: Array
    n: int
    freedom: Freedom


@lru_cache(maxsize=512)  # a study's page asks for the same few 10,000 times
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


def whole_seeds(tables: Array) -> NDArray[np.bool_]:
    """Return which seeds have a run wherever any seed has one, of `tables` as `draw_means` takes them.

    Means of other seeds too would hold what is missing: an arm that lost its worst seed isn't better for it.
    """
    present = ~np.isnan(tables)
    return np.asarray((present | ~present.any(axis=1, keepdims=True)).all(axis=(0, 2)))


def draw_means(tables: Array, *, stream: int = 0) -> Draws:
    """Draw the means over whole seeds of several quantities.

    A quantity is what an arm has in each run: a quality, or the logarithm of a cost.

    Args:
        tables: shape (quantities, seeds, budgets); NaN is a run that isn't there.
        stream: draws of other streams are independent; those of the same one are the same each time (Philox).
    """
    kept = tables[:, whole_seeds(tables)]
    n = kept.shape[1]
    if n == 0:
        return Draws(np.full((1, len(tables), tables.shape[2]), np.nan), 0, Freedom(0))
    mean = kept.mean(axis=1)
    if n == 1:
        return Draws(mean[None], 1, Freedom(0))
    # Sums of the seeds' own errors, each times a normal number, have the covariance of the mean over seeds.
    errors = (kept - mean[:, None]) / math.sqrt(n * (n - 1))
    normal = _normal(n, 2 * math.ceil(max(NUM_DRAWS // 2, n) / 2), key=(n, stream))
    drawn = np.einsum("rs,qsb->rqb", normal, errors)
    return Draws(mean + np.concatenate([np.zeros((1, *mean.shape)), drawn]), n, Freedom(n - 1))


def draw_cost_errors(table: Array, num_draws: int) -> Array:
    """Draw errors of the means over turns of several quantities that were measured together in each turn.

    Args:
        table: shape (quantities, turns), two turns or more; nothing is absent.
        num_draws: as many as one of the kinds of `draw_means` has, whose own errors these don't correlate with.

    Returns:
        shape (draws, quantities).
    """
    num_quantities, turns = table.shape
    root = _root(table - table.mean(axis=1, keepdims=True), turns - 1) / math.sqrt(turns)
    quarter = _normal(num_quantities, num_draws // 4, key=(turns, COST_STREAM))
    # Errors of the seeds are drawn as rows and the same rows negated: each meets the same errors of costs.
    return np.asarray(np.tile(quarter @ root.T, (2, 1)), dtype=np.float64)


def _normal(size: int, half: int, *, key: tuple[int, int]) -> Array:
    """Draw 2 `half` rows of normal numbers whose mean is exactly 0 and whose covariance is exactly the unit matrix."""
    raw = np.random.Generator(np.random.Philox(key=list(key))).standard_normal((half, size))
    rows = np.linalg.qr(raw)[0] * math.sqrt(half)
    return np.concatenate([rows, -rows])


def _root(errors: Array, dof: int) -> Array:
    """Return M with M M^T = the covariance of the rows of `errors`, of any rank."""
    values, vectors = np.linalg.eigh(errors @ errors.T / max(dof, 1))
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)), dtype=np.float64)


def estimate(
    values: Array, n: int, freedom: Freedom, *, is_ratio: bool = False, cut: tuple[bool, bool] = (False, False)
) -> Estimate:
    """Make an estimate of a statistic's `values` on the rows of `Draws`.

    They're the measured value and its draws; where costs have degrees of freedom, as many of the error of seeds, of
    that of costs, and of both. Drawn values may be infinite (a quality that is never reached), or NaN (by neither arm).
    Where more than 2.5 % are, that end of the interval is open, or both: 0 or infinity for a ratio, infinity otherwise,
    and there is no p-value.

    Args:
        values: shape (1 + draws).
        n: seeds behind them.
        freedom: of their errors.
        is_ratio: whether the logarithm is what errors add up in.
        cut: whether some values are bounds in place of lower ones, and of higher ones. What is lost at one end of the
            draws, these or infinite ones, is judged by the other half of them.
    """
    measured = float(values[0])
    if n < 2 or not math.isfinite(measured):
        return Estimate(measured, None, None, n)
    with np.errstate(divide="ignore"):
        scaled = np.log(values) if is_ratio else values
    *single, together = np.split(scaled[1:], num_kinds(freedom))
    tail, is_nan = (1 - LEVEL) / 2, np.isnan(together)
    lost = [is_nan | (together == end) for end in (-np.inf, np.inf)]
    open_low, open_high = (float(one.mean()) > tail for one in lost)
    sides = [is_cut or bool(one.any()) for is_cut, one in zip(cut, lost, strict=True)]
    spread = math.sqrt(max(_variance(together), *_half_variances(together - scaled[0], sides)))
    variances = [_variance(one) for one in single]
    dof = _satterthwaite(variances, freedom)
    half = student_quantile(LEVEL, dof) * spread
    low = -math.inf if open_low else float(scaled[0]) - half
    high = math.inf if open_high else float(scaled[0]) + half
    p_value = None if open_low or open_high else _p_value(float(scaled[0]), spread, dof)
    if is_ratio:
        low, high = math.exp(low), math.exp(high)
    return Estimate(measured, low, high, n, p_value, spread, math.sqrt(variances[1]) if freedom.cost else 0.0)


def num_kinds(freedom: Freedom) -> int:
    """Return how many kinds of draws there are: of the only error, or of either and of both."""
    return 3 if freedom.cost else 1


def _variance(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.var(finite)) if len(finite) else 0.0


def _half_variances(away: Array, is_cut: Sequence[bool]) -> tuple[float, float]:
    """Return the variance by the upper half of draws, and by the lower one, if their other end is cut; otherwise 0."""
    finite = away[np.isfinite(away)]
    halves = finite[finite > 0], finite[finite < 0]
    above, below = (
        float(np.mean(half**2)) if other_is_cut and len(half) else 0.0
        for half, other_is_cut in zip(halves, is_cut, strict=True)
    )
    return above, below


def _satterthwaite(variances: Sequence[float], freedom: Sequence[int]) -> int:
    """Return the degrees of freedom of the sum of independent variances."""
    parts = [variance**2 / dof for variance, dof in zip(variances, freedom, strict=False) if dof]
    if sum(parts) == 0.0:
        return sum(freedom)
    return max(1, math.floor(sum(variances) ** 2 / sum(parts) + 1e-9))


def _p_value(value: float, spread: float, dof: int) -> float:
    if spread <= 1e-12 * abs(value):
        return 1.0 if value == 0.0 else 0.0
    return student_p_value(value / spread, dof)


def position_estimate(positions: Sequence[float], costs: Sequence[float] = ()) -> Estimate:
    """Return the geometric mean of runs' positions, all positive, with Student's interval of its logarithm.

    Where `costs` were profiled, two or more, it's the positions' geometric mean times theirs, and has the error of both
    (Satterthwaite).
    """
    samples = [values for values in (positions, costs) if values]
    found = [mean_estimate([math.log(value / values[0]) for value in values]) for values in samples]
    value = math.prod(values[0] * math.exp(one.value) for values, one in zip(samples, found, strict=True))
    n = found[0].n
    variances = [one.error**2 for one in found if one.error is not None]
    if len(variances) < len(found):
        return Estimate(value, None, None, n)
    dof = _satterthwaite(variances, [one.n - 1 for one in found])
    error = math.sqrt(sum(variances))
    factor = math.exp(student_quantile(LEVEL, dof) * error)
    return Estimate(value, value / factor, value * factor, n, None, error)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of `values` with Student's interval."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Estimate(mean, None, None, n)
    spread = float(np.std(values, ddof=1)) / math.sqrt(n)
    half = student_quantile(LEVEL, n - 1) * spread
    return Estimate(mean, mean - half, mean + half, n, _p_value(mean, spread, n - 1), spread)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Adjust the p-values of a family of tests, each at most its own level (Holm 1979, jstor.org/stable/4615733)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * p_values[index]))
        adjusted[index] = highest
    return tuple(adjusted)


def seeds_needed(
    gain: float, seed_error: float, cost_error: float, num_tests: int, level: float, power: float
) -> int | None:
    """Return how many seeds show a gain in a share `power` of studies; None where no number does, for lack of turns.

    By the normal distribution, with what Student's takes more (Guenther 1981, doi:10.2307/2683244), as if one budget
    alone told the spread: where several do, a seed or two fewer may be enough.

    Args:
        gain: the true ratio, not 1.
        seed_error: standard error of its logarithm by one seed: that of n seeds times the root of n.
        cost_error: what profiled costs add to it however many seeds there are; 0 where the runs' own times count.
        num_tests: of the family. The gain has to be shown at the strictest of Holm's levels.
        level: of the family.
        power: share of studies, above a half.
    """
    normal = NormalDist()
    critical = normal.inv_cdf(1 - level / (2 * num_tests))
    room = (math.log(gain) / (critical + normal.inv_cdf(power))) ** 2 - cost_error**2
    return max(2, math.ceil(seed_error**2 / room + critical**2 / 2)) if room > 0 else None


def best_of(num_arms: int, error: float) -> float:
    """Return the largest ratio that so many arms which do nothing show in the middle of cases."""
    return math.exp(error * NormalDist().inv_cdf(0.5 ** (1 / num_arms)))
