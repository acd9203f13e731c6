"""From finished studies to the claims that the project makes of itself: one family of tests over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cosmati.errors import RunError
from cosmati.records.headline import HeadlineClaim
from cosmati.records.study import ArmRecord, StudyRecord
from cosmati.study.comparison import HEADLINE_LEVEL, NUM_HEADLINES, NotReached, SpeedUp, speed_up_at_equal_quality
from cosmati.study.curves import Axis, tradeoff_curve
from cosmati.study.statistics import holm


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


def headline_claims(
    contests: Sequence[Contest],
    *,
    family: str,
    num_registered: int = 0,
    axis: Axis = "seconds",
    level: float = HEADLINE_LEVEL,
) -> tuple[HeadlineClaim, ...]:
    """Read off the speed-up of each contest, with p-values adjusted for all of them (Holm).

    It's read at the opponent's mean quality at its largest budget.

    Args:
        contests: those that have come to their end.
        family: its name.
        num_registered: tests that were registered together; those that are still to come count too.
        axis: along which a speed-up is read.
        level: below which a p-value is a claim.

    Raises:
        RunError: more contests than a family of headlines has, or an opponent that is neither tuned nor plain.
    """
    if len(contests) > NUM_HEADLINES:
        msg = f"{len(contests)} headlines are more than {NUM_HEADLINES}. Choose them before the runs."
        raise RunError(msg)
    found = [_speed_up(contest, axis) for contest in contests]
    p_values = [one.p_value if isinstance(one, SpeedUp) else None for one in found]
    to_come = max(0, num_registered - len(contests))
    adjusted = holm([*(1.0 if p is None else p for p in p_values), *[1.0] * to_come])[: len(contests)]
    return tuple(
        _claim(contest, one, None if p is None else q, family, axis, level)
        for contest, one, p, q in zip(contests, found, p_values, adjusted, strict=True)
    )


def _speed_up(contest: Contest, axis: Axis) -> SpeedUp | NotReached:
    return speed_up_at_equal_quality(replace(contest.study, baseline_arm=contest.opponent), contest.arm, axis=axis)


def _claim(
    contest: Contest, found: SpeedUp | NotReached, p_value: float | None, family: str, axis: Axis, level: float
) -> HeadlineClaim:
    study = contest.study
    opponent, arm = _arm(study, contest.opponent), _arm(study, contest.arm)
    if opponent.opponent not in ("tuned", "plain"):
        msg = f"{opponent.name!r} of {study.name!r} is neither a tuned nor a plain opponent, so nothing is claimed."
        raise RunError(msg)
    claim = HeadlineClaim(
        task=contest.task,
        arm=arm.name,
        opponent=opponent.opponent,
        axis=axis,
        metric=study.quality_name,
        quality=_best(study, contest.opponent, axis),
        n=len({run.seed for run in study.runs if run.arm == arm.name}),
        speed_up=None,
        low=None,
        high=None,
        level=level,
        p=p_value,
        family=family,
        baseline_trials=_num_trials(opponent),
        arm_trials=_num_trials(arm),
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


def _best(study: StudyRecord, arm: str, axis: Axis) -> float:
    qualities = [point.quality.value for point in tradeoff_curve(study, arm, axis=axis).points]
    return (max if study.higher_is_better else min)(qualities)


def _closed(end: float | None) -> float | None:
    return None if end is None or end == 0.0 or math.isinf(end) else end
