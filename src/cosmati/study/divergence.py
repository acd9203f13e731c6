"""Runs that diverged, and seeds that are left out: what a comparison doesn't rest on, and may be flattered by."""

from __future__ import annotations

import math

from cosmati.records.study import StudyRecord
from cosmati.study.curves import Axis, runs_of, seeds_of, tradeoff_curve
from cosmati.study.kept import kept

MOST_DIVERGED = 0.1
"""Share of an arm's runs, near where it's read off, beyond which it isn't told faster."""


@kept(64)  # asked at each position of a quality line
def num_diverged(study: StudyRecord, arm: str) -> tuple[int, int]:
    """Return how many runs of an arm have no finite quality, and how many it has."""
    runs = runs_of(study, arm)
    return sum(not math.isfinite(run.final.quality) for run in runs), len(runs)


def diverges(study: StudyRecord, arm: str) -> bool:
    """Whether more than a tenth of an arm's runs diverged."""
    diverged, total = num_diverged(study, arm)
    return diverged > MOST_DIVERGED * total


def diverges_near(study: StudyRecord, arm: str, needs: float, axis: Axis) -> bool:
    """Whether more than a tenth of an arm's runs diverged at the budgets between which its curve is at `needs`.

    A budget whose runs all diverged isn't on the curve, and counts where it lies between two that are.
    """
    if not num_diverged(study, arm)[0]:
        return False
    points = tradeoff_curve(study, arm, axis=axis).points
    places = [point.position.value for point in points]
    after = next((k for k, place in enumerate(places) if place > needs * (1 - 1e-6)), len(points) - 1)
    is_at = after == 0 or math.isclose(places[after], needs, rel_tol=1e-6)
    ends = points[after].budget, points[after if is_at else after - 1].budget
    near = [run for run in runs_of(study, arm) if min(ends) <= run.budget <= max(ends)]
    return sum(not math.isfinite(run.final.quality) for run in near) > MOST_DIVERGED * len(near)


def left_out(study: StudyRecord, arm: str) -> tuple[int, int]:
    """Return how many seeds a comparison of `arm` leaves out, and how many there are; (0, n) where none are shared.

    It rests on seeds that the arm and the baseline have both finished at all of their budgets.
    """
    own, base = ({run.seed for run in runs_of(study, name)} for name in (arm, study.baseline_arm))
    if not own & base:
        return 0, len(own)
    return len(own | base) - len(own & base & seeds_of(study, arm)), len(own | base)


def no_whole_seed(study: StudyRecord, arm: str) -> str:
    """Return why arms with finite runs can't be compared, to end a sentence; empty where one has none."""
    arms = [num_diverged(study, name) for name in (study.baseline_arm, arm)]
    if any(diverged == total for diverged, total in arms):
        return ""
    return ": no seed has a finite quality at all of their budgets"
