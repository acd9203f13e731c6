"""What the parts of a composition do alone, in pairs and together, and which part to add next.

What parts do together is one family of tests for the whole study (Holm), a screening.

A part is whatever an arm's record names: a method, an optimizer, a schedule, an initialisation, an option of the model.
Parts of one kind are the same part, whatever their settings: `EMA(half_life="100ba")` and `EMA(half_life="0.05dur")`
are both `EMA`, and where an arm stands for a part with other settings, that is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
from cosmati.study.curves import Axis, best_within, paired_means
from cosmati.study.divergence import diverges
from cosmati.study.statistics import Estimate, estimate, holm

Measure = Literal["speed-up", "difference"]
"""By what parts are judged: speed-up at the baseline's best quality, or difference in quality at its largest budget."""


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
    """What several parts do in one arm, over the product of what they do alone; of differences, less their sum.

    Attributes:
        arm: The arm that has them all.
        parts: Kinds of those that some arm has alone.
        ratio: Above `neutral` they help each other, below it they get in each other's way. Not reached where there are
            unknown parts too, whose own gain would be in it.
        unknown: Kinds of those that no arm has alone.
        with_other_settings: Parts that the arm has with other settings than the arm that has them alone.
        p_value: Of the ratio against `neutral`, adjusted for all such ratios of the study; None where there is none, as
            where more than a tenth of the runs of one of these arms diverged or failed.
        num_tests: How many these are.
        neutral: 1 for a ratio of speed-ups, 0 for differences in quality.
    """

    arm: str
    parts: tuple[str, ...]
    ratio: Estimate | NotReached
    unknown: tuple[str, ...]
    with_other_settings: tuple[str, ...]
    p_value: float | None = None
    num_tests: int = 0
    neutral: float = 1.0

    @property
    def is_shown(self) -> bool:
        """Whether the parts are shown to help each other, or to get in each other's way."""
        found = self.ratio
        if isinstance(found, NotReached) or found.low is None or found.high is None or self.p_value is None:
            return False
        return self.p_value < SCREENING_LEVEL and not found.low <= self.neutral <= found.high


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


def joint_effects(study: StudyRecord, *, axis: Axis = "seconds", measure: Measure = "speed-up") -> tuple[Together, ...]:
    """Compare each arm of several parts with what they do alone; arms without any known part left out.

    Which tests are of the family goes by the arms' parts, and not by what came out. Each measure is a family.
    """
    found = [one for arm in _compared(study) if (one := _together(study, arm, axis, measure)) is not None]
    tests = [one for one in found if not one.unknown]
    raw = [one.ratio.p_value if isinstance(one.ratio, Estimate) else None for one in tests]
    adjusted = {
        one.arm: None if p_value is None else holms
        for one, p_value, holms in zip(tests, raw, holm([1.0 if p is None else p for p in raw]), strict=True)
    }
    return tuple(replace(one, p_value=adjusted.get(one.arm), num_tests=len(tests)) for one in found)


def joint_difference(
    study: StudyRecord, composition: str, parts: Sequence[str], *, axis: Axis = "seconds"
) -> Estimate | NotReached:
    """Return the composition's gain in quality less the sum of its parts', at the baseline's largest budget.

    In units of quality, above 0 where they help each other whichever way the quality points. Each arm stands with its
    best quality for at most as much of `axis` as the baseline's largest budget takes; all arms are drawn together.
    """
    names = [study.baseline_arm, composition, *parts]
    means = paired_means(study, names, axis=axis)
    known = means[0].position[0][np.isfinite(means[0].position[0])]
    if not len(known):
        return NotReached(f"{study.baseline_arm} has no finished runs.")
    where = np.full(len(means[0].position), float(known.max()))
    base, own, *others = (best_within(one, where) for one in means)
    for name, values in zip(names, (base, own, *others), strict=True):
        if not math.isfinite(values[0]):
            return NotReached(f"{name} has no run with {axis} of at most {where[0]:.4g}.")
    with np.errstate(invalid="ignore"):
        found = own - base - np.sum([one - base for one in others], axis=0)
    return estimate(found, means[0].n, means[0].freedom)


def _together(study: StudyRecord, arm: ArmRecord, axis: Axis, measure: Measure) -> Together | None:
    alone = {kind_of(one.methods[0]): one for one in reversed(_compared(study)) if len(one.methods) == 1}
    settings = {kind_of(part): part for part in arm.methods}
    known = [kind for kind in settings if kind in alone]
    unknown = [kind for kind in settings if kind not in alone]
    if not known or len(settings) < 2:
        return None
    of = interaction if measure == "speed-up" else joint_difference
    ratio = (
        NotReached(
            f"Nothing is known of {', '.join(unknown)} alone: run an arm with each alone, over {study.baseline_arm}."
        )
        if unknown
        else of(study, arm.name, [alone[kind].name for kind in known], axis=axis)
    )
    if isinstance(ratio, Estimate) and any(
        diverges(study, name) for name in (study.baseline_arm, arm.name, *(alone[kind].name for kind in known))
    ):
        ratio = replace(ratio, p_value=None)  # it's of the seeds that went well
    return Together(
        arm=arm.name,
        parts=tuple(known),
        ratio=ratio,
        unknown=tuple(unknown),
        with_other_settings=tuple(kind for kind in known if settings[kind] != alone[kind].methods[0]),
        neutral=1.0 if measure == "speed-up" else 0.0,
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
