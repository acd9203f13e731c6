"""Compare arms on their tradeoff curves: speed-up at equal quality, difference at equal cost, interaction."""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cosmati.records.study import NUM_HEADLINES, Registration, StudyRecord
from cosmati.study.curves import Axis, Means, best_within, is_counted, paired_means, reach, tradeoff_curve
from cosmati.study.divergence import diverges_near, no_whole_seed
from cosmati.study.interpolation import MonotoneCubic
from cosmati.study.kept import kept
from cosmati.study.noise import compared_arms, noise_arm
from cosmati.study.statistics import LEVEL, Array, Estimate, Freedom, estimate, holm, num_kinds

HEADLINE_LEVEL, SCREENING_LEVEL = 0.01, 0.05
NUM_PARTS, NUM_HALVINGS = 32, 50
"""Of an interval between two knots, and of a part of it, to find where curves cross."""


@dataclass(frozen=True)
class SpeedUp:
    """How many times less of the axis an arm needs than the baseline to reach `quality`.

    Attributes:
        ratio: Baseline's need over the arm's need; above 1 is faster.
        low: Lower end of the 95 % interval, None at n = 1, 0 where it's open.
        high: Upper end, None at n = 1, infinity where it's open.
        n: Seeds behind it.
        quality: The quality at which it was read off.
        baseline_needs: Where the baseline's mean curve reaches it, in the axis' unit.
        arm_needs: Where the arm's does.
        p_value: Two-sided, against a ratio of 1; None where there is none. Of a bound it's the bound's own, and there
            only where the bound speaks against 1.
        is_at_least: Whether the arm's smallest budget was already better, so that the ratio is a lower bound.
        is_at_most: The same of the baseline's smallest budget, so that the ratio is an upper bound.
        error: Standard error of the ratio's logarithm, None at n = 1.
        cost_error: The part of it that comes from profiled costs, which doesn't fall with seeds.
        is_unstable: Whether more than a tenth of the runs of the faster one diverged at the budgets that this rests on.
            Then it's of the seeds that went well, and has no p-value.
    """

    ratio: float
    low: float | None
    high: float | None
    n: int
    quality: float
    baseline_needs: float
    arm_needs: float
    p_value: float | None
    is_at_least: bool
    is_at_most: bool
    error: float | None = None
    cost_error: float = 0.0
    is_unstable: bool = False

    @property
    def seed_error(self) -> float:
        """Standard error of the ratio's logarithm by one seed, without that of costs; 0 where n = 1 shows none."""
        return math.sqrt(self.n * max(0.0, (self.error or 0.0) ** 2 - self.cost_error**2))


@dataclass(frozen=True)
class NotReached:
    """No figure can be quoted, and why."""

    reason: str


@dataclass(frozen=True)
class Comparison:
    """What a study says of one arm, among all that it compares.

    Attributes:
        arm: its name.
        best: its speed-up at the baseline's best quality, or why there is none.
        found: the speed-up that is judged: `best`, or where the arm doesn't surely get there, that at the best quality
            that both reach.
        p_value: of `found`, adjusted for all tests of its family; None where there is none.
        level: below which it's a claim.
        num_tests: of its family.
        is_registered: whether that is the registered one.
    """

    arm: str
    best: SpeedUp | NotReached
    found: SpeedUp | NotReached
    p_value: float | None
    level: float
    num_tests: int
    is_registered: bool = False

    @property
    def is_screening(self) -> bool:
        """Whether what is shown is worth a study of its own and no headline: of many tests, registered or not."""
        return self.level > HEADLINE_LEVEL

    @property
    def is_shown(self) -> bool:
        """Whether the arm is shown to be faster or slower."""
        found = self.found
        if isinstance(found, NotReached) or found.low is None or found.high is None or self.p_value is None:
            return False
        return self.p_value < self.level and not found.low <= 1.0 <= found.high


@dataclass(frozen=True)
class NoiseFloor:
    """What two sets of seeds of the same arm show: differences below these mean nothing.

    `speed_up` should be 1, read at the best quality that both reach; `difference` is the largest mean one at a budget.
    """

    speed_up: SpeedUp | NotReached
    difference: float
    budget: float


@kept(4)
def _pair(study: StudyRecord, arm: str, axis: Axis) -> tuple[Means, ...]:
    return paired_means(study, [study.baseline_arm, arm], axis=axis)


def _sign(study: StudyRecord) -> float:
    return 1.0 if study.higher_is_better else -1.0


