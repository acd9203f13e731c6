"""A search as it's asked for: how hard, of which arms, over what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cosmati.errors import PlanError
from cosmati.records.study import settings_key
from cosmati.study.measured import Run
from cosmati.study.points import Dimension, PointSettings, SearchSpace

Rungs = Sequence[tuple[float, int]]
"""Budgets, as shares of the full one, and how many points are run at each."""


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """How hard each arm is searched: the same for all.

    Args:
        rungs: share of the full budget and number of points that are run at it; the first number is that of the
            points, of which the best go on to the next share.
        extra_rungs: the same of each further round, which follows where a chosen point lies at an edge.
        max_rounds: most of those further rounds.
        near_rungs: the same of a last round, of points near the chosen one; none where it's empty.
        near: how far those points lie from it at most, as a share of each range.
        seeds: of the runs, a run each; keep them apart from those that a study reports.
        points_seed: of the quasi-random points.
    """

    rungs: tuple[tuple[float, int], ...] = ((0.25, 16), (0.5, 8), (1.0, 3))
    extra_rungs: tuple[tuple[float, int], ...] = ((0.25, 8), (0.5, 4), (1.0, 2))
    max_rounds: int = 2
    near_rungs: tuple[tuple[float, int], ...] = ()
    near: float = 0.15
    seeds: tuple[int, ...] = (100,)
    points_seed: int = 0

    def __post_init__(self) -> None:
        """Refuse rungs whose budgets don't grow or whose points do."""
        ladders = {"rungs": self.rungs, "extra_rungs": self.extra_rungs, "near_rungs": self.near_rungs or self.rungs}
        for name, rungs in ladders.items():
            budgets, counts = [budget for budget, _ in rungs], [count for _, count in rungs]
            is_ladder = budgets == sorted(set(budgets)) and counts == sorted(counts, reverse=True)
            if not rungs or not is_ladder or budgets[0] <= 0 or counts[-1] < 1:
                msg = f"{name} {rungs} is no ladder: let budgets grow from rung to rung, and points not."
                raise PlanError(msg)
        ends = {name: rungs[-1][0] for name, rungs in ladders.items()}
        if len(set(ends.values())) > 1:
            msg = f"{', '.join(f'{name} end at budget {end:g}' for name, end in ends.items())}: let all end at 1."
            raise PlanError(msg)
        if not 0 < self.near <= 1:
            msg = f"near is {self.near:g}: it's a share of each range, above 0 and at most 1."
            raise PlanError(msg)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or self.max_rounds < 0:
            msg = f"seeds {self.seeds} and max_rounds {self.max_rounds}: give seeds, each once, and 0 rounds or more."
            raise PlanError(msg)


@dataclass(frozen=True, kw_only=True)
class SearchedArm:
    """One way of training whose settings are searched.

    Args:
        start: makes the run for settings, a budget and a seed.
        dimensions: what is searched. Those of the same name in several arms are the same.
        recipe_text: all that says what the arm does besides; a finished run counts only for an equal text.
        known: settings known to be good; they're the first points.
        by_hand: about how many runs by hand it took to find these; 0 where nobody counted.
    """

    start: Callable[[PointSettings, float, int], Run]
    dimensions: Sequence[Dimension]
    recipe_text: str
    known: Sequence[PointSettings] = ()
    by_hand: int = 0


def check_search(arms: Mapping[str, SearchedArm], plan: SearchPlan) -> None:
    """Refuse ranges that don't match, and known settings that don't fit."""
    seen: dict[str, tuple[str, Dimension]] = {}
    for name, arm in arms.items():
        names = [one.name for one in arm.dimensions]
        if not names or len(set(names)) != len(names):
            msg = f"The dimensions of {name!r} are {names}: give some, each once."
            raise PlanError(msg)
        for one in arm.dimensions:
            other, same = seen.setdefault(one.name, (name, one))
            if one != same:
                msg = f"{other!r} and {name!r} search {one.name!r} over different ranges: {same}, {one}."
                raise PlanError(msg)
        if len(arm.known) > plan.rungs[0][1]:
            msg = f"{name!r} has {len(arm.known)} known settings and the plan {plan.rungs[0][1]} points: give no more."
            raise PlanError(msg)
        known = [settings_key(SearchSpace(tuple(arm.dimensions)).as_settings(one)) for one in arm.known]
        if len(set(known)) != len(known):
            msg = f"{name!r} has a known setting twice. Give each once."
            raise PlanError(msg)
