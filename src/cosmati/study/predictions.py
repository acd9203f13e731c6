"""What came of a study's predictions."""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from typing import Literal

from cosmati.records.study import Prediction, StudyRecord
from cosmati.study.comparison import (
    HEADLINE_LEVEL,
    NUM_HEADLINES,
    SCREENING_LEVEL,
    NotReached,
    SpeedUp,
    speed_up_at_equal_quality,
)
from cosmati.study.curves import Axis
from cosmati.study.statistics import holm


@dataclass(frozen=True)
class PredictionOutcome:
    """What came of a prediction.

    Attributes:
        prediction: As registered.
        found: The speed-up at the opponent's best quality, or why there is none.
        p_value: Adjusted for all predictions of the family; None where there is none.
        verdict: `met`: as fast as predicted, and shown to be faster; `not met`: slower than predicted, or the quality
            was never reached; `not shown`: as fast as predicted, but it could be chance.
    """

    prediction: Prediction
    found: SpeedUp | NotReached
    p_value: float | None
    verdict: Literal["met", "not met", "not shown"]


def outcomes_of(study: StudyRecord) -> tuple[PredictionOutcome, ...]:
    """Return what came of each prediction of a study, as one family of tests (Holm); empty where nothing was."""
    if study.registration is None:
        return ()
    predictions = study.registration.predictions
    found = [_found(study, one) for one in predictions]
    p_values = [one.p_value if isinstance(one, SpeedUp) else None for one in found]
    adjusted = holm([1.0 if p is None else p for p in p_values])
    level = HEADLINE_LEVEL if len(predictions) <= NUM_HEADLINES else SCREENING_LEVEL
    outcomes = []
    for prediction, one, p_value, raw in zip(predictions, found, adjusted, p_values, strict=True):
        known = None if raw is None else p_value
        outcomes.append(PredictionOutcome(prediction, one, known, _verdict(prediction, one, known, level)))
    return tuple(outcomes)


def _found(study: StudyRecord, prediction: Prediction) -> SpeedUp | NotReached:
    against = replace(study, baseline_arm=prediction.opponent)
    axis: Axis = typing.cast("Axis", prediction.axis)
    return speed_up_at_equal_quality(against, prediction.arm, axis=axis)


def _verdict(
    prediction: Prediction, found: SpeedUp | NotReached, p_value: float | None, level: float
) -> Literal["met", "not met", "not shown"]:
    if isinstance(found, NotReached) or found.ratio < prediction.at_least:
        return "not met"
    if found.low is None or p_value is None or p_value >= level or found.low <= 1.0:
        return "not shown"
    return "met"
