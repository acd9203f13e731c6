"""The composition view of one study: gains of parts alone, a matrix of pairs, and what to add next."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cosmati.explorer.composition_view import TextRow, advice_text, joint_verdict
from cosmati.explorer.wording import (
    AXIS_NAMES,
    estimate_text,
    interval_text,
    number,
    p_text,
    ratio_interval_text,
    ratio_text,
)
from cosmati.records.study import StudyRecord
from cosmati.study.comparison import (
    SCREENING_LEVEL,
    NotReached,
    comparisons,
    difference_at_equal,
    level_of,
    num_registered,
)
from cosmati.study.composition import Measure, Together, joint_effects, kind_of, single_parts, what_to_add
from cosmati.study.curves import Axis
from cosmati.study.divergence import diverges
from cosmati.study.noise import compared_arms
from cosmati.study.statistics import Estimate, holm

MEASURE_WORDS: dict[Measure, str] = {"speed-up": "speed-up", "difference": "difference in quality"}
_MAX_ADVICE, _MAX_NAMED = 8, 12
GainState = Literal["better", "worse", "none shown", "not measured"]
STATE_WORDS: dict[GainState, str] = {
    "better": "better",
    "worse": "worse",
    "none shown": "no difference shown",
    "not measured": "not measured",
}


@dataclass(frozen=True)
class PartGain:
    """What a part alone gives.

    Attributes:
        part: Its name, with settings where several arms have it alone.
        arm: That has it alone.
        value: Speed-up or difference, None where it isn't measured.
        low: Lower end of the interval, None where there's none; infinite where it's open.
        high: Upper end.
        n: Seeds behind it.
        state: What is shown.
        text: The figure with its interval, or why there is none.
        at_own_best: Whether the speed-up is read at the arm's own best, as it doesn't surely reach the baseline's.
        is_registered: Whether the comparison was registered before the runs.
    """

    part: str
    arm: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    state: GainState
    text: str
    at_own_best: bool = False
    is_registered: bool = False


@dataclass(frozen=True)
class PartsView:
    """All that the page shows of a study's parts; `neutral` is the value of no effect."""

    record: StudyRecord
    axis: Axis
    measure: Measure
    neutral: float
    gains: tuple[PartGain, ...]
    joint: tuple[Together, ...]
    advice: tuple[str, ...]
    findings: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]

    @property
    def pairs(self) -> tuple[Together, ...]:
        """Arms of two parts, both known alone."""
        return tuple(one for one in self.joint if len(one.parts) == 2 and not one.unknown)


def parts_view(study: StudyRecord, axis: Axis, measure: Measure) -> PartsView:
    """Work out the view along an axis, by a measure."""
    gains = _gains(study, axis, measure)
    joint = joint_effects(study, axis=axis, measure=measure)
    methods = {arm.name: arm.methods[0] for arm in study.arms if arm.methods}
    paired = {frozenset(one.parts) for one in joint if len(one.parts) == 2 and not one.unknown}
    return PartsView(
        record=study,
        axis=axis,
        measure=measure,
        neutral=1.0 if measure == "speed-up" else 0.0,
        gains=gains,
        joint=joint,
        advice=_advice(study, axis),
        findings=(*_findings(study, gains, joint), _standing(study, gains, axis, measure)),
        missing=tuple(
            pair
            for pair in itertools.combinations(dict.fromkeys(kind_of(methods[one.arm]) for one in gains), 2)
            if frozenset(pair) not in paired
        ),
    )


def _gains(study: StudyRecord, axis: Axis, measure: Measure) -> tuple[PartGain, ...]:
    arms = {one.arm: name for name, one in single_parts(study, axis=axis).items()}
    found = _by_speed(study, arms, axis) if measure == "speed-up" else _by_difference(study, arms, axis)
    return tuple(sorted(found, key=lambda one: (one.value is None, -(one.value or 0.0))))


def _by_speed(study: StudyRecord, arms: Mapping[str, str], axis: Axis) -> list[PartGain]:
    gains = []
    for one in comparisons(study, axis=axis):
        if one.arm not in arms:
            continue
        found, part, is_registered = one.found, arms[one.arm], one.is_registered
        if isinstance(found, NotReached):
            gains.append(PartGain(part, one.arm, None, None, None, 0, "not measured", found.reason))
            continue
        own = found is not one.best
        text = f"{ratio_text(found)} ({ratio_interval_text(found)}{_p(one.p_value, one.num_tests)})"
        text += ", at the lesser of both bests" if own else ""
        state = _state(one.is_shown, found.ratio > 1)
        gains.append(
            PartGain(part, one.arm, found.ratio, found.low, found.high, found.n, state, text, own, is_registered)
        )
    return gains


