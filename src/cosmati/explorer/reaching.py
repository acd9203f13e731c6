"""Who reaches a quality first, by the points of a cloud: read off each arm's own curve, and compared within a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median_low

import numpy as np

from cosmati.store.tradeoffs import TradeoffPoint
from cosmati.study.interpolation import MonotoneCubic

_Need = tuple[float, bool]
"""Where a curve first has the quality, infinity where it doesn't, and whether that is a bound."""


@dataclass(frozen=True)
class Reached:
    """An arm that reaches the quality.

    Attributes:
        arm: Its name.
        key: Of one of its runs.
        is_baseline: Whether it's its study's.
        needs: Where its curve first has the quality.
        is_bound: Whether it needs at most that: its smallest budget is as good already.
        ratio: The baseline's need over its own, None where there's none.
        ratio_sign: `≥` or `≤` where the ratio is a bound, empty where it's read off.
        why: Why there's no ratio, empty where there is one.
        lost: How many of its runs diverged or failed, in words; empty where none did.
        is_lost: Whether too many did where it's read off.
    """

    arm: str
    key: str
    is_baseline: bool
    needs: float
    is_bound: bool
    ratio: float | None
    ratio_sign: str
    why: str
    lost: str
    is_lost: bool


@dataclass(frozen=True)
class ReachedStudy:
    """Those of one study that reach the quality, the first first, and the arms that don't; no study: runs alone.

    Those of which too many runs are lost come last.
    """

    path: str
    study: str
    hardware: str
    reached: tuple[Reached, ...]
    not_reached: tuple[str, ...]


@dataclass(frozen=True)
class _ArmCurve:
    path: str
    points: tuple[TradeoffPoint, ...]

    def loses_near(self, needs: float) -> bool:
        """Whether too many runs are lost at the budgets between which the curve is at `needs`.

        As `cosmati.study.divergence.diverges_near` has it.
        """
        if not self.points[0].losses:
            return False
        after = next((k for k, one in enumerate(self.points) if one.position > needs * (1 - 1e-6)), -1)
        is_at = after == 0 or math.isclose(self.points[after].position, needs, rel_tol=1e-6)
        ends = [self.points[after].budget or 0.0, self.points[after if is_at else after - 1].budget or 0.0]
        return self.points[0].loses(min(ends), max(ends))

    @property
    def lost(self) -> str:
        """How many runs of the arm diverged or failed, in words; empty where none did."""
        losses = self.points[0].losses
        return lost_text(sum(lost for _, lost, _ in losses), sum(total for _, _, total in losses))


def lost_text(lost: int, total: int) -> str:
    """Return how many runs diverged or failed, in words; empty where none did."""
    return f"{lost} of {total} runs diverged or failed" if lost else ""


def line_range(points: Sequence[TradeoffPoint]) -> tuple[float, float] | None:
    """Return the lowest and highest quality; None where no line can be drawn between them."""
    if not points or points[0].higher_is_better is None:
        return None
    low, high = min(one.quality for one in points), max(one.quality for one in points)
    return (low, high) if low < high else None


def usual_line(points: Sequence[TradeoffPoint]) -> float:
    """Return where the quality line lies at first: at the middle one of the baselines' bests, or of all arms'."""
    best = max if points[0].higher_is_better else min
    of_arms = [best(one.quality for one in curve.points) for curve in _curves(points) if curve.points[0].is_baseline]
    return median_low(of_arms or [best(one.quality for one in curve.points) for curve in _curves(points)])


