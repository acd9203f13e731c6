"""Quality against time or cost over all studies of a store: means over seeds, and who is on the frontier. In SQL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from cosmati.store.filters import RunFilter
from cosmati.store.index import RunIndex

CostAxis = Literal["seconds", "steps", "rows", "tokens", "flops", "cost"]
COST_AXES: tuple[CostAxis, ...] = ("seconds", "steps", "rows", "tokens", "flops", "cost")
OUTCOMES = ("quality", *COST_AXES)
"""What runs come to: a limit of it that let single seeds through would choose the lucky ones."""
_LOST = "('diverged', 'failed')"
LostRuns = tuple[float, int, int]
"""A budget, how many of an arm's runs diverged or failed there, and how many it has."""
MOST_LOST = 0.1
"""Share of the runs, as in `cosmati.study.divergence`."""


@dataclass(frozen=True)
class TradeoffPoint:
    """Runs of one arm at one budget, or a run by itself.

    Attributes:
        path: Folder of the study or run.
        study: Its name, empty for a run by itself.
        arm: Of the study, or the recipe.
        is_baseline: Whether it's its study's baseline.
        budget: Share of the full budget, None for a run by itself.
        hardware: In words.
        n: Runs behind it.
        position: Geometric mean along the axis.
        quality: Mean.
        error: Standard error of the mean, None for one run.
        key: Of one of the runs.
        methods: Names of its methods.
        recipe: Digest of the recipe of one of the runs.
        higher_is_better: Which way the quality points; None where nobody says it, or some say one and some the other.
        is_on_frontier: Whether none is as good for less, or better for as much; on none where `higher_is_better` is
            None, or where more than a tenth of its runs diverged or failed. Time has a frontier for each hardware.
        losses: Of its arm by budget, where any of its runs diverged or failed, whatever status is chosen.
    """

    path: str
    study: str
    arm: str
    is_baseline: bool
    budget: float | None
    hardware: str
    n: int
    position: float
    quality: float
    error: float | None
    key: str
    methods: tuple[str, ...]
    recipe: str
    higher_is_better: bool | None
    is_on_frontier: bool
    losses: tuple[LostRuns, ...] = ()

    @property
    def num_lost(self) -> int:
        """How many more runs of this arm and budget diverged or failed: they're in no mean."""
        return sum(lost for budget, lost, _ in self.losses if budget == self.budget)

    def loses(self, low: float | None, high: float | None) -> bool:
        """Whether more than a tenth of its arm's runs from one budget to another diverged or failed."""
        if low is None or high is None:
            return False
        near = [(lost, total) for budget, lost, total in self.losses if low <= budget <= high]
        return sum(lost for lost, _ in near) > MOST_LOST * sum(total for _, total in near)


@dataclass(frozen=True)
class LeftOut:
    """Chosen runs of a measure that are in no point.

    Attributes:
        num_lost: They diverged or failed.
        num_unknown: They don't say what they took along the axis.
        num_zero: They took nothing of it, which has no place on a logarithmic axis.
    """

    num_lost: int
    num_unknown: int
    num_zero: int


def quality_names(index: RunIndex, chosen: RunFilter) -> list[tuple[str, int]]:
    """Return what the chosen runs measure, with the number of runs, most first."""
    without = {name: values for name, values in chosen.exact.items() if name != "quality_name"}
    found = index.choices("quality_name", replace(chosen, exact=without))
    return [(str(name), num) for name, num in found if name]


def tradeoff_points(
    index: RunIndex, chosen: RunFilter, axis: CostAxis, *, price_per_hour: float | None = None
) -> list[TradeoffPoint]:
    """Return the points of all chosen runs of one quality measure, ordered by their position.

    Args:
        index: of the store.
        chosen: which runs; of runs of several measures only those of the most common one are taken. Limits of quality
            and of what runs take choose whole points by their means.
        axis: what a point takes.
        price_per_hour: for the axis `cost`; None takes what the runs' own records say.
    """
    taken = _taken(index, chosen)
    if taken is None:
        return []
    where, values = taken.where()
    x, prices = _position(axis, price_per_hour)
    limits, ends = _limits_of_points(chosen)
    sql = f"""
        WITH chosen AS (SELECT *, {x} AS x FROM runs WHERE {where} AND quality IS NOT NULL)
        SELECT path, max(study), arm, max(is_baseline), budget, max(hardware), count(*) AS n, {_mean("x")} AS mean_x,
            {_mean("quality")} AS y, standard_error(quality), min(key), max(methods), max(recipe), avg(higher_is_better)
        FROM chosen WHERE x > 0 GROUP BY path, arm, budget HAVING {limits} ORDER BY mean_x, y
    """
    asked = (sql, *prices, *values, *ends)
    # Time on one hardware says nothing of time on another; money does, but for one price of all hardware's time.
    is_time = axis == "seconds" or bool(prices)
    return index.kept(
        ("points", is_time, *asked),
        lambda: _points(index.query(sql, asked[1:]), _losses(index, taken), is_time=is_time),
    )


def left_out(index: RunIndex, chosen: RunFilter, axis: CostAxis, *, price_per_hour: float | None = None) -> LeftOut:
    """Return how many of the runs that `tradeoff_points` is asked for are in no point, and why."""
    taken = _taken(index, chosen)
    if taken is None:
        return LeftOut(0, 0, 0)
    where, values = taken.where()
    x, prices = _position(axis, price_per_hour)
    sql = f"""
        WITH chosen AS (SELECT quality, status, {x} AS x FROM runs WHERE {where})
        SELECT total(status IN {_LOST} AND quality IS NULL), total(quality IS NOT NULL AND x IS NULL),
            total(quality IS NOT NULL AND x <= 0) FROM chosen
    """
    return LeftOut(*map(int, index.answer(sql, (*prices, *values))[0]))