@kept(8)
def comparisons(study: StudyRecord, *, axis: Axis = "seconds") -> tuple[Comparison, ...]:
    """Compare every arm but the baseline and its double.

    Comparisons that were registered before the runs, along this axis and over this baseline, are one family (Holm) with
    whatever else was registered: headlines at 0.01 where it has four tests at most. All others are another family, a
    screening at 0.05.
    """
    arms = [arm.name for arm in compared_arms(study)]
    best = {arm: speed_up_at_equal_quality(study, arm, axis=axis) for arm in arms}
    found = {arm: _at_its_own_best(study, arm, axis) if _is_unsure(one) else one for arm, one in best.items()}
    registered = _registered(study, axis, p_values := {arm: _p_value(one) for arm, one in found.items()})
    rest = [arm for arm in arms if arm not in registered]
    adjusted = registered | dict(zip(rest, holm([p_values[arm] for arm in rest]), strict=True))
    headlines = num_registered(study.registration)
    made = []
    for arm, one in found.items():
        p_value = None if isinstance(one, NotReached) or one.p_value is None else adjusted[arm]
        own = (level_of(headlines), headlines, True) if arm in registered else (SCREENING_LEVEL, len(rest), False)
        made.append(Comparison(arm, best[arm], one, p_value, *own))
    return tuple(made)


def _p_value(found: SpeedUp | NotReached) -> float:
    """Return what counts in a family: where there is none 1, so that no family is smaller for it."""
    return 1.0 if isinstance(found, NotReached) or found.p_value is None else found.p_value


def num_registered(registration: Registration | None) -> int:
    """Return the number of tests of a registered family, those of other studies among them where it tells them."""
    if registration is None:
        return 0
    return registration.family_size


def level_of(num_tests: int) -> float:
    """Return the level of a registered family."""
    return HEADLINE_LEVEL if num_tests <= NUM_HEADLINES else SCREENING_LEVEL


