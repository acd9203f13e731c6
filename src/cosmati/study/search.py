"""Search the settings of arms, each as hard as the others: equal numbers of points and of runs at each budget."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cosmati.errors import RunError
from cosmati.progress import ProgressDisplay
from cosmati.records.study import SearchRecord, StudyRecord, TrialRecord, settings_key
from cosmati.records.study_upgrades import upgraded_trial
from cosmati.study.jobs import FailedCall, Jobs, hardware_of_starts, jobs_of, named_call
from cosmati.study.lines import LINE_VERSION, LineFile, made_folder, only_one
from cosmati.study.measured import MeasuredRun, Run, measure
from cosmati.study.points import Dimension, PointSettings, SearchSpace, chosen_settings, quasi_random
from cosmati.study.row_sample import joined
from cosmati.study.search_plan import Rungs, SearchedArm, SearchPlan, check_search

__all__ = [
    "Dimension",
    "PointSettings",
    "SearchPlan",
    "SearchedArm",
    "chosen_settings",
    "no_search",
    "search_arms",
]

TRIALS_FILE = "trials.jsonl"
SPARES = 8
"""Further draws for each point, in place of points that were drawn before."""


@dataclass(frozen=True)
class _TrialLine:
    version: int
    digest: str
    arm: str
    trial: TrialRecord
    evaluated_on: tuple[str, ...]


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
    only for the same recipe, dimensions, metric and hardware. A run that raises an error is a trial that failed: it's
    kept with its error, counts as the worst, and the search goes on. Where all runs of an arm at a budget failed or
    diverged, those that failed are run once more when the search is begun again.

    Args:
        arms: by name.
        plan: how hard.
        folder: where finished runs are kept.
        quality: name of the metric that counts, on rows that the study doesn't report.
        higher_is_better: whether a higher metric is the better one.
        hardware: what it runs on, in words; None takes the device that its trainers train on, which must be one.
        jobs: how many runs at a time; more than one are processes of their own, one thread each.
        console: where progress goes; None means standard error.

    Returns:
        For each arm all its runs, those of points that went no further too, and the chosen point. The settings of
        that one are `chosen_settings` of it.

    Raises:
        PlanError: dimensions, ranges or known settings don't fit. MissingExtraError: SciPy isn't installed.
        RunError: every run of an arm diverged or failed at some budget, the metric isn't measured, a finished line is
            damaged or can't be written, or runs would be needed where `no_search` allows none.
    """
    check_search(arms, plan)
    only = _NO_SEARCH.get()
    if only and only.record:
        return _chosen_before(arms, only.record)
    folder = made_folder(folder)
    with only_one(folder), jobs_of(jobs) as workers:
        where = hardware or _hardware_of(arms, plan, jobs)
        measured = quality, higher_is_better, where
        search = _Search(arms, plan, folder, measured, workers, console)
        search.only_on = None if hardware else where
        search.may_run = only is None
        return search.run()


@dataclass(frozen=True)
class _NoSearch:
    record: StudyRecord | None


_NO_SEARCH: ContextVar[_NoSearch | None] = ContextVar("no_search", default=None)


@contextmanager
def no_search(record: StudyRecord | None = None) -> Iterator[None]:
    """Let `search_arms` run nothing, as where chosen arms are profiled on other hardware.

    Args:
        record: of the study: what it says that its searches found is given back. With None a search that is finished in
            its folder is read, and any other is refused.
    """
    token = _NO_SEARCH.set(_NoSearch(record))
    try:
        yield
    finally:
        _NO_SEARCH.reset(token)


def _chosen_before(arms: Mapping[str, SearchedArm], record: StudyRecord) -> dict[str, SearchRecord]:
    # Records of before version 4 don't say what an arm was called in its search.
    known = {arm.search.arm or arm.name: arm.search for arm in reversed(record.arms) if arm.search is not None}
    for name, arm in arms.items():
        settings = {one.name for one in arm.dimensions}
        if name not in known or set(chosen_settings(known[name])) != settings:
            msg = (
                f"The record of {record.name!r} has no search of {name!r} over {', '.join(sorted(settings))}, and "
                "nothing is searched here. Give the record of this very study."
            )
            raise RunError(msg)
    return {name: known[name] for name in arms}


