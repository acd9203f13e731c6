"""Tradeoff curves of a study: what quality an arm reaches for what time, CPU time, steps, rows, tokens or FLOPs.

An arm's curve joins the mean final qualities of its budgets, each a whole run with its schedule dilated.
Between two budgets quality is a monotone cubic of the logarithm of the axis (`MonotoneCubic`). The *envelope* is the
best quality on that curve for at most that much. Nothing is extrapolated: a quality above the envelope is never
reached, and one below the smallest budget gives a bound only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cosmati.errors import RunError
from cosmati.records.study import EvaluationPoint, StudyRecord, StudyRun
from cosmati.study.interpolation import MonotoneCubic
from cosmati.study.statistics import (
    Array,
    Estimate,
    Freedom,
    draw_cost_errors,
    draw_means,
    mean_estimate,
    position_estimate,
    whole_seeds,
)

Axis = Literal["seconds", "cpu_seconds", "step", "rows", "tokens", "flops"]
AXES: tuple[Axis, ...] = ("seconds", "cpu_seconds", "step", "rows", "tokens", "flops")


@dataclass(frozen=True)
class CurvePoint:
    """Mean of an arm's runs at one budget over its seeds (`seeds_of`), a geometric one of positions.

    `num_diverged` of all its runs there have no finite quality and are in no mean.
    """

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

    @cached_property
    def cubic(self) -> MonotoneCubic:
        """The curve through the points, of quality over the logarithm of the position. There must be a point."""
        logs = [math.log(point.position.value) for point in self.points]
        return MonotoneCubic(np.array([logs]), np.array([[point.quality.value for point in self.points]]))

    def line(self, num_between: int = 12) -> tuple[list[float], list[float]]:
        """Return positions and qualities to draw the curve by: its points, and so many places between each two."""
        logs = self.cubic.x[0]
        between = [np.linspace(*ends, num_between + 1, endpoint=False) for ends in itertools.pairwise(logs)]
        places = np.concatenate([*between, logs[-1:]])
        return np.exp(places).tolist(), self.cubic.at(places[None])[0].tolist()


@dataclass(frozen=True)
class Means:
    """Mean positions and qualities of an arm, measured (row 0) and drawn (`Draws`), each row ordered by position.

    Both have the shape (rows, budgets). Positions are geometric means, by profiled costs where there are any. Quality
    is signed so that higher is better. A budget without a mean has an infinite position and a quality of minus
    infinity. `n` counts the seeds behind them.
    """

    position: Array
    quality: Array
    n: int
    freedom: Freedom

    @cached_property
    def cubics(self) -> MonotoneCubic:
        """The rows' curves over the logarithm of the position, through the budgets that have a mean; one at least."""
        known = np.isfinite(self.position[0])
        return MonotoneCubic(np.log(self.position[:, known]), self.quality[:, known])


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
    """Return the axes along which every run that ended with a finite quality has a positive position."""
    arms = {run.arm for run in study.runs if math.isfinite(run.final.quality)}
    return tuple(axis for axis in AXES if arms and is_counted(study, arms, axis))


def is_counted(study: StudyRecord, arms: Collection[str], axis: Axis) -> bool:
    """Whether all runs of some arms that ended with a finite quality have a positive position on an axis."""
    counted = "step" if axis == "seconds" and study.costs else axis
    runs = [run for run in study.runs if run.arm in arms and math.isfinite(run.final.quality)]
    return all(getattr(run.final, counted, 0) > 0 for run in runs)


def profiled_costs(study: StudyRecord) -> dict[str, Array] | None:
    """Return the logarithm of each arm's seconds a step in each turn, None where no costs were profiled.

    A turn in which an arm is lacking, such as the last one of a study that was killed, is left out. An arm of which no
    run went well need have no profile: it has no place on the axis.

    Raises:
        RunError: an arm has no profile or several in one turn, a profile has no steps or no seconds, or fewer than two
            turns are whole.
    """
    if not study.costs:
        return None
    wrong = [cost for cost in study.costs if cost.steps <= 0 or not 0 < cost.seconds < math.inf]
    found = {(cost.arm, cost.turn): cost for cost in study.costs}
    placed = {run.arm for run in study.runs if math.isfinite(run.final.quality)}
    profiled = {arm for arm, _ in found}
    arms = [arm.name for arm in study.arms if arm.name in placed | profiled]
    missing = sorted(set(arms) - profiled)
    if wrong or missing or len(found) < len(study.costs):
        raise RunError(
            f"The cost profiles of study {study.name!r} don't fit its arms: arms without any: {missing}, profiles "
            f"without steps or seconds: {len(wrong)}, beyond one a turn: {len(study.costs) - len(found)}. Times of "
            f"arms can be compared only where all are profiled alike. Profile every arm once in each turn."
        )
    turns = sorted({turn for _, turn in found})
    whole = [turn for turn in turns if all((arm, turn) in found for arm in arms)]
    if len(whole) < 2:
        raise RunError(
            f"Study {study.name!r} has {len(whole)} turns in which all arms were profiled. A cost's error shows in two "
            f"or more. Profile further turns."
        )
    return {arm: np.log([found[arm, turn].seconds / found[arm, turn].steps for turn in whole]) for arm in arms}