def _registered(study: StudyRecord, axis: Axis, p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjust the p-values of arms whose comparison was registered. Its family's other tests count as registered."""
    predictions = study.registration.predictions if study.registration else ()
    tests = []
    for one in predictions:
        against, along = replace(study, baseline_arm=one.opponent), typing.cast("Axis", one.axis)
        is_told = is_counted(study, (one.arm, one.opponent), along)
        tests.append(_p_value(speed_up_at_equal_quality(against, one.arm, axis=along)) if is_told else 1.0)
    tests += [1.0] * (num_registered(study.registration) - len(tests))
    return {
        one.arm: holm([*tests[:place], p_values[one.arm], *tests[place + 1 :]])[place]
        for place, one in enumerate(predictions)
        if (one.opponent, one.axis) == (study.baseline_arm, axis) and one.arm in p_values
    }


def _is_unsure(found: SpeedUp | NotReached) -> bool:
    """Whether the arm doesn't reach the baseline's best, or not in many draws."""
    return isinstance(found, NotReached) or (found.low == 0.0 and not found.is_at_most)


def _at_its_own_best(study: StudyRecord, arm: str, axis: Axis) -> SpeedUp | NotReached:
    """Read at the lesser of both bests, anew in each draw: where they're close, either may be."""
    base, own = _pair(study, arm, axis)
    return _read_off(study, arm, (base, own), np.minimum(base.quality.max(axis=1), own.quality.max(axis=1)), axis)


def _targets(study: StudyRecord, base: Means, quality: float | None) -> Array:
    """Give the baseline's best in each draw, or a fixed quality, signed so that higher is better."""
    if quality is None:
        return np.asarray(base.quality.max(axis=1), dtype=np.float64)
    return np.full(len(base.position), _sign(study) * quality)


def speed_up_at_equal_quality(
    study: StudyRecord, arm: str, *, quality: float | None = None, axis: Axis = "seconds"
) -> SpeedUp | NotReached:
    """Return the speed-up of `arm` over the baseline at `quality`, by default the baseline's best.

    The baseline's best is found anew in each draw, so the interval has its uncertainty too. Where the
    arm's mean curve never reaches the quality there is no speed-up.
    """
    return speed_ups_at_equal_quality(study, arm, [quality], axis=axis)[0]


def speed_ups_at_equal_quality(
    study: StudyRecord, arm: str, qualities: Sequence[float | None], *, axis: Axis = "seconds"
) -> tuple[SpeedUp | NotReached, ...]:
    """Return `speed_up_at_equal_quality` at each of `qualities`, from the same draws."""
    base, own = _pair(study, arm, axis)
    return tuple(_read_off(study, arm, (base, own), _targets(study, base, quality), axis) for quality in qualities)


def _read_off(
    study: StudyRecord, arm: str, curves: tuple[Means, Means], targets: Array, axis: Axis
) -> SpeedUp | NotReached:
    base, own = curves
    if not (np.isfinite(base.quality[0]).any() and np.isfinite(own.quality[0]).any()):
        return NotReached(
            f"{study.baseline_arm} and {arm} have no finished runs to compare{no_whole_seed(study, arm)}."
        )
    base_needs, base_bound = reach(base, targets)
    own_needs, own_bound = reach(own, targets)
    target = _sign(study) * float(targets[0])
    for name, needs, means in ((study.baseline_arm, base_needs, base), (arm, own_needs, own)):
        if not math.isfinite(needs[0]):
            best = _sign(study) * float(means.quality[0].max())
            return NotReached(f"{name} never reaches {study.quality_name} {target:.4g}; its best is {best:.4g}.")
    if base_bound[0] and own_bound[0]:
        reason = f"Both arms have {study.quality_name} {target:.4g}, or better, at their smallest budget already."
        return NotReached(reason)
    cut = bool(base_bound.any()), bool(own_bound.any())
    with np.errstate(invalid="ignore", divide="ignore"):
        found = estimate(base_needs / own_needs, base.n, base.freedom, is_ratio=True, cut=cut)
    found = _opened(found, *(_in_many(bound, base.freedom) for bound in (own_bound, base_bound)))
    faster, needs = (arm, own_needs[0]) if found.value > 1 else (study.baseline_arm, base_needs[0])
    is_unstable = diverges_near(study, faster, float(needs), axis)
    return SpeedUp(
        ratio=found.value,
        low=found.low,
        high=found.high,
        n=found.n,
        quality=target,
        baseline_needs=float(base_needs[0]),
        arm_needs=float(own_needs[0]),
        p_value=None if is_unstable else found.p_value,
        is_at_least=bool(own_bound[0]),
        is_at_most=bool(base_bound[0]),
        error=found.error,
        cost_error=found.cost_error,
        is_unstable=is_unstable,
    )


def _in_many(bounds: NDArray[np.bool_], freedom: Freedom) -> bool:
    """Whether a need is a bound in so many of the draws of all errors that an interval can't go by it."""
    together = bounds[len(bounds) - (len(bounds) - 1) // num_kinds(freedom) :]
    return bool(bounds[0]) or (len(together) > 0 and float(together.mean()) > (1 - LEVEL) / 2)


def _opened(found: Estimate, is_at_least: bool, is_at_most: bool) -> Estimate:
    """Open the interval of a ratio where a curve begins beyond the quality: nothing was measured there."""
    if found.low is None or found.high is None:
        return found
    low, high = 0.0 if is_at_most else found.low, math.inf if is_at_least else found.high
    says = (not is_at_least or found.value > 1) and (not is_at_most or found.value < 1)
    return replace(found, low=low, high=high, p_value=found.p_value if says else None)


def difference_at_equal(
    study: StudyRecord, arm: str, *, position: float | None = None, axis: Axis = "seconds"
) -> Estimate | NotReached:
    """Return by how much `arm` is better than the baseline at an equal `position`, paired over seeds.

    In units of quality, positive where the arm is better whichever way the quality points. The default
    position is the baseline's largest one. Each arm stands with its best quality for at most that much.
    """
    base, own = _pair(study, arm, axis)
    known = base.position[0][np.isfinite(base.position[0])]
    at = position if position is not None else float(known.max()) if len(known) else 0.0
    where = np.full(len(base.position), at)
    base_best, own_best = best_within(base, where), best_within(own, where)
    if not (math.isfinite(base_best[0]) and math.isfinite(own_best[0])):
        name = arm if math.isfinite(base_best[0]) else study.baseline_arm
        return NotReached(f"{name} has no run with {axis} of at most {at:.4g}.")
    with np.errstate(invalid="ignore"):
        return estimate(own_best - base_best, base.n, base.freedom)


def _mean_gaps(base: Means, own: Means) -> Array:
    """Mean gap of each row's curves over the logarithm of their common range, exactly; NaN where there's none."""
    if min(np.isfinite(means.position[0]).sum() for means in (base, own)) < 2:
        return np.full(len(base.position), np.nan)
    curves = base.cubics, own.cubics
    start = np.maximum(*(curve.x[:, :1] for curve in curves))
    end = np.minimum(*(curve.x[:, -1:] for curve in curves))
    knots = np.sort(np.clip(np.concatenate([curve.x for curve in curves], axis=1), start, end), axis=1)
    middle, half = (knots[:, 1:] + knots[:, :-1]) / 2, np.diff(knots, axis=1) / 2
    # Between neighbouring knots the gap is a cubic, whose mean is that of Gauss's two places.
    means = [sum(curve.at(middle + side * half / math.sqrt(3)) for side in (-1, 1)) / 2 for curve in curves]
    with np.errstate(invalid="ignore", divide="ignore"):
        gaps = ((means[1] - means[0]) * 2 * half).sum(axis=1) / (end - start)[:, 0]
    return np.asarray(np.where(end[:, 0] > start[:, 0], gaps, np.nan), dtype=np.float64)


def area_between(study: StudyRecord, arm: str, *, axis: Axis = "seconds") -> Estimate | NotReached:
    """Return the mean by which the curve of `arm` lies better than the baseline's over their common range.

    It's the area between the curves over the logarithm of the axis, divided by the range's length, so its
    unit is the quality's.
    """
    base, own = _pair(study, arm, axis)
    gaps = _mean_gaps(base, own)
    if math.isnan(gaps[0]):
        return NotReached(f"The curves of {study.baseline_arm} and {arm} have no common range of {axis}.")
    return estimate(gaps, base.n, base.freedom)


def crossings(study: StudyRecord, arm: str, *, axis: Axis = "seconds") -> tuple[float, ...]:
    """Return where the mean curves of `arm` and the baseline, over the same seeds, cross in their common range."""
    means = _pair(study, arm, axis)
    if any(np.isfinite(one.position[0]).sum() < 2 for one in means):
        return ()
    base, own = (MonotoneCubic(one.cubics.x[:1], one.cubics.y[:1]) for one in means)
    start, end = max(base.x[0, 0], own.x[0, 0]), min(base.x[0, -1], own.x[0, -1])
    if end <= start:
        return ()
    # Between two knots cubics may cross more than once: each such interval is looked at in parts.
    knots = np.unique(np.clip(np.concatenate([base.x[0], own.x[0]]), start, end))
    places = np.unique([np.linspace(*ends, NUM_PARTS + 1) for ends in itertools.pairwise(knots)])

    def side(x: Array) -> Array:
        return np.asarray(np.sign(own.at(x[None])[0] - base.at(x[None])[0]), dtype=np.float64)

    sides = side(places)
    places, sides = places[sides != 0], sides[sides != 0]
    turns = np.flatnonzero(sides[1:] != sides[:-1])
    low, high, before = places[turns], places[turns + 1], sides[turns]
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        is_before = side(middle) == before
        low, high = np.where(is_before, middle, low), np.where(is_before, high, middle)
    return tuple(np.exp(high).tolist())


def interaction(
    study: StudyRecord, composition: str, parts: Sequence[str], *, axis: Axis = "seconds"
) -> Estimate | NotReached:
    """Return the composition's speed-up over the product of its parts', at the baseline's best quality.

    Above 1 the methods help each other, below 1 they get in each other's way. All arms are drawn
    together. Where the composition's curve begins beyond that quality in many draws the interval is open above, where a
    part's does, below.
    """
    base, *others = paired_means(study, [study.baseline_arm, composition, *parts], axis=axis)
    targets = _targets(study, base, None)
    if not np.isfinite(base.quality[0]).any():
        return NotReached(f"{study.baseline_arm} has no finished runs.")
    base_needs, _ = reach(base, targets)
    logs, bounds = [], []
    for name, means in zip([composition, *parts], others, strict=True):
        needs, is_bound = reach(means, targets)
        if not math.isfinite(needs[0]) or is_bound[0]:
            return NotReached(f"The curve of {name} doesn't cross the baseline's best, so its gain isn't measured.")
        logs.append(np.log(base_needs) - np.log(needs))
        bounds.append(is_bound)
    of_parts = np.any(bounds[1:], axis=0)
    cut = bool(of_parts.any()), bool(bounds[0].any())
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.exp(logs[0] - np.sum(logs[1:], axis=0))
    found = estimate(ratio, base.n, base.freedom, is_ratio=True, cut=cut)
    return _opened(found, *(_in_many(one, base.freedom) for one in (bounds[0], of_parts)))


def noise_floor(study: StudyRecord, *, axis: Axis = "seconds") -> NoiseFloor | None:
    """Compare the baseline with its double (`noise_arm`); None where the study has none."""
    if not (noise := noise_arm(study)):
        return None
    base, double = (
        {point.budget: point.quality.value for point in tradeoff_curve(study, name, axis=axis).points}
        for name in (study.baseline_arm, noise)
    )
    gaps = [(abs(double[budget] - base[budget]), budget) for budget in base if budget in double]
    if not gaps:
        return None
    difference, budget = max(gaps)
    return NoiseFloor(_at_its_own_best(study, noise, axis), difference, budget)