def who_reaches(points: Sequence[TradeoffPoint], quality: float) -> tuple[ReachedStudy, ...]:
    """Return by study which arms reach a quality, and how much sooner than that study's baseline.

    Curves are those of the study's own page: monotone cubics through the means of budgets, over the logarithm of the
    axis. Nothing is extrapolated. Studies with an arm that gets there come first, runs by themselves last.

    Args:
        points: ordered by position.
        quality: that is to be reached.
    """
    if not points or points[0].higher_is_better is None:
        return ()
    curves = _curves(points)
    needs = _needs(curves, quality, 1.0 if points[0].higher_is_better else -1.0)
    found = []
    by_study = sorted(zip(curves, needs, strict=True), key=lambda one: _study_of(one[0]))
    for (study, path), group in groupby(by_study, key=lambda one: _study_of(one[0])):
        arms = list(group)
        base = next((one for one in arms if one[0].points[0].is_baseline), None)
        reached = [_reached(curve, need, base, has_study=bool(study)) for curve, need in arms if need[0] < math.inf]
        short = tuple(
            curve.points[0].arm + (f" ({curve.lost})" if curve.lost else "")
            for curve, need in arms
            if need[0] == math.inf
        )
        hardware = ", ".join(sorted({curve.points[0].hardware for curve, _ in arms} - {""}))
        first = sorted(reached, key=lambda one: (one.is_lost, one.needs))
        found.append(ReachedStudy(path, study, hardware, tuple(first), short))
    return tuple(sorted(found, key=lambda one: (not one.reached, not one.study)))


def _study_of(curve: _ArmCurve) -> tuple[str, str]:
    """Return what a curve is compared within; runs by themselves stand together, and aren't."""
    study = curve.points[0].study
    return study, curve.path if study else ""


def _curves(points: Sequence[TradeoffPoint]) -> list[_ArmCurve]:
    found: dict[tuple[str, str], list[TradeoffPoint]] = {}
    for one in points:
        found.setdefault((one.path, one.arm), []).append(one)
    return [_ArmCurve(path, tuple(group)) for (path, _), group in found.items()]


def _needs(curves: Sequence[_ArmCurve], quality: float, sign: float) -> list[_Need]:
    """Return where each curve first reaches the quality, infinity where it doesn't, and whether that is a bound."""
    needs: dict[int, _Need] = {}
    by_size = sorted(range(len(curves)), key=lambda place: len(curves[place].points))
    for size, group in groupby(by_size, key=lambda place: len(curves[place].points)):
        places = list(group)
        x = np.log([[one.position for one in curves[place].points] for place in places])
        y = sign * np.array([[one.quality for one in curves[place].points] for place in places])
        at = np.exp(MonotoneCubic(x, y).first_reaching(np.full(len(places), sign * quality)))
        is_bound = y[:, 0] > sign * quality
        if size == 1:
            is_bound = y[:, 0] >= sign * quality
        else:
            is_bound |= (y[:, 0] >= sign * quality) & (y[:, 1] <= y[:, 0])
        needs |= {place: (float(at[k]), bool(is_bound[k])) for k, place in enumerate(places)}
    return [needs[place] for place in range(len(curves))]


def _reached(curve: _ArmCurve, need: _Need, base: tuple[_ArmCurve, _Need] | None, *, has_study: bool) -> Reached:
    one = curve.points[0]
    ratio, sign, why = None, "", ""
    if one.is_baseline:
        why = "the baseline"
    elif not has_study:
        why = "no study, so not compared"
    elif base is None:
        why = "the baseline isn't among these runs"
    elif base[1][0] == math.inf:
        why = "the baseline doesn't reach it"
    elif base[1][1] and need[1]:
        why = "both reach it at their smallest budget"
    else:
        ratio, sign = base[1][0] / need[0], "≥" if need[1] else "≤" if base[1][1] else ""
        # Those that didn't diverge flatter the faster of the two.
        whose, faster, at = ("its", curve, need[0]) if ratio > 1 else ("the baseline's", base[0], base[1][0])
        if faster.loses_near(at):
            ratio, sign, why = None, "", f"too many of {whose} runs diverged or failed there"
    return Reached(one.arm, one.key, one.is_baseline, *need, ratio, sign, why, curve.lost, curve.loses_near(need[0]))
