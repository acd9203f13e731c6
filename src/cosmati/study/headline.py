"""From finished studies to the claims that the project makes of itself: one family of tests over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cosmati.errors import RunError
from cosmati.records.headline import HeadlineClaim
from cosmati.records.study import NUM_HEADLINES, ArmRecord, StudyRecord
from cosmati.study.checks import SearchEffort, effort_of, is_as_hard
from cosmati.study.comparison import HEADLINE_LEVEL, SCREENING_LEVEL, NotReached, SpeedUp, speed_up_at_equal_quality
from cosmati.study.curves import Axis, tradeoff_curve
from cosmati.study.predictions import adjusted_for


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One arm of a study against one opponent.

    Args:
        task: `text` or `images`.
        study: both arms are in it.
        arm: name of the arm.
        opponent: name of the opponent's arm.
        date: ISO 8601, of the study's end.
        commit: of the source that ran.
    """

    task: str
    study: StudyRecord
    arm: str
    opponent: str
    date: str
    commit: str


def headline_claims(contests: Sequence[Contest], *, axes: Sequence[Axis] = ("seconds",)) -> tuple[HeadlineClaim, ...]:
    """Read off the speed-up of each contest along each axis, at the opponent's mean quality at its largest budget.

    What a study predicted before its runs is a test of the family that was registered, and its p-value is adjusted for
    the whole family, the tests of studies that are still to come too (Holm). All else is a family of its own, a
    screening, and says that it wasn't registered.

    Args:
        contests: those that have come to their end.
        axes: along which speed-ups are read.

    Raises:
        RunError: an opponent is neither tuned nor plain, or is called tuned and wasn't searched as hard as the arm;
            registrations of several families, or of one that has more tests than headlines may be, or fewer than came.
    """
    for contest in contests:
        _refuse_weak(contest)
    tests = [(contest, axis) for axis in axes for contest in contests]
    family = _registered_family(tests)
    others = [test for test in tests if not _is_registered(*test)]
    by = " and ".join(dict.fromkeys(axis for _, axis in others))
    screening = _Family(f"not registered: a screening by {by}", len(others), is_registered=False)
    claims: dict[int, HeadlineClaim] = {}
    for one in (family, screening):
        places = [place for place, test in enumerate(tests) if _is_registered(*test) is one.is_registered]
        found = [_speed_up(*tests[place]) for place in places]
        p_values = [speed_up.p_value if isinstance(speed_up, SpeedUp) else None for speed_up in found]
        adjusted = adjusted_for(one.num_tests, p_values)
        for place, speed_up, p_value in zip(places, found, adjusted, strict=True):
            claims[place] = _claim(tests[place], speed_up, p_value, one)
    return tuple(claims[place] for place in range(len(tests)))


@dataclass(frozen=True)
class _Family:
    """Tests whose p-values are adjusted together; a screening was registered nowhere."""

    name: str
    num_tests: int
    is_registered: bool


def _is_registered(contest: Contest, axis: Axis) -> bool:
    found = contest.study.registration
    predicted = [(one.arm, one.opponent, one.axis) for one in found.predictions] if found else []
    return (contest.arm, contest.opponent, axis) in predicted


def _registered_family(tests: Sequence[tuple[Contest, Axis]]) -> _Family:
    """Return the one family that was registered, of no test where none was."""
    registered = [contest.study.registration for contest, axis in tests if _is_registered(contest, axis)]
    found = {(one.family, one.family_size) for one in registered if one}
    if not found:
        return _Family("", 0, is_registered=True)
    if len(found) > 1:
        msg = f"Headlines are one family of tests, and these were registered as several: {sorted(found)}. Choose one."
        raise RunError(msg)
    name, size = found.pop()
    if size > NUM_HEADLINES:
        msg = f"{size} headlines are more than {NUM_HEADLINES}. Choose them before the runs."
        raise RunError(msg)
    if len(registered) > size:
        msg = (
            f"The family {name!r} was registered with {size} tests, and here are {len(registered)}. Leave out what "
            "wasn't among them."
        )
        raise RunError(msg)
    return _Family(name, size, is_registered=True)


def _refuse_weak(contest: Contest) -> None:
    """Refuse an opponent that is neither plain nor as tuned as it's called."""
    study = contest.study
    opponent, arm = _arm(study, contest.opponent), _arm(study, contest.arm)
    if opponent.opponent not in ("tuned", "plain"):
        msg = f"{opponent.name!r} of {study.name!r} is neither a tuned nor a plain opponent, so nothing is claimed."
        raise RunError(msg)
    if opponent.opponent == "tuned" and not (
        opponent.search and arm.search and is_as_hard(opponent.search, arm.search)
    ):
        efforts = [effort_of(one.search) if one.search else SearchEffort(0, 0, 0) for one in (opponent, arm)]
        had, against = (
            f"{one.num_trials} trials of {one.num_settings} settings and {one.num_steps:,} steps" for one in efforts
        )
        msg = (
            f"{opponent.name!r} of {study.name!r} is called tuned and wasn't searched as hard as {arm.name!r}: {had} "
            f"against {against}. Search both by one plan, search_arms, and run the study again."
        )
        raise RunError(msg)


def _speed_up(contest: Contest, axis: Axis) -> SpeedUp | NotReached:
    return speed_up_at_equal_quality(replace(contest.study, baseline_arm=contest.opponent), contest.arm, axis=axis)


def _claim(
    test: tuple[Contest, Axis], found: SpeedUp | NotReached, p_value: float | None, family: _Family
) -> HeadlineClaim:
    contest, axis = test
    study = contest.study
    opponent, arm = _arm(study, contest.opponent), _arm(study, contest.arm)
    claim = HeadlineClaim(
        task=contest.task,
        arm=arm.name,
        opponent=opponent.opponent or "",
        axis=axis,
        metric=study.quality_name,
        quality=_best(study, contest.opponent, axis),
        n=len({run.seed for run in study.runs if run.arm == arm.name}),
        speed_up=None,
        low=None,
        high=None,
        level=HEADLINE_LEVEL if family.is_registered else SCREENING_LEVEL,
        p=p_value,
        family=family.name,
        num_tests=family.num_tests,
        is_registered=family.is_registered,
        baseline_trials=_num_trials(opponent),
        arm_trials=_num_trials(arm),
        baseline_by_hand=_by_hand(opponent),
        arm_by_hand=_by_hand(arm),
        command=study.command,
        hardware=study.hardware,
        date=contest.date,
        commit=contest.commit,
    )
    if isinstance(found, NotReached):
        return claim
    low, high = _closed(found.low), _closed(found.high)
    return replace(claim, quality=found.quality, n=found.n, speed_up=found.ratio, low=low, high=high)


def _arm(study: StudyRecord, name: str) -> ArmRecord:
    return next(arm for arm in study.arms if arm.name == name)


def _num_trials(arm: ArmRecord) -> int:
    return len(arm.search.trials) if arm.search else 0


def _by_hand(arm: ArmRecord) -> int | None:
    return arm.search.by_hand if arm.search and arm.search.is_known else None


def _best(study: StudyRecord, arm: str, axis: Axis) -> float:
    qualities = [point.quality.value for point in tradeoff_curve(study, arm, axis=axis).points]
    return (max if study.higher_is_better else min)(qualities)


def _closed(end: float | None) -> float | None:
    return None if end is None or end == 0.0 or math.isinf(end) else end