def mean_costs(study: StudyRecord, axis: Axis) -> dict[str, float]:
    """Return each arm's profiled seconds a step; none along other axes than time, or where none were profiled."""
    costs = profiled_costs(study) if axis == "seconds" else None
    return {arm: math.exp(float(logs.mean())) for arm, logs in (costs or {}).items()}


def position_of(run: StudyRun, point: EvaluationPoint, axis: Axis, costs: Mapping[str, float]) -> float:
    """Return where a point of a run lies on an axis.

    By profiled costs (`mean_costs`) the run took its steps at its arm's cost, and a point on its way has the share of
    that time that it had of the run's own.
    """
    if axis != "seconds" or run.arm not in costs:
        place: float = getattr(point, axis)
        return place
    own, steps = run.final.seconds, run.final.step
    return costs[run.arm] * (steps * point.seconds / own if own > 0 else point.step)


def tradeoff_curve(study: StudyRecord, arm: str, *, axis: Axis = "seconds") -> Curve:
    """Return the curve of `arm`: for each budget the mean position and mean quality with their intervals."""
    runs, seeds = runs_of(study, arm), seeds_of(study, arm)
    costs = profiled_costs(study) if axis == "seconds" else None
    measured: Axis = "step" if costs else axis
    points = []
    for budget in sorted({run.budget for run in runs}):
        of_budget = [run for run in runs if run.budget == budget]
        finite = [run for run in of_budget if math.isfinite(run.final.quality)]
        kept = [run for run in finite if run.seed in seeds]
        if kept:
            counts = [_count(study, run, measured) for run in kept]
            position = position_estimate(
                counts, () if costs is None or arm not in costs else np.exp(costs[arm]).tolist()
            )
            quality = mean_estimate([run.final.quality for run in kept])
            points.append(CurvePoint(budget, position, quality, len(kept), len(of_budget) - len(finite)))
    return Curve(arm, axis, tuple(sorted(points, key=lambda point: point.position.value)))


def seeds_of(study: StudyRecord, arm: str) -> frozenset[int]:
    """Return the seeds by which `arm` stands: those that it has finished at all of its budgets.

    An arm that shares seeds with the baseline stands by those that both have finished, as in `paired_means`. Where
    there are none, all its seeds are there to be drawn, and nothing is compared.
    """
    own, base = ({run.seed for run in runs_of(study, name)} for name in (arm, study.baseline_arm))
    names = (study.baseline_arm, arm) if own & base else (arm,)
    seeds = sorted(own & base or own)
    if not seeds:
        return frozenset()
    whole = whole_seeds(np.concatenate([_tables(study, name, seeds, None) for name in names]))
    return frozenset(seed for seed, is_whole in zip(seeds, whole, strict=True) if is_whole) or frozenset(own)


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
    """Return the means of several arms, drawn together over the seeds that they share and have all finished.

    A seed is finished where each arm has a finite quality at all of its own budgets. Arms that share no seed, such as
    an A/A pair, are drawn independently, each over its own; n and freedom are then the smaller ones.
    Profiled costs are paired by turn, whatever the seeds.
    """
    costs = profiled_costs(study) if axis == "seconds" else None
    measured: Axis = "step" if costs else axis
    seeds = [{run.seed for run in runs_of(study, arm)} for arm in arms]
    shared = sorted(set.intersection(*seeds))
    if shared:
        draws = draw_means(np.concatenate([_tables(study, arm, shared, measured) for arm in arms]))
        n, freedom = draws.n, draws.freedom
        rows = [draws.values[:, place : place + 2] for place in range(0, 2 * len(arms), 2)]
    else:
        alone = [
            draw_means(_tables(study, arm, sorted(own), measured), stream=1 + index)
            for index, (arm, own) in enumerate(zip(arms, seeds, strict=True))
        ]
        least = min(alone, key=lambda found: found.n)
        n, freedom = least.n, least.freedom
        rows = [found.values for found in alone]
    if n < 2:
        rows = [values[:1] for values in rows]
    if costs:
        num_turns = len(next(iter(costs.values())))
        logs = np.stack([costs.get(arm, np.zeros(num_turns)) for arm in arms])
        rows = _with_costs(rows, logs)
        freedom = freedom._replace(cost=logs.shape[1] - 1)
    return tuple(_ordered(values, n, freedom) for values in rows)