def _hardware_of(arms: Mapping[str, SearchedArm], plan: SearchPlan, jobs: int) -> str:
    """Return what the runs of the arms train on, by one that can be made."""
    budget, seed = plan.rungs[0][0], plan.seeds[0]
    starts = {}
    for name, arm in arms.items():
        middle = {one.name: one.value(0.5) for one in arm.dimensions}
        for place, settings in enumerate([*arm.known, middle]):
            starts[f"{name}, {place}"] = partial(arm.start, settings, budget, seed)
    return hardware_of_starts(starts, jobs)


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

    only_on: str | None = None
    """Hardware that every run must train on; None where somebody says in words what it is."""
    may_run: bool = True

    def __init__(
        self,
        arms: Mapping[str, SearchedArm],
        plan: SearchPlan,
        folder: Path,
        measured: tuple[str, bool, str],
        workers: Jobs,
        console: Console | None,
    ) -> None:
        self._arms, self._plan, self._workers = arms, plan, workers
        self._console = console or Console(stderr=True)
        self._quality, higher_is_better, hardware = measured
        self._sign = -1.0 if higher_is_better else 1.0
        self._spaces = {name: SearchSpace(tuple(arm.dimensions)) for name, arm in arms.items()}
        self._lines = LineFile(folder / TRIALS_FILE, _TrialLine, upgrade=_upgraded)
        self._digests = {name: _digest(name, arm, self._quality, hardware) for name, arm in arms.items()}
        self._kept = _that_count(self._lines.read())
        self._points: dict[str, list[PointSettings]] = {name: [] for name in arms}
        self._trials: dict[str, list[TrialRecord]] = {name: [] for name in arms}
        self._evaluated_on: dict[str, list[tuple[str, ...]]] = {name: [] for name in arms}

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
            name: SearchRecord(
                dimensions=space.records(),
                trials=tuple(self._trials[name]),
                chosen=self._chosen(name),
                by_hand=self._arms[name].by_hand,
                arm=name,
                evaluated_on=joined(self._evaluated_on[name]),
            )
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
                    self._refuse_failure(budget)

    def _draw(self, count: int, around: Mapping[str, PointSettings], near: float | None) -> dict[str, list[int]]:
        """Add points to every arm and return their numbers. Equal numbers have equal shares of the ranges."""
        names = list(dict.fromkeys(one.name for space in self._spaces.values() for one in space.dimensions))
        first = len(next(iter(self._points.values())))
        rows = quasi_random(len(names), first + count * (1 + SPARES), self._plan.points_seed)[first:]
        for name, space in self._spaces.items():
            columns = [names.index(one.name) for one in space.dimensions]
            units = [[row[at] for at in columns] for row in rows]
            made = [
                space.points(part, around.get(name)) if near is None else space.near(part, around[name], near)
                for part in (units[:count], units[count:])
            ]
            known = [] if first else [space.as_settings(one) for one in self._arms[name].known]
            self._points[name] += _distinct([*known, *made[0][len(known) :]], made[1], self._points[name])
        return {name: list(range(first, first + count)) for name in self._arms}

    def _rung(self, alive: Mapping[str, Sequence[int]], budget: float) -> Iterator[tuple[float, str]]:
        """Run points at a budget, arms in turn; give the share that is done and what was last."""
        keys: list[_Key] = [
            (name, point, budget, seed)
            for points in zip(*alive.values(), strict=True)
            for seed in self._plan.seeds
            for name, point in zip(alive, points, strict=True)
        ]
        found = {key: line for key in keys if (line := self._kept.get(self._place(key)))}
        calls = {key: self._call(key) for key in keys if key not in found}
        if calls and not self.may_run:
            msg = (
                f"The search of {next(iter(calls))[0]!r} isn't finished on this hardware, and nothing is searched "
                "here. Give the record of the study that it chose the settings for (--like study.json), or run that "
                "first."
            )
            raise RunError(msg)
        for key, outcome in self._workers.outcomes(calls):
            found[key] = self._line(key, outcome)
            self._lines.append(found[key])
            text = f"{key[0]}, point {key[1] + 1}, budget {budget:g}"
            yield len(found) / len(keys), f"{text}{' failed' if isinstance(outcome, FailedCall) else ''}"
        for key in keys:
            line, is_known = found[key], key[1] < len(self._arms[key[0]].known)
            self._trials[key[0]].append(replace(line.trial, is_known=is_known))
            if not line.trial.error:
                self._evaluated_on[key[0]].append(line.evaluated_on)

    def _call(self, key: _Key) -> Callable[[], MeasuredRun]:
        name, point, budget, seed = key
        start: Callable[[], Run] = partial(self._arms[name].start, self._points[name][point], budget, seed)
        return partial(named_call, self._words(key), partial(measure, name, start, self._quality))

    def _words(self, key: _Key) -> str:
        name, point, budget, seed = key
        settings = ", ".join(f"{what} {value!r}" for what, value in self._points[name][point].items())
        return f"of {name!r}, point {point + 1} ({settings}), budget {budget:g}, seed {seed}"

    def _place(self, key: _Key) -> tuple[str, int, str, float, int]:
        name, point, budget, seed = key
        return self._digests[name], point, settings_key(self._points[name][point]), budget, seed

    def _line(self, key: _Key, outcome: MeasuredRun | FailedCall) -> _TrialLine:
        name, point, budget, seed = key
        trial = TrialRecord(
            point=point,
            settings=self._points[name][point],
            is_known=point < len(self._arms[name].known),
            budget=budget,
            seed=seed,
            quality=self._sign * math.inf,
            steps=0,
            rows=0,
            seconds=0.0,
        )
        if isinstance(outcome, FailedCall):
            text = f"A run failed and counts as the worst: {self._words(key)}: {outcome.text}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return _TrialLine(LINE_VERSION, self._digests[name], name, replace(trial, error=outcome.text), ())
        if self.only_on not in (None, outcome.hardware):
            msg = (
                f"A run {self._words(key)} trains on {outcome.hardware}, and others on {self.only_on}: use one device."
            )
            raise RunError(msg)
        final = outcome.final
        quality = final.quality if math.isfinite(final.quality) else trial.quality
        trial = replace(trial, quality=quality, steps=final.step, rows=final.rows, seconds=final.seconds)
        return _TrialLine(LINE_VERSION, self._digests[name], name, trial, outcome.evaluated_on)

    def _score(self, name: str, point: int, budget: float) -> float:
        """Return the mean over seeds, lower is better."""
        found = [one.quality for one in self._trials[name] if (one.point, one.budget) == (point, budget)]
        # A run that diverged or failed is the worst whichever way the metric points.
        return self._sign * sum(found) / len(found) if all(map(math.isfinite, found)) else math.inf

    def _best(self, name: str, points: Sequence[int], budget: float) -> list[int]:
        return sorted(points, key=lambda point: (self._score(name, point, budget), point))

    def _chosen(self, name: str) -> int:
        full = self._plan.rungs[-1][0]
        return self._best(name, sorted({one.point for one in self._trials[name] if one.budget == full}), full)[0]

    def _refuse_failure(self, budget: float) -> None:
        for name, trials in self._trials.items():
            runs = [one for one in trials if one.budget == budget]
            if any(math.isfinite(one.quality) for one in runs):
                continue
            failed = [one for one in runs if one.error]
            if not failed:
                msg = (
                    f"Every run of the search of {name!r} at budget {budget:g} diverged ({len(runs)} of them), so "
                    "there is nothing to choose. Search lower rates or a shorter range, or add settings that are known."
                )
                raise RunError(msg)
            first = failed[0]
            whose = self._words((name, first.point, first.budget, first.seed))
            others = f", and {len(runs) - len(failed)} diverged" if len(failed) < len(runs) else ""
            msg = (
                f"No run of the search of {name!r} at budget {budget:g} went well: {len(failed)} of {len(runs)} "
                f"failed{others}. The first that failed, {whose}: {first.error}. Mend it and begin again: those that "
                "failed are run once more."
            )
            raise RunError(msg)


