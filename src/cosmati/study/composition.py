"""What the parts of a composition do alone, in pairs and together, and which part to add next.

What parts do together is one family of tests for the whole study (Holm), a screening.

A part is whatever an arm's record names: a method, an optimizer, a schedule, an initialisation, an option of the model.
Parts of one kind are the same part, whatever their settings: `EMA(half_life="100ba")` and `EMA(half_life="0.05dur")`
are both `EMA`, and where an arm stands for a part with other settings, that is said.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cosmati.records.study import ArmRecord, StudyRecord
from cosmati.study.comparison import (
    SCREENING_LEVEL,
    NotReached,
    SpeedUp,
    comparisons,
    interaction,
    speed_up_at_equal_quality,
)
from cosmati.study.curves import Axis, best_within, paired_means
from cosmati.study.divergence import diverges
from cosmati.study.noise import compared_arms
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
        name: Its kind, with settings where several arms have one of that kind alone.
    """

    kind: str
    arm: str
    gain: SpeedUp | NotReached
    name: str


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
        alone: The arms that have the parts alone, in the parts' order.
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
    alone: tuple[str, ...] = ()

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
        num_unread: How many of them have an arm of which no interaction can be read off.
    """

    part: SinglePart
    expected: float
    num_measured: int
    num_unread: int = 0


def kind_of(part: str) -> str:
    """Return a part's name without settings, which are what stands in brackets at its end.

    `Muon(lr=0.02) + EMA(half_life="100ba")` is a part of its own, and no `Muon`.
    """
    depth = 0
    for place, sign in enumerate(part.rstrip()):
        depth += (sign == "(") - (sign == ")")
        if sign == ")" and depth == 0 and place + 1 < len(part.rstrip()):
            return part.strip()
    return part.partition("(")[0].strip() or part.strip()


def single_parts(study: StudyRecord, *, axis: Axis = "seconds") -> dict[str, SinglePart]:
    """Return each arm that adds one part alone to the baseline, by the part's name.

    That is its kind; where several arms have one of that kind, with its settings, and with the arm where these are the
    same too.
    """
    arms = _alone(study)
    kinds = Counter(kind_of(arm.methods[0]) for arm in arms)
    texts = Counter(arm.methods[0] for arm in arms)
    found: dict[str, SinglePart] = {}
    for arm in arms:
        text, kind = arm.methods[0], kind_of(arm.methods[0])
        name = kind if kinds[kind] == 1 else text if texts[text] == 1 else f"{text}, arm {arm.name}"
        found[name] = SinglePart(kind, arm.name, speed_up_at_equal_quality(study, arm.name, axis=axis), name)
    return found


def _alone(study: StudyRecord) -> list[ArmRecord]:
    return [arm for arm in compared_arms(study) if len(arm.methods) == 1]


def arms_alone(study: StudyRecord, parts: Sequence[str]) -> dict[str, ArmRecord]:
    """Return by kind the arm that has each part alone: with the same settings where there's one, or else the first."""
    arms = _alone(study)
    same = {arm.methods[0]: arm for arm in reversed(arms)}
    first = {kind_of(arm.methods[0]): arm for arm in reversed(arms)}
    found = {kind_of(part): same.get(part, first.get(kind_of(part))) for part in parts}
    return {kind: arm for kind, arm in found.items() if arm is not None}


def joint_effects(study: StudyRecord, *, axis: Axis = "seconds", measure: Measure = "speed-up") -> tuple[Together, ...]:
    """Compare each arm of several parts with what they do alone; arms without any known part left out.

    Which tests are of the family goes by the arms' parts, and not by what came out. Each measure is a family.
    """
    found = [one for arm in compared_arms(study) if (one := _together(study, arm, axis, measure)) is not None]
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
    alone = arms_alone(study, arm.methods)
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
        alone=tuple(alone[kind].name for kind in known),
    )


def pairs(study: StudyRecord, *, axis: Axis = "seconds") -> tuple[Together, ...]:
    """Return the interaction of each pair of parts that an arm has, with nothing else."""
    return tuple(one for one in joint_effects(study, axis=axis) if len(one.parts) == 2 and not one.unknown)


def what_to_add(study: StudyRecord, arms: Sequence[str], *, axis: Axis = "seconds") -> dict[str, tuple[Candidate, ...]]:
    """Return for each of `arms` the parts that it hasn't and whose own gain is shown, by what to expect of them there.

    Gains that aren't shown (`Comparison.is_shown`) are left out: what is best among many by luck isn't worth a run. So
    are parts of which no gain is to be expected there: by what their pairs with the arm's parts do, or where such a
    pair never comes to the baseline's best, or is shown to be worse than the sum of both.
    """
    measured = {frozenset(one.alone): one for one in pairs(study, axis=axis)}
    shown = {one.arm for one in comparisons(study, axis=axis) if one.is_shown}
    harmful = _harmful(study, [one for one in measured.values() if isinstance(one.ratio, NotReached)], axis)
    gains = [
        (part, part.gain.ratio)
        for part in single_parts(study, axis=axis).values()
        if part.arm in shown and isinstance(part.gain, SpeedUp) and part.gain.ratio > 1.0
    ]
    methods = {arm.name: arm.methods for arm in study.arms}
    found = {}
    for name in arms:
        own, alone = {kind_of(part) for part in methods[name]}, arms_alone(study, methods[name])
        candidates = []
        for part, gain in gains:
            both = [measured.get(frozenset((part.arm, other.name))) for other in alone.values()]
            known = [one for one in both if one is not None]
            factors = [one.ratio.value for one in known if isinstance(one.ratio, Estimate)]
            expected = gain * math.prod(factors)
            if part.kind not in own and expected > 1.0 and not any(one.arm in harmful for one in known):
                candidates.append(Candidate(part, expected, len(factors), len(known) - len(factors)))
        found[name] = tuple(sorted(candidates, key=lambda one: -one.expected))
    return found


def _harmful(study: StudyRecord, unread: Sequence[Together], axis: Axis) -> frozenset[str]:
    """Return which arms of pairs without an interaction never reach the baseline's best, or are shown to be worse."""
    if not unread:
        return frozenset()
    late = set[str]()
    for one in unread:
        base, own = (mean.quality[0].max() for mean in paired_means(study, [study.baseline_arm, one.arm], axis=axis))
        late |= {one.arm} if math.isfinite(own) and own < base else set()
    by_difference = joint_effects(study, axis=axis, measure="difference")
    worse = {
        one.arm for one in by_difference if one.is_shown and isinstance(one.ratio, Estimate) and one.ratio.value < 0
    }
    return frozenset(late | (worse & {one.arm for one in unread}))


def pair_arms(parts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return all pairs of parts, for a study of interactions."""
    return tuple(itertools.combinations(parts, 2))
