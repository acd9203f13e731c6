"""Tradeoff curves of a study: what quality an arm reaches for what time, steps, rows, tokens or FLOPs.

An arm's curve joins the mean final qualities of its budgets, each a whole run with its schedule dilated.
Between two budgets quality is linear in the logarithm of the axis. The *envelope* is the best quality on that
line for at most that much. Nothing is extrapolated: a quality above the envelope is never reached, and one
below the smallest budget gives a bound only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cosmati.errors import RunError
from cosmati.records.study import StudyRecord, StudyRun
from cosmati.study.statistics import Array, Draws, Estimate, Freedom, draw_means, mean_estimate

Axis = Literal["seconds", "step", "rows", "tokens", "flops"]
AXES: tuple[Axis, ...] = ("seconds", "step", "rows", "tokens", "flops")


@dataclass(frozen=True)
class CurvePoint:
    """Mean of an arm's runs at one budget. `num_diverged` runs have no finite quality and are in no mean."""

    budget: float
    position: Estimate
    quality: Estimate
    n: int
    num_diverged: int


@dataclass(frozen=True)
class Curve:
    """Tradeoff curve of an arm, its points ordered by their position on the axis."""

    arm: str
    axis: Axis
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class Means:
    """Mean positions and qualities of an arm, measured (row 0) and drawn (`Draws`), each row ordered by position.

    Both have the shape (rows, budgets). Positions are geometric means. Quality is signed so that higher is better. A
    budget without a mean has an infinite position and a quality of minus infinity. `n` counts the seeds behind them.
    """

    position: Array
    quality: Array
    n: int
    freedom: Freedom


def runs_of(study: StudyRecord, arm: str) -> tuple[StudyRun, ...]:
    """Return the runs of `arm`.

    Raises:
        RunError: the study has no such arm.
    """
    if arm not in {record.name for record in study.arms}:
        names = [record.name for record in study.arms]
        raise RunError(f"Study {study.name!r} has no arm {arm!r}. Its arms are {names}.")
    return tuple(run for run in study.runs if run.arm == arm)


def available_axes(study: StudyRecord) -> tuple[Axis, ...]:
    """Return the axes along which every run has a positive position."""
    return tuple(axis for axis in AXES if all(getattr(run.final, axis) > 0 for run in study.runs))


def tradeoff_curve(study: StudyRecord, arm: str, *, axis: Axis = "seconds") -> Curve:
    """Return the curve of `arm`: for each budget the mean position and mean quality with their intervals."""
    runs = runs_of(study, arm)
    points = []
    for budget in sorted({run.budget for run in runs}):
        finals = [run.final for run in runs if run.budget == budget]
        kept = [final for final in finals if math.isfinite(final.quality)]
        if kept:
            position = mean_estimate([float(getattr(final, axis)) for final in kept])
            quality = mean_estimate([final.quality for final in kept])
            points.append(CurvePoint(budget, position, quality, len(kept), len(finals) - len(kept)))
    return Curve(arm, axis, tuple(sorted(points, key=lambda point: point.position.value)))


def pareto_frontier(study: StudyRecord, *, axis: Axis = "seconds") -> tuple[tuple[str, CurvePoint], ...]:
    """Return the (arm, point) pairs that no other point beats, ordered by position.

    A point is beaten by one that is at least as good on both axes and better on one.
    """
    sign = 1 if study.higher_is_better else -1
    pairs = [(arm.name, point) for arm in study.arms for point in tradeoff_curve(study, arm.name, axis=axis).points]
    pairs.sort(key=lambda pair: (pair[1].position.value, -sign * pair[1].quality.value))
    frontier: list[tuple[str, CurvePoint]] = []
    for arm, point in pairs:
        if frontier:
            last = frontier[-1][1]
            is_tie = (last.position.value, last.quality.value) == (point.position.value, point.quality.value)
            if not is_tie and sign * point.quality.value <= sign * last.quality.value:
                continue
        frontier.append((arm, point))
    return tuple(frontier)