def _taken(index: RunIndex, chosen: RunFilter) -> RunFilter | None:
    """Return which runs points are made of: those of one measure, without limits that are the points' own."""
    names = quality_names(index, chosen)
    if not names:
        return None
    wanted = chosen.exact.get("quality_name") or (names[0][0],)
    least, most = ({name: end for name, end in one.items() if name not in OUTCOMES} for one in _ends(chosen))
    return replace(chosen, exact={**chosen.exact, "quality_name": wanted[:1]}, least=least, most=most)


def _ends(chosen: RunFilter) -> tuple[Mapping[str, float], Mapping[str, float]]:
    return chosen.least, chosen.most


def _position(axis: CostAxis, price_per_hour: float | None) -> tuple[str, list[float]]:
    """Return the SQL of a run's position, and its parameters."""
    if axis == "cost" and price_per_hour is not None:
        return "seconds / 3600 * ?", [price_per_hour]
    return axis, []


def _mean(column: str) -> str:
    """Return the SQL of a point's mean: geometric but for qualities. Equal values have exactly that one as their mean.

    Else what is equal would be told apart by the rounding of means over other numbers of seeds.
    """
    # In parts of 1024, which rounds nothing: a sum of the largest numbers is infinite.
    mean = "avg(quality / 1024.0) * 1024.0" if column == "quality" else f"exp(avg(ln(max({column}, 1e-300))))"
    return f"CASE WHEN min({column}) = max({column}) THEN min({column}) ELSE {mean} END"


def _limits_of_points(chosen: RunFilter) -> tuple[str, list[float]]:
    terms, values = ["1"], list[float]()
    for limits, sign in zip(_ends(chosen), (">=", "<="), strict=True):
        for name in limits.keys() & set(OUTCOMES):
            terms.append(f"{_mean(name)} {sign} ?")
            values.append(limits[name])
    return " AND ".join(terms), values


def _losses(index: RunIndex, taken: RunFilter) -> dict[tuple[str, str], tuple[LostRuns, ...]]:
    """Return by folder and arm what studies' arms lost at each budget: of all runs, whatever status is chosen."""
    without = {name: values for name, values in taken.exact.items() if name != "status"}
    where, values = replace(taken, exact=without).where()
    sql = f"""
        SELECT path, arm, budget, total(quality IS NULL), count(*) FROM runs
        WHERE kind = 'study' AND {where}
            AND (path, arm) IN (SELECT path, arm FROM runs WHERE status IN {_LOST} AND kind = 'study')
        GROUP BY path, arm, budget ORDER BY budget
    """
    found: dict[tuple[str, str], tuple[LostRuns, ...]] = {}
    for path, arm, budget, lost, total in index.query(sql, values):
        found[path, arm] = (*found.get((path, arm), ()), (budget, int(lost), total))
    return found


def _points(
    rows: list[tuple[Any, ...]], losses: Mapping[tuple[str, str], tuple[LostRuns, ...]], *, is_time: bool
) -> list[TradeoffPoint]:
    said = {row[-1] for row in rows if row[-1] is not None}
    # Nobody says which way it points, or they say different things: no frontier.
    sign = None if len(said) != 1 else 1 if said.pop() > 0.5 else -1
    methods_of = {text: tuple(json.loads(text)) for text in {row[11] for row in rows}}
    points = [
        TradeoffPoint(
            path=path,
            study=study,
            arm=arm,
            is_baseline=bool(is_baseline),
            budget=budget,
            hardware=hardware,
            n=n,
            position=position,
            quality=quality,
            error=error,
            key=key,
            methods=methods_of[methods],
            recipe=recipe,
            higher_is_better=None if sign is None else sign > 0,
            is_on_frontier=False,
            losses=losses.get((path, arm), ()),
        )
        for (
            path,
            study,
            arm,
            is_baseline,
            budget,
            hardware,
            n,
            position,
            quality,
            error,
            key,
            methods,
            recipe,
            _,
        ) in rows
    ]
    for place in _on_frontiers(points, sign, is_time=is_time) if sign else ():
        points[place] = replace(points[place], is_on_frontier=True)
    return points


def _on_frontiers(points: Sequence[TradeoffPoint], sign: int, *, is_time: bool) -> set[int]:
    """Return the places of the points on the frontier, or on that of their hardware."""
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(points):
        if not one.losses or not one.loses(one.budget, one.budget):
            groups.setdefault(one.hardware if is_time else "", []).append(place)
    return {
        places[k]
        for places in groups.values()
        for k in _frontier([(points[place].position, sign * points[place].quality) for place in places])
    }


def _frontier(points: list[tuple[float, float]]) -> set[int]:
    """Return the places of the points that no other one beats: as good for less, or better for as much.

    Args:
        points: position and quality, more of which is better, ordered by position.
    """
    found, best_before = set[int](), -math.inf
    for _, group in groupby(enumerate(points), key=lambda one: one[1][0]):
        same = list(group)
        best = max(quality for _, (_, quality) in same)
        if best > best_before:
            found |= {place for place, (_, quality) in same if quality == best}
            best_before = best
    return found
