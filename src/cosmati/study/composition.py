"""What the parts of a composition do alone, in pairs and together, and which part to add next.

A part is whatever an arm's record names: a method, an optimizer, a schedule, an initialisation, an option of the model.
Parts of one kind are the same part, whatever their settings: `EMA(half_life="100ba")` and `EMA(half_life="0.05dur")`
are both `EMA`, and where an arm stands for a part with other settings, that is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cosmati.records.study import ArmRecord, StudyRecord
from cosmati.study.comparison import NOISE_ARM, NotReached, SpeedUp, interaction, speed_up_at_equal_quality
from cosmati.study.curves import Axis
from cosmati.study.statistics import Estimate


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
        parts: Their kinds.
        ratio: Above 1 they help each other, below 1 they get in each other's way.
        unknown: Parts of the arm that no arm has alone; then the ratio is of the others, and holds their gain too.
        with_other_settings: Parts that the arm has with other settings than the arm that has them alone.
    """

    arm: str
    parts: tuple[str, ...]
    ratio: Estimate | NotReached
    unknown: tuple[str, ...]
    with_other_settings: tuple[str, ...]


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


def together(study: StudyRecord, arm: str, *, axis: Axis = "seconds") -> Together | None:
    """Compare an arm of several parts with the product of what they do alone; None where it has no two such parts."""
    alone = {kind_of(one.methods[0]): one for one in reversed(_compared(study)) if len(one.methods) == 1}
    own = next(one for one in study.arms if one.name == arm)
    settings = {kind_of(part): part for part in own.methods}
    known = [kind for kind in settings if kind in alone]
    if len(known) < 2 or len(own.methods) < 2:
        return None
    return Together(
        arm=arm,
        parts=tuple(known),
        ratio=interaction(study, arm, [alone[kind].name for kind in known], axis=axis),
        unknown=tuple(kind for kind in settings if kind not in alone),
        with_other_settings=tuple(kind for kind in known if settings[kind] != alone[kind].methods[0]),
    )


def pairs(study: StudyRecord, *, axis: Axis = "seconds") -> tuple[Together, ...]:
    """Return the interaction of each pair of parts that an arm has, with nothing else."""
    arms = [arm for arm in _compared(study) if len(arm.methods) == 2]
    found = [together(study, arm.name, axis=axis) for arm in arms]
    return tuple(one for one in found if one is not None and not one.unknown)


def what_to_add(study: StudyRecord, arm: str, *, axis: Axis = "seconds") -> tuple[Candidate, ...]:
    """Return the parts that `arm` hasn't and whose own gain is shown, by what to expect of them there.

    Gains that aren't shown are left out: what is best among many by luck isn't worth a run.
    """
    own = {kind_of(part) for one in study.arms if one.name == arm for part in one.methods}
    measured = {frozenset(one.parts): one.ratio for one in pairs(study, axis=axis)}
    found = []
    for part in single_parts(study, axis=axis).values():
        gain = part.gain
        if part.kind in own or isinstance(gain, NotReached) or gain.low is None or gain.low <= 1.0:
            continue
        known = [measured.get(frozenset((part.kind, other))) for other in own]
        factors = [one.value for one in known if isinstance(one, Estimate)]
        found.append(Candidate(part, gain.ratio * math.prod(factors), len(factors)))
    return tuple(sorted(found, key=lambda one: -one.expected))


def pair_arms(parts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return all pairs of parts, for a study of interactions."""
    return tuple(itertools.combinations(parts, 2))


def _compared(study: StudyRecord) -> list[ArmRecord]:
    return [arm for arm in study.arms if arm.name not in (study.baseline_arm, NOISE_ARM)]