def _distinct(
    points: Sequence[PointSettings], spares: Sequence[PointSettings], before: Sequence[PointSettings]
) -> list[PointSettings]:
    """Return points with spare ones in place of those that are there already, as long as there are any."""
    seen, left = {settings_key(one) for one in before}, iter(spares)
    found = []
    for point in points:
        text, one = settings_key(point), point
        while text in seen and (spare := next(left, None)) is not None:
            text, one = settings_key(spare), spare
        found.append(point if text in seen else one)
        seen.add(text)
    return found


def _that_count(lines: Sequence[_TrialLine]) -> dict[tuple[str, int, str, float, int], _TrialLine]:
    """Return lines by what they are of, without failed ones where no run of the arm and the budget went well."""
    well = {(line.digest, line.trial.budget) for line in lines if math.isfinite(line.trial.quality)}
    return {
        (line.digest, one.point, settings_key(one.settings), one.budget, one.seed): line
        for line in lines
        for one in (line.trial,)
        if not one.error or (line.digest, one.budget) in well
    }


def _upgraded(line: dict[str, Any]) -> dict[str, Any]:
    """Give a line of an earlier release what it couldn't say."""
    trial = line.get("trial")
    return {"evaluated_on": [], **line, **({"trial": upgraded_trial(trial)} if isinstance(trial, dict) else {})}


def _digest(name: str, arm: SearchedArm, quality: str, hardware: str) -> str:
    dimensions = [repr(one) for one in arm.dimensions]
    return hashlib.sha256(json.dumps([name, arm.recipe_text, dimensions, quality, hardware]).encode()).hexdigest()
