"""What the parts of a composition do alone, in pairs and together, and which part to add next.

What parts do together is one family of tests for the whole study (Holm), a screening; by ratios where curves reach the
baseline's best quality, and another family by quality at the largest budget, which is known for parts that don't, too.

A part is whatever an arm's record names: a method, an optimizer, a schedule, an initialisation, an option of the model.
Parts of one kind are the same part, whatever their settings: `EMA(half_life="100ba")` and `EMA(half_life="0.05dur")`
are both `EMA`, and where an arm stands for a part with other settings, that is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cosmati.records.study import ArmRecord, StudyRecord
from cosmati.study.comparison import (
    NOISE_ARM,
    SCREENING_LEVEL,
    NotReached,
    SpeedUp,
    comparisons,
    interaction,
    speed_up_at_equal_quality,
)
from cosmati.study.curves import Axis, paired_means
from cosmati.study.statistics import Estimate, estimate, holm


@dataclass(frozen=True)
class SinglePart:
    """A part that an arm has alone.

    Attributes:
        kind: Its name without settings.
        arm: The arm that adds it alone to the baseline.
        gain: That arm's speed-up at the baseline's best quality.
    """

    kind: str
    arm: str
    gain: SpeedUp | NotReached


@dataclass(frozen=True)
class Together:
    """What several parts do in one arm, over the product of what they do alone.

    Attributes:
        arm: The arm that has them all.
        parts: Kinds of those that some arm has alone.
        ratio: Above 1 they help each other, below 1 they get in each other's way. Not reached where there are unknown
            parts too, whose own gain would be in it.
        unknown: Kinds of those that no arm has alone.
        with_other_settings: Parts that the arm has with other settings than the arm that has them alone.
        p_value: Of the ratio against 1, adjusted for all such ratios of the study; None where there is none.
        num_tests: How many these are.
        beyond_sum: By how much the arm is better at the study's largest budget than with the sum of what its parts
            give or take there, in units of quality; above 0 they help each other.
        sum_p_value: Of `beyond_sum` against 0, adjusted for all of them; None where there is none.
    """

    arm: str
    parts: tuple[str, ...]
    ratio: Estimate | NotReached
    unknown: tuple[str, ...]
    with_other_settings: tuple[str, ...]
    beyond_sum: Estimate | NotReached
    p_value: float | None = None
    num_tests: int = 0
    sum_p_value: float | None = None

    @property
    def is_shown(self) -> bool:
        """Whether the parts are shown to help each other, or to get in each other's way."""
        found = self.ratio
        if isinstance(found, NotReached) or found.low is None or found.high is None or self.p_value is None:
            return False
        return self.p_value < SCREENING_LEVEL and not found.low <= 1.0 <= found.high

    @property
    def is_sum_shown(self) -> bool:
        """Whether the same is shown by quality at the largest budget."""
        return self.sum_p_value is not None and self.sum_p_value < SCREENING_LEVEL


@dataclass(frozen=True)
class Candidate:
    """A part that a composition hasn't yet.

    Attributes:
        part: It, alone.
        expected: The gain to expect of it there: its own, times its interaction with each part where that's measured.
        num_measured: Of its pairs with the composition's parts, how many are measured.
    """

    part: SinglePart
    expected: float
    num_measured: int


def kind_of(part: str) -> str:
    """Return a part's name without settings."""
    return part.partition("(")[0].strip()


def single_parts(study: StudyRecord, *, axis: Axis = "seconds") -> dict[str, SinglePart]:
    """Return each part that some arm adds to the baseline alone, by kind; of several arms the first."""
    found: dict[str, SinglePart] = {}
    for arm in _compared(study):
        if len(arm.methods) == 1 and kind_of(arm.methods[0]) not in found:
            kind = kind_of(arm.methods[0])
            found[kind] = SinglePart(kind, arm.name, speed_up_at_equal_quality(study, arm.name, axis=axis))
    return found


def joint_effects(study: StudyRecord, *, axis: Axis = "seconds") -> tuple[Together, ...]:
    """Compare each arm of several parts with the product of what they do alone; arms without any known part left out.

    Which tests are of the family goes by the arms' parts, and not by what came out.
    """
    found = [one for arm in _compared(study) if (one := _together(study, arm, axis)) is not None]
    tests = [one for one in found if not one.unknown]
    by_ratio, by_sum = (
        dict(zip([one.arm for one in tests], _adjusted(estimates), strict=True))
        for estimates in ([one.ratio for one in tests], [one.beyond_sum for one in tests])
    )
    return tuple(
        replace(one, p_value=by_ratio.get(one.arm), num_tests=len(tests), sum_p_value=by_sum.get(one.arm))
        for one in found
    )