def _by_difference(study: StudyRecord, arms: Mapping[str, str], axis: Axis) -> list[PartGain]:
    compared = [arm.name for arm in compared_arms(study)]
    found = {arm: difference_at_equal(study, arm, axis=axis) for arm in compared}
    raw = [one.p_value if isinstance(one, Estimate) and one.p_value is not None else 1.0 for one in found.values()]
    adjusted = dict(zip(compared, holm(raw), strict=True))
    gains = []
    for arm, part in arms.items():
        one = found[arm]
        if isinstance(one, NotReached):
            gains.append(PartGain(part, arm, None, None, None, 0, "not measured", one.reason))
            continue
        has_test = one.p_value is not None and one.low is not None and one.high is not None
        is_whole = not (diverges(study, arm) or diverges(study, study.baseline_arm))
        is_shown = (
            is_whole
            and has_test
            and adjusted[arm] < SCREENING_LEVEL
            and not (one.low or 0.0) <= 0.0 <= (one.high or 0.0)
        )
        p_value = adjusted[arm] if one.p_value is not None else None
        text = f"{number(one.value)} ({interval_text(one.low, one.high, one.n)}{_p(p_value, len(compared))})"
        gains.append(PartGain(part, arm, one.value, one.low, one.high, one.n, _state(is_shown, one.value > 0), text))
    return gains


def _p(p_value: float | None, num_tests: int) -> str:
    return "" if p_value is None else f", {p_text(p_value, num_tests)}"


def _state(is_shown: bool, is_better: bool) -> GainState:
    return "none shown" if not is_shown else "better" if is_better else "worse"


def state_of(found: Together) -> GainState:
    """Return what is shown of parts together."""
    if isinstance(found.ratio, NotReached):
        return "not measured"
    return _state(found.is_shown, found.ratio.value > found.neutral)


def _findings(study: StudyRecord, gains: Sequence[PartGain], joint: Sequence[Together]) -> list[str]:
    """Say in a few sentences what is shown."""
    texts = []
    for state, words in (("better", "better than"), ("worse", "worse than")):
        names = [one.part for one in gains if one.state == state]
        if names:
            verb = "is" if len(names) == 1 else "are"
            texts.append(f"Alone, {_listed(names)} {verb} shown to be {words} {study.baseline_arm}.")
    silent = [one for one in gains if one.state == "none shown"]
    if silent:
        texts.append(f"Of {len(silent)} of {len(gains)} parts alone, no difference is shown.")
    states = [state_of(one) for one in joint]
    for state, words in (("better", "help each other"), ("worse", "get in each other's way")):
        arms = [one.arm for one, found in zip(joint, states, strict=True) if found == state]
        texts += [f"Shown to {words}: {_listed(arms)}."] if arms else []
    counts = [(states.count("none shown"), "no interaction is shown"), (states.count("not measured"), "none measured")]
    told = [f"of {count}, {words}" for count, words in counts if count]
    if told:
        texts.append(f"Of {len(joint)} arms with several parts: {'; '.join(told)}.")
    return texts


def _listed(names: Sequence[str]) -> str:
    """Return names in a row, few enough to be read; figures and tables have all."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _standing(study: StudyRecord, gains: Sequence[PartGain], axis: Axis, measure: Measure) -> str:
    """Say at which standing that is."""
    registered = [one.part for one in gains if one.is_registered]
    if registered:
        level = level_of(num_registered(study.registration))
        few = level < SCREENING_LEVEL
        rest = "All else here is a screening" if few else "So many tests are a screening, as is all else here"
        at = f", at p < {level}" if few else ""
        return f"Registered before the runs{at}: {_listed(registered)}. {rest}, at p < {SCREENING_LEVEL}."
    of = f"other arms, or not by {AXIS_NAMES[axis]}" if measure == "speed-up" else "speed-ups"
    less = f" The study's registered predictions are of {of}."
    return (
        f"This is a screening, at p < {SCREENING_LEVEL} adjusted over all arms (Holm): what stands out is worth a "
        f"study of its own, and isn't a claim.{less if study.registration else ''}"
    )


def _advice(study: StudyRecord, axis: Axis) -> tuple[str, ...]:
    """Say what to add next to the baseline and to each composition, the most promising first."""
    several = [arm.name for arm in compared_arms(study) if len(arm.methods) > 1]
    found = what_to_add(study, [study.baseline_arm, *several], axis=axis)
    some = sorted(
        ((arm, parts) for arm, parts in found.items() if parts),
        key=lambda one: (one[0] != study.baseline_arm, -one[1][0].expected),
    )
    return tuple(advice_text(arm, parts, is_baseline=arm == study.baseline_arm) for arm, parts in some[:_MAX_ADVICE])


def joint_rows(view: PartsView) -> list[TextRow]:
    """Return a row for each arm of several parts."""
    rows: list[TextRow] = []
    for one in view.joint:
        settings = ", ".join(one.with_other_settings)
        note = f"{settings} stands alone with other settings" if settings else "—"
        sign = " × " if view.measure == "speed-up" else " + "
        rows.append(
            (one.arm, sign.join((*one.parts, *one.unknown)), estimate_text(one.ratio), joint_verdict(one), note)
        )
    return rows