def paired_means(study: StudyRecord, arms: Sequence[str], *, axis: Axis = "seconds") -> tuple[Means, ...]:
    """Return the means of several arms, drawn together over the seeds that they share.

    Arms that share no seed, such as an A/A pair, are drawn independently; n and freedom are then the smaller ones.
    """
    seeds = [{run.seed for run in runs_of(study, arm)} for arm in arms]
    shared = sorted(set.intersection(*seeds))
    if shared:
        draws = [draw_means(np.concatenate([_tables(study, arm, shared, axis) for arm in arms]))] * len(arms)
        places = list(range(0, 2 * len(arms), 2))
    else:
        draws = [
            draw_means(_tables(study, arm, sorted(own), axis), stream=1 + index)
            for index, (arm, own) in enumerate(zip(arms, seeds, strict=True))
        ]
        places = [0] * len(arms)
    least = min(draws, key=lambda found: found.n)
    return tuple(_ordered(found, place, least) for found, place in zip(draws, places, strict=True))


def _tables(study: StudyRecord, arm: str, seeds: Sequence[int], axis: Axis) -> Array:
    """Return logarithms of positions, and qualities, of an arm's runs: shape (2, seeds, budgets)."""
    runs = [run for run in runs_of(study, arm) if run.seed in seeds and math.isfinite(run.final.quality)]
    if any(getattr(run.final, axis) <= 0 for run in runs):
        raise RunError(f"Arm {arm!r} has runs without a count of {axis}. Use one of {available_axes(study)}.")
    budgets = sorted({run.budget for run in study.runs})
    tables = np.full((2, len(seeds), max(1, len(budgets))), np.nan)
    sign = 1.0 if study.higher_is_better else -1.0
    for run in runs:
        cell = seeds.index(run.seed), budgets.index(run.budget)
        tables[(0, *cell)] = math.log(getattr(run.final, axis))
        tables[(1, *cell)] = sign * run.final.quality
    return tables


def _ordered(draws: Draws, place: int, least: Draws) -> Means:
    """Take an arm's rows, of which `place` is the first, in the order of their positions."""
    rows = draws.values if least.n >= 2 else draws.values[:1]
    position, quality = rows[:, place], rows[:, place + 1]
    absent = np.isnan(position)
    position, quality = np.where(absent, np.inf, np.exp(position)), np.where(absent, -np.inf, quality)
    order = np.argsort(position, axis=1, kind="stable")
    position, quality = (np.take_along_axis(values, order, axis=1) for values in (position, quality))
    return Means(position, quality, least.n, least.freedom)


def reach(means: Means, target: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return where each row's envelope first reaches its target, and whether that is an upper bound only.

    Linear in quality and in the logarithm of the position between two budgets. Infinite where the target is
    never reached; a bound where the smallest budget is already better than the target.
    """
    reached = means.quality >= target[:, None]
    index = reached.argmax(axis=1)[:, None]
    before = np.maximum(index - 1, 0)
    low, high = (np.take_along_axis(means.quality, at, axis=1)[:, 0] for at in (before, index))
    start, end = (np.take_along_axis(means.position, at, axis=1)[:, 0] for at in (before, index))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(high > low, (target - low) / (high - low), 1.0)
        share = np.where(np.isfinite(share), share, 1.0)
        position = np.exp(np.log(start) + share * (np.log(end) - np.log(start)))
    is_first = index[:, 0] == 0
    position = np.where(is_first, end, position)
    return np.where(reached.any(axis=1), position, np.inf), is_first & (high > target)


def best_within(means: Means, position: Array) -> Array:
    """Return each row's envelope at `position`: the best quality for at most that much, or minus infinity."""
    result = np.full(len(position), -np.inf)
    for row, at in enumerate(position):
        before = means.quality[row][means.position[row] <= at]
        if len(before):
            known = np.isfinite(means.position[row])
            x, y = np.log(means.position[row][known]), means.quality[row][known]
            result[row] = max(before.max(), np.interp(math.log(at), x, y))
    return result