def _adjusted(found: Sequence[Estimate | NotReached]) -> list[float | None]:
    """Return Holm's p-values of one family; None where there is none, which counts in the family all the same."""
    raw = [one.p_value if isinstance(one, Estimate) else None for one in found]
    holms = holm([1.0 if p is None else p for p in raw])
    return [None if p is None else adjusted for p, adjusted in zip(raw, holms, strict=True)]


def _beyond_sum(study: StudyRecord, composition: str, parts: Sequence[str]) -> Estimate | NotReached:
    """Return the contrast of qualities at the largest budget: composition - sum of parts + (parts - 1) baselines."""
    largest = max(run.budget for run in study.runs)
    at_largest = replace(study, runs=tuple(run for run in study.runs if run.budget == largest))
    names = [composition, *parts, study.baseline_arm]
    found = paired_means(at_largest, names, axis="step")
    together, *alone, base = (means.quality[:, 0] for means in found)
    lost = next((name for name, means in zip(names, found, strict=True) if not np.isfinite(means.quality[0, 0])), None)
    if lost is not None:
        return NotReached(f"{lost} has no finished runs at the largest budget, or not those of the other arms' seeds.")
    return estimate(together - np.sum(alone, axis=0) + (len(parts) - 1) * base, found[0].n, found[0].freedom)


def _together(study: StudyRecord, arm: ArmRecord, axis: Axis) -> Together | None:
    alone = {kind_of(one.methods[0]): one for one in reversed(_compared(study)) if len(one.methods) == 1}
    settings = {kind_of(part): part for part in arm.methods}
    known = [kind for kind in settings if kind in alone]
    unknown = [kind for kind in settings if kind not in alone]
    if not known or len(settings) < 2:
        return None
    ratio: Estimate | NotReached
    beyond_sum: Estimate | NotReached
    if unknown:
        ratio = beyond_sum = NotReached(
            f"Nothing is known of {', '.join(unknown)} alone: run an arm with each alone, over {study.baseline_arm}."
        )
    else:
        names = [alone[kind].name for kind in known]
        ratio = interaction(study, arm.name, names, axis=axis)
        beyond_sum = _beyond_sum(study, arm.name, names)
    return Together(
        arm=arm.name,
        parts=tuple(known),
        ratio=ratio,
        beyond_sum=beyond_sum,
        unknown=tuple(unknown),
        with_other_settings=tuple(kind for kind in known if settings[kind] != alone[kind].methods[0]),
    )


def pairs(study: StudyRecord, *, axis: Axis = "seconds") -> tuple[Together, ...]:
    """Return the interaction of each pair of parts that an arm has, with nothing else."""
    return tuple(one for one in joint_effects(study, axis=axis) if len(one.parts) == 2 and not one.unknown)


def what_to_add(study: StudyRecord, arms: Sequence[str], *, axis: Axis = "seconds") -> dict[str, tuple[Candidate, ...]]:
    """Return for each of `arms` the parts that it hasn't and whose own gain is shown, by what to expect of them there.

    Gains that aren't shown (`Comparison.is_shown`) are left out: what is best among many by luck isn't worth a run.
    """
    measured = {frozenset(one.parts): one.ratio for one in pairs(study, axis=axis)}
    shown = {one.arm for one in comparisons(study, axis=axis) if one.is_shown}
    gains = [
        (part, part.gain.ratio)
        for part in single_parts(study, axis=axis).values()
        if part.arm in shown and isinstance(part.gain, SpeedUp) and part.gain.ratio > 1.0
    ]
    methods = {arm.name: arm.methods for arm in study.arms}
    found = {}
    for arm in arms:
        own = {kind_of(part) for part in methods[arm]}
        candidates = []
        for part, gain in gains:
            known = [measured.get(frozenset((part.kind, other))) for other in own]
            factors = [one.value for one in known if isinstance(one, Estimate)]
            if part.kind not in own:
                candidates.append(Candidate(part, gain * math.prod(factors), len(factors)))
        found[arm] = tuple(sorted(candidates, key=lambda one: -one.expected))
    return found


def pair_arms(parts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return all pairs of parts, for a study of interactions."""
    return tuple(itertools.combinations(parts, 2))


def _compared(study: StudyRecord) -> list[ArmRecord]:
    return [arm for arm in study.arms if arm.name not in (study.baseline_arm, NOISE_ARM)]
