"""Quality against time or cost over all studies of a store: means over seeds, and who is on the frontier. In SQL."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from cosmati.store.filters import RunFilter
from cosmati.store.index import RunIndex

CostAxis = Literal["seconds", "steps", "rows", "tokens", "flops", "cost"]
COST_AXES: tuple[CostAxis, ...] = ("seconds", "steps", "rows", "tokens", "flops", "cost")


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
            None.
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
        chosen: which runs; of runs of several measures only those of the most common one are taken.
        axis: what a point takes.
        price_per_hour: for the axis `cost`; None takes what the runs' own records say.
    """
    names = quality_names(index, chosen)
    if not names:
        return []
    wanted = chosen.exact.get("quality_name") or (names[0][0],)
    where, values = replace(chosen, exact={**chosen.exact, "quality_name": wanted[:1]}).where()
    is_priced = axis == "cost" and price_per_hour is not None
    x = "seconds / 3600 * ?" if is_priced else axis
    prices = [price_per_hour] * 2 if is_priced else []
    sql = f"""
        SELECT path, max(study), arm, max(is_baseline), budget, max(hardware), count(*) AS n, exp(avg(ln({x}))) AS x,
            avg(quality) AS y, avg(quality * quality) - avg(quality) * avg(quality), min(key), max(methods),
            max(recipe), avg(higher_is_better)
        FROM runs WHERE {where} AND quality IS NOT NULL AND {x} > 0
        GROUP BY path, arm, budget ORDER BY x, y
    """
    # The parameters in the order of their marks.
    asked = (sql, *prices[:1], *values, *prices[1:])
    return index.kept(("points", *asked), lambda: _points(index.query(sql, asked[1:])))


def _points(rows: list[tuple[Any, ...]]) -> list[TradeoffPoint]:
    said = {row[-1] for row in rows if row[-1] is not None}
    # Nobody says which way it points, or they say different things: no frontier.
    sign = None if len(said) != 1 else 1 if said.pop() > 0.5 else -1
    on_frontier = _frontier([(row[7], sign * row[8]) for row in rows]) if sign else set()
    methods_of = {text: tuple(json.loads(text)) for text in {row[11] for row in rows}}
    return [
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
            # A spread below the rounding of its two squares is none.
            error=(max(spread - 1e-15 * quality * quality, 0.0) / (n - 1)) ** 0.5 if n > 1 else None,
            key=key,
            methods=methods_of[methods],
            recipe=recipe,
            higher_is_better=None if sign is None else sign > 0,
            is_on_frontier=place in on_frontier,
        )
        for place, (
            path,
            study,
            arm,
            is_baseline,
            budget,
            hardware,
            n,
            position,
            quality,
            spread,
            key,
            methods,
            recipe,
            _,
        ) in enumerate(rows)
    ]


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
