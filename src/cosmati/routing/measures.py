"""Attenuation by what was measured of rows beside their band: trust rank, evidence grade, affect.

    measures:
      evidence: {grades: [case-report, cohort, trial, review]}        # words of whoever wrote the data
      trust:    {grades: [low, middle, high], thresholds: [0.3, 0.7]}  # low below 0.3, middle from 0.3, high from 0.7
    attenuate:                                                         # in any order
      - {class: "medical/**", measure: evidence, grade: [case-report, cohort], factor: 0.25}
      - {class: "**", measure: trust, grade: low, region: head, factor: 0}

A row's weight is the rules' times the least factor of what covers its cell. A factor is at most 1, so that an
attenuation lowers a weight and never lifts one, and nothing is admitted by it; what it leaves without a weight in any
region is rejected. Two attenuations can't contradict each other, and one more only ever lowers.

A row's grades are measured once, by `Grading.grade_of` or by whoever knows them, and are signed with its shard
(`grades` of `write_dataset`). A row of which something wasn't measured counts there as the grade that is
attenuated most.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from numbers import Real
from typing import Annotated, NamedTuple, TypeGuard

from pydantic import Field, model_validator

from cosmati.routing.selectors import Names, RegionName, Strict

MAX_KINDS = 1 << 12
"""Bands times grades that a policy may tell apart: each class has a row for each of them."""
Grades = tuple[tuple[str, str], ...]
"""Grading and grade, in the order of measures' names; the grade is empty where it wasn't measured."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Grading(Strict):
    """Something that was measured of rows, and the grades that it has.

    Args:
        grades: their names; where there are thresholds, from the lowest.
        thresholds: between the grades; without them grades are words that whoever writes the data gives.
    """

    grades: Annotated[tuple[RegionName, ...], Field(min_length=1, max_length=MAX_KINDS)]
    thresholds: tuple[Number, ...] | None = None

    @model_validator(mode="after")
    def _sound(self) -> Grading:
        if len(set(self.grades)) < len(self.grades):
            msg = "a grade is named twice"
            raise ValueError(msg)
        if self.thresholds is not None and len(self.thresholds) != len(self.grades) - 1:
            wanted = len(self.grades) - 1
            msg = f"{len(self.grades)} grades need {wanted} thresholds between them, not {len(self.thresholds)}"
            raise ValueError(msg)
        if any(low >= high for low, high in pairwise(self.thresholds or ())):
            msg = "thresholds go up from grade to grade"
            raise ValueError(msg)
        return self

    def grade_of(self, value: float) -> str:
        """Return the grade that a measured value has.

        Raises:
            ValueError: it's no number, or the grades have no thresholds.
        """
        if self.thresholds is None or math.isnan(value):
            what = "has no thresholds: its grades are words" if self.thresholds is None else "can't grade what is NaN"
            msg = f"The measure with the grades {', '.join(self.grades)} {what}. Name the grade, or leave it out."
            raise ValueError(msg)
        return self.grades[bisect_right(self.thresholds, value)]

    def read(self, value: object) -> str:
        """Return the grade that a field of a row says: one of the words, or a number between thresholds.

        Raises:
            ValueError: it's neither, or it isn't finite.
        """
        if isinstance(value, str) and value in self.grades:
            return value
        if self.thresholds is not None and is_measured(value):
            return self.grade_of(float(value))
        what = "none of" if self.thresholds is None else "neither a finite number nor one of"
        raise ValueError(f"{value!r:.60} is {what} the grades {', '.join(self.grades)}")


def is_measured(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that can stand between thresholds."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


class Attenuation(Strict):
    """By how much rows of some grades teach less: a factor from 0 to 1."""

    classes: Annotated[Names, Field(alias="class", min_length=1)]
    measure: RegionName
    grade: Annotated[Names, Field(min_length=1)]
    region: Annotated[Names, Field(min_length=1)] = ("*",)
    phase: Annotated[Names, Field(min_length=1)] = ("*",)
    factor: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]

    def __str__(self) -> str:
        axes = [("class", self.classes), (self.measure, self.grade), ("region", self.region), ("phase", self.phase)]
        named = [f"{axis} {' | '.join(names)}" for axis, names in axes if names != ("*",)]
        return f"{', '.join(named)}: times {self.factor:g}"


class RowKind(NamedTuple):
    """Rows of one class that a policy treats alike: of one band, and of one grade of each measure."""

    band: str = ""
    grades: Grades = ()

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.band, *(f"{name} {grade or UNMEASURED}" for name, grade in self.grades))))


UNMEASURED = "unmeasured"
"""What a grade is called in words where there's none."""


def kinds_of(bands: Sequence[str], measures: Mapping[str, Grading]) -> tuple[RowKind, ...]:
    """Return all kinds: bands from the lowest, and in each the grades, what wasn't measured first."""
    axes = [[(name, grade) for grade in ("", *measures[name].grades)] for name in sorted(measures)]
    return tuple(RowKind(band, grades) for band in bands for grades in product(*axes))
