"""What came of a study's predictions."""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cosmati.records.study import Prediction, StudyRecord
from cosmati.study.comparison import NotReached, SpeedUp, level_of, speed_up_at_equal_quality
from cosmati.study.curves import Axis, is_counted
from cosmati.study.statistics import holm

SMALLEST_P = 1e-15
"""Below which Student's distribution, one less a sum in double precision, doesn't tell p-values from 0."""
Verdict = Literal["met", "not met", "not shown", "open", "not measured"]


@dataclass(frozen=True)
class NotMeasured(NotReached):
    """Runs have no count along an axis."""


@dataclass(frozen=True)
class PredictionOutcome:
    """What came of a prediction.

    Attributes:
        prediction: As registered.
        found: The speed-up at the opponent's best quality, or why there is none.
        p_value: Adjusted for all predictions of the family; None where there is none.
        verdict: `met`: as fast as predicted, and shown to be faster; `not met`: slower than predicted, or the quality
            was never reached; `not shown`: as fast as predicted, but it could be chance; `open`: the speed-up is
            somewhere above a bound that lies below what was predicted, or there are no runs to tell; `not measured`:
            runs have no count along the prediction's axis.
    """

    prediction: Prediction
    found: SpeedUp | NotReached
    p_value: float | None
    verdict: Verdict


def outcomes_of(study: StudyRecord) -> tuple[PredictionOutcome, ...]:
    """Return what came of each prediction of a study; empty where there was none.

    P-values are adjusted for the whole family (Holm): its tests in other studies count as if nothing came of them.
    """
    if study.registration is None:
        return ()
    predictions = study.registration.predictions
    found = [_found(study, one) for one in predictions]
    p_values = [one.p_value if isinstance(one, SpeedUp) else None for one in found]
    size = study.registration.family_size
    adjusted = adjusted_for(size, p_values)
    level = level_of(size)
    return tuple(
        PredictionOutcome(prediction, one, p_value, _verdict(study, prediction, one, p_value, level))
        for prediction, one, p_value in zip(predictions, found, adjusted, strict=True)
    )


def adjusted_for(family_size: int, p_values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Adjust p-values for a family that they may be a part of: what isn't there counts as 1 (Holm)."""
    rest = [1.0] * (family_size - len(p_values))
    adjusted = holm([*(1.0 if p is None else max(SMALLEST_P, p) for p in p_values), *rest])
    return tuple(None if p is None else q for p, q in zip(p_values, adjusted, strict=False))


def _found(study: StudyRecord, prediction: Prediction) -> SpeedUp | NotReached:
    against = replace(study, baseline_arm=prediction.opponent)
    axis: Axis = typing.cast("Axis", prediction.axis)
    if axis not in typing.get_args(Axis) or not is_counted(study, (prediction.arm, prediction.opponent), axis):
        return NotMeasured(f"The runs have no count of {prediction.axis}, so nothing is measured.")
    return speed_up_at_equal_quality(against, prediction.arm, axis=axis)


def _verdict(
    study: StudyRecord, prediction: Prediction, found: SpeedUp | NotReached, p_value: float | None, level: float
) -> Verdict:
    if isinstance(found, NotMeasured):
        return "not measured"
    if isinstance(found, NotReached):
        return "not met" if _was_run(study, prediction) else "open"
    if found.ratio < prediction.at_least:
        return "open" if found.is_at_least else "not met"
    if found.low is None or p_value is None or p_value >= level or found.low <= 1.0:
        return "not shown"
    return "met"


def _was_run(study: StudyRecord, prediction: Prediction) -> bool:
    """Whether the arm could have reached something: it was run, be it that it diverged, and its opponent got there."""
    there = {run.arm for run in study.runs if math.isfinite(run.final.quality)}
    return prediction.opponent in there and prediction.arm in {run.arm for run in study.runs}
