"""Search the settings of arms, each as hard as the others: equal numbers of points and of runs at each budget."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from cosmati.errors import RunError
from cosmati.progress import ProgressDisplay
from cosmati.records.study import SearchRecord, TrialRecord
from cosmati.study.jobs import Jobs, jobs_of
from cosmati.study.lines import LINE_VERSION, LineFile, only_one
from cosmati.study.measured import MeasuredRun, Run, measure
from cosmati.study.points import Dimension, PointSettings, SearchSpace, chosen_settings, quasi_random, settings_key
from cosmati.train.facts import describe_hardware

__all__ = ["Dimension", "PointSettings", "SearchPlan", "SearchedArm", "chosen_settings", "search_arms"]

TRIALS_FILE = "trials.jsonl"
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
                raise ValueError(msg)
        ends = {name: rungs[-1][0] for name, rungs in ladders.items()}
        if len(set(ends.values())) > 1:
            msg = f"{', '.join(f'{name} end at budget {end:g}' for name, end in ends.items())}: let all end at 1."
            raise ValueError(msg)
        if not 0 < self.near <= 1:
            msg = f"near is {self.near:g}: it's a share of each range, above 0 and at most 1."
            raise ValueError(msg)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or self.max_rounds < 0:
            msg = f"seeds {self.seeds} and max_rounds {self.max_rounds}: give seeds, each once, and 0 rounds or more."
            raise ValueError(msg)


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


@dataclass(frozen=True)
class _TrialLine:
    version: int
    digest: str
    arm: str
    trial: TrialRecord


_Key = tuple[str, int, float, int]
"""Arm, point, budget and seed of a trial."""


def search_arms(
    arms: Mapping[str, SearchedArm],
    plan: SearchPlan,
    folder: str | Path,
    *,
    quality: str,
    higher_is_better: bool,
    hardware: str | None = None,
    jobs: int = 1,
    console: Console | None = None,
) -> dict[str, SearchRecord]:
    """Search all arms by one plan: quasi-random points at a small budget, of which the best go on to larger ones.

    Where the chosen point of any arm lies at an edge that can be widened, its dimension is widened there in all arms
    that have it, and every arm gets a further, equal round of points.

    Each finished run is a line of `trials.jsonl` in the folder, so a search that was stopped goes on. A line counts
    only for the same recipe, dimensions, metric and hardware.

    Args:
        arms: by name.
        plan: how hard.
        folder: where finished runs are kept.
        quality: name of the metric that counts, on rows that the study doesn't report.
        higher_is_better: whether a higher metric is the better one.
        hardware: what it runs on, in words; None describes this machine's CPU.
        jobs: how many runs at a time; more than one are processes of their own, one thread each.
        console: where progress goes; None means standard error.

    Returns:
        For each arm all its runs, those of points that went no further too, and the chosen point. The settings of
        that one are `chosen_settings` of it.

    Raises:
        ValueError: dimensions, ranges or known settings don't fit. MissingExtraError: SciPy isn't installed.
        RunError: every run of an arm diverged at some budget, a finished line is damaged, a run failed.
    """
    _check(arms, plan)
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder), jobs_of(jobs) as workers:
        where = hardware or describe_hardware(torch.device("cpu"))
        return _Search(arms, plan, folder, (quality, higher_is_better, where), workers, console).run()


class _Search:
    """The search of all arms.

    Args:
        arms: by name.
        plan: how hard.
        folder: where finished runs are kept.
        measured: metric, whether a higher one is better, and the hardware.
        workers: carry the runs out.
        console: where progress goes.
    """

    def __init__(
        self,
        arms: Mapping[str, SearchedArm],
        plan: SearchPlan,
        folder: Path,
        measured: tuple[str, bool, str],
        workers: Jobs,
        console: Console | None,
    ) -> None:
        self._arms, self._plan, self._workers, self._console = arms, plan, workers, console
        self._quality, higher_is_better, hardware = measured
        self._sign = -1.0 if higher_is_better else 1.0
        self._spaces = {name: SearchSpace(tuple(arm.dimensions)) for name, arm in arms.items()}
        self._lines = LineFile(folder / TRIALS_FILE, _TrialLine)
        self._digests = {name: _digest(name, arm, self._quality, hardware) for name, arm in arms.items()}
        self._kept = {
            (line.digest, one.point, settings_key(one.settings), one.budget, one.seed): one
            for line in self._lines.read()
            for one in (line.trial,)
        }
        self._points: dict[str, list[PointSettings]] = {name: [] for name in arms}
        self._trials: dict[str, list[TrialRecord]] = {name: [] for name in arms}

    def run(self) -> dict[str, SearchRecord]:
        """Search round after round."""
        plan = self._plan
        self._round("round 1", plan.rungs, {})
        for number in range(1, plan.max_rounds + 1):
            chosen = self._chosen_points()
            edges = {edge for name, space in self._spaces.items() for edge in space.edges(chosen[name])}
            if not edges:
                break
            self._spaces = {name: space.widened(edges) for name, space in self._spaces.items()}
            self._round(f"round {number + 1}", plan.extra_rungs, chosen)
        if plan.near_rungs:
            self._round("near the best", plan.near_rungs, self._chosen_points(), near=plan.near)
        return {
            name: SearchRecord(space.records(), tuple(self._trials[name]), self._chosen(name), self._arms[name].by_hand)
            for name, space in self._spaces.items()
        }

    def _chosen_points(self) -> dict[str, PointSettings]:
        return {name: self._points[name][self._chosen(name)] for name in self._arms}

    def _round(
        self, label: str, rungs: Rungs, around: Mapping[str, PointSettings], *, near: float | None = None
    ) -> None:
        is_first = not next(iter(self._points.values()))
        alive = self._draw(rungs[0][1], around, near)
        total, spent = sum(budget * count for budget, count in rungs), 0.0
        with ProgressDisplay(f"search, {label}", console=self._console) as progress:
            for place, (budget, count) in enumerate(rungs):
                if place:
                    before = rungs[place - 1][0]
                    alive = {name: self._best(name, points, before)[:count] for name, points in alive.items()}
                for share, text in self._rung(alive, budget):
                    progress.update((spent + share * budget * count) / total, text)
                spent += budget * count
                if is_first:
                    self._refuse_divergence(budget)

    def _draw(self, count: int, around: Mapping[str, PointSettings], near: float | None) -> dict[str, list[int]]:
        """Add points to every arm and return their numbers. Equal numbers have equal shares of the ranges."""
        names = list(dict.fromkeys(one.name for space in self._spaces.values() for one in space.dimensions))
        first = len(next(iter(self._points.values())))
        rows = quasi_random(len(names), first + count, self._plan.points_seed)[first:]
        for name, space in self._spaces.items():
            columns = [names.index(one.name) for one in space.dimensions]
            units = [[row[at] for at in columns] for row in rows]
            drawn: list[PointSettings] = list(
                space.points(units, around.get(name)) if near is None else space.near(units, around[name], near)
            )
            known = [] if first else [space.as_settings(one) for one in self._arms[name].known]
            self._points[name] += [*known, *drawn[len(known) :]]
        return {name: list(range(first, first + count)) for name in self._arms}

    def _rung(self, alive: Mapping[str, Sequence[int]], budget: float) -> Iterator[tuple[float, str]]:
        """Run points at a budget, arms in turn; give the share that is done and what was last."""
        keys: list[_Key] = [
            (name, point, budget, seed)
            for points in zip(*alive.values(), strict=True)
            for seed in self._plan.seeds
            for name, point in zip(alive, points, strict=True)
        ]
        found = {key: trial for key in keys if (trial := self._kept.get(self._place(key)))}
        calls = {key: partial(measure, key[0], self._start(key), self._quality) for key in keys if key not in found}
        for key, measured in self._workers.results(calls):
            found[key] = self._trial(key, measured)
            self._lines.append(_TrialLine(LINE_VERSION, self._digests[key[0]], key[0], found[key]))
            yield len(found) / len(keys), f"{key[0]}, point {key[1] + 1}, budget {budget:g}"
        for key in keys:
            is_known = key[1] < len(self._arms[key[0]].known)
            self._trials[key[0]].append(replace(found[key], is_known=is_known))

    def _start(self, key: _Key) -> Callable[[], Run]:
        name, point, budget, seed = key
        return partial(self._arms[name].start, self._points[name][point], budget, seed)

    def _place(self, key: _Key) -> tuple[str, int, str, float, int]:
        name, point, budget, seed = key
        return self._digests[name], point, settings_key(self._points[name][point]), budget, seed

    def _trial(self, key: _Key, measured: MeasuredRun) -> TrialRecord:
        name, point, budget, seed = key
        final = measured.final
        return TrialRecord(
            point=point,
            settings=self._points[name][point],
            is_known=point < len(self._arms[name].known),
            budget=budget,
            seed=seed,
            quality=final.quality if math.isfinite(final.quality) else self._sign * math.inf,
            steps=final.step,
            rows=final.rows,
            seconds=final.seconds,
        )

    def _score(self, name: str, point: int, budget: float) -> float:
        """Return the mean over seeds, lower is better."""
        found = [one.quality for one in self._trials[name] if (one.point, one.budget) == (point, budget)]
        # A run that diverged is the worst whichever way the metric points.
        return self._sign * sum(found) / len(found) if all(map(math.isfinite, found)) else math.inf

    def _best(self, name: str, points: Sequence[int], budget: float) -> list[int]:
        return sorted(points, key=lambda point: (self._score(name, point, budget), point))

    def _chosen(self, name: str) -> int:
        full = self._plan.rungs[-1][0]
        return self._best(name, sorted({one.point for one in self._trials[name] if one.budget == full}), full)[0]

    def _refuse_divergence(self, budget: float) -> None:
        for name, trials in self._trials.items():
            runs = [one for one in trials if one.budget == budget]
            if not any(math.isfinite(one.quality) for one in runs):
                msg = (
                    f"Every run of the search of {name!r} at budget {budget:g} diverged ({len(runs)} of them), so "
                    "there is nothing to choose. Search lower rates or a shorter range, or add settings that are known."
                )
                raise RunError(msg)


def _check(arms: Mapping[str, SearchedArm], plan: SearchPlan) -> None:
    """Refuse ranges that don't match, and known settings that don't fit."""
    seen: dict[str, tuple[str, Dimension]] = {}
    for name, arm in arms.items():
        names = [one.name for one in arm.dimensions]
        if not names or len(set(names)) != len(names):
            msg = f"The dimensions of {name!r} are {names}: give some, each once."
            raise ValueError(msg)
        for one in arm.dimensions:
            other, same = seen.setdefault(one.name, (name, one))
            if one != same:
                msg = f"{other!r} and {name!r} search {one.name!r} over different ranges: {same}, {one}."
                raise ValueError(msg)
        if len(arm.known) > plan.rungs[0][1]:
            msg = f"{name!r} has {len(arm.known)} known settings and the plan {plan.rungs[0][1]} points: give no more."
            raise ValueError(msg)
        known = [settings_key(SearchSpace(tuple(arm.dimensions)).as_settings(one)) for one in arm.known]
        if len(set(known)) != len(known):
            msg = f"{name!r} has a known setting twice. Give each once."
            raise ValueError(msg)


def _digest(name: str, arm: SearchedArm, quality: str, hardware: str) -> str:
    dimensions = [repr(one) for one in arm.dimensions]
    return hashlib.sha256(json.dumps([name, arm.recipe_text, dimensions, quality, hardware]).encode()).hexdigest()