def _tables(study: StudyRecord, arm: str, seeds: Sequence[int], axis: Axis | None) -> Array:
    """Return logarithms of positions, and qualities, of an arm's runs: shape (2, seeds, budgets); no axis is 0."""
    runs = [run for run in runs_of(study, arm) if run.seed in seeds and math.isfinite(run.final.quality)]
    budgets = sorted({run.budget for run in study.runs})
    tables = np.full((2, len(seeds), max(1, len(budgets))), np.nan)
    sign = 1.0 if study.higher_is_better else -1.0
    for run in runs:
        cell = seeds.index(run.seed), budgets.index(run.budget)
        tables[(0, *cell)] = math.log(_count(study, run, axis)) if axis else 0.0
        tables[(1, *cell)] = sign * run.final.quality
    return tables


def _count(study: StudyRecord, run: StudyRun, axis: Axis) -> float:
    count = float(getattr(run.final, axis))
    if count <= 0:
        counted = ", ".join(available_axes(study)) or "none"
        msg = f"Arm {run.arm!r} has runs that don't say how much they took of {axis}. What all runs say: {counted}."
        raise RunError(msg)
    return count


def _with_costs(arms: Sequence[Array], logs: Array) -> list[Array]:
    """Add mean profiled costs to the arms' positions, and their error as a kind of draws and to the draws of all.

    Args:
        arms: of each the logarithms of positions, and qualities, measured and drawn: shape (rows, 2, budgets).
        logs: logarithms of costs, shape (arms, turns).
    """
    num_draws = len(arms[0]) - 1
    means = logs.mean(axis=1)
    errors = draw_cost_errors(logs, num_draws) if num_draws else np.zeros((0, len(arms)))
    found = []
    for index, rows in enumerate(arms):
        measured, drawn = rows[:1], rows[1:]
        values = np.concatenate([measured, drawn, np.repeat(measured, num_draws, axis=0), drawn])
        values[:, 0] += means[index]
        values[1 + num_draws :, 0] += np.tile(errors[:, index], 2)[:, None]
        found.append(values)
    return found


def _ordered(rows: Array, n: int, freedom: Freedom) -> Means:
    """Take an arm's logarithms of positions, and qualities, in the order of the positions."""
    position, quality = rows[:, 0], rows[:, 1]
    absent = np.isnan(position)
    position, quality = np.where(absent, np.inf, np.exp(position)), np.where(absent, -np.inf, quality)
    order = np.argsort(position, axis=1, kind="stable")
    position, quality = (np.take_along_axis(values, order, axis=1) for values in (position, quality))
    return Means(position, quality, n, freedom)


def reach(means: Means, target: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return where each row's envelope first reaches its target, and whether that is an upper bound only.

    Infinite where the target is never reached; a bound where the smallest budget is already better than the target, or
    as good and the next one no better: what has come to its best may have been there before.
    """
    num_budgets = np.isfinite(means.position[0]).sum()
    if num_budgets == 0:
        return np.full(len(target), np.inf), np.zeros(len(target), dtype=np.bool_)
    first = means.quality[:, 0]
    is_past = (first >= target) & (means.quality[:, 1] <= first) if num_budgets > 1 else np.zeros(len(target), np.bool_)
    with np.errstate(over="ignore"):
        return np.exp(means.cubics.first_reaching(target)), (first > target) | is_past


def best_within(means: Means, position: Array) -> Array:
    """Return each row's envelope at `position`: the best quality for at most that much, or minus infinity."""
    before = np.where(means.position <= position[:, None], means.quality, -np.inf).max(axis=1)
    if not np.isfinite(before).any():
        return np.asarray(before, dtype=np.float64)
    there = means.cubics.at(np.log(position)[:, None])[:, 0]
    return np.asarray(np.where(np.isfinite(before), np.maximum(before, there), before), dtype=np.float64)
