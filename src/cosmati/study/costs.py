"""Profile what a step of each arm costs: short runs, alone, in turns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cosmati.errors import RunError
from cosmati.progress import ProgressDisplay
from cosmati.records.study import CostProfile
from cosmati.records.study_upgrades import upgraded_cost
from cosmati.study.definition import Study
from cosmati.study.jobs import InProcess, Jobs, LocalProcesses
from cosmati.study.lines import LINE_VERSION, LineFile, made_folder
from cosmati.study.measured import MeasuredRun, measure

COSTS_FILE = "costs.jsonl"


@dataclass(frozen=True)
class _TurnLine:
    """A whole turn: one that was broken off is profiled again, so that its arms stood beside each other."""

    version: int
    digest: str
    profiles: tuple[CostProfile, ...]


def profile_costs(
    study: Study,
    folder: str | Path,
    *,
    hardware: str,
    one_thread: bool = False,
    num_threads: int | None = None,
    console: Console | None = None,
) -> tuple[CostProfile, ...]:
    """Profile each arm `study.cost_turns` times by a short run, alone, in turns that each begin with another arm.

    When such a run has ended it's evaluated once more, for what inference costs.

    Each arm has a run ahead that isn't counted: the first one reads data and fills caches. Each finished turn is a
    line of `costs.jsonl` in the folder, which counts only for the same arms, recipes, budget and hardware.

    Args:
        study: whose arms.
        folder: of the study.
        hardware: what it runs on, in words.
        one_thread: in a process of its own with one thread, as runs are where several go on at a time.
        num_threads: of the process, for recipes that don't say; None takes as many as it has.
        console: where progress goes; None means standard error.

    Raises:
        RunError: a finished turn's line is damaged, or was profiled with other threads; or a run didn't do a step.
    """
    if not study.cost_turns:
        return ()
    folder = made_folder(folder)
    lines = LineFile(folder / COSTS_FILE, _TurnLine, upgrade=_upgraded)
    digest = _digest(study, hardware, num_threads)
    turns = [line.profiles for line in lines.read() if line.digest == digest][: study.cost_turns]
    if len(turns) < study.cost_turns:
        start, names = len(turns) / study.cost_turns, list(study.arms)
        label, workers = f"{study.name}, costs", LocalProcesses(1) if one_thread else InProcess()
        with ProgressDisplay(label, start=start, console=console) as progress, workers:
            progress.update(start, "warm-up")
            _refuse_other_threads(turns, _profile_turn(study, names, 0, workers, num_threads), folder / COSTS_FILE)
            for turn in range(len(turns), study.cost_turns):
                first = turn % len(names)
                turns.append(_profile_turn(study, names[first:] + names[:first], turn, workers, num_threads))
                lines.append(_TurnLine(LINE_VERSION, digest, turns[-1]))
                progress.update((turn + 1) / study.cost_turns, f"turn {turn + 1}")
    return tuple(profile for turn in turns for profile in turn)


def _refuse_other_threads(turns: list[tuple[CostProfile, ...]], now: tuple[CostProfile, ...], path: Path) -> None:
    threads = {one.arm: one.num_threads for one in now}
    others = {one.num_threads for turn in turns for one in turn if one.num_threads not in (0, threads[one.arm])}
    if others:
        msg = (
            f"Costs were profiled with {others.pop()} threads a run, and now it's {max(threads.values())}: they can't "
            f"be compared. Go on with as many jobs as before, or remove {path}."
        )
        raise RunError(msg)


def _budget(study: Study) -> float:
    return min(study.budgets) if study.cost_budget is None else study.cost_budget


def _profile_turn(
    study: Study, names: list[str], turn: int, workers: Jobs, num_threads: int | None
) -> tuple[CostProfile, ...]:
    budget, seed = _budget(study), study.seeds[0]
    calls = {}
    for name in names:
        arm = study.arms[name]
        start = partial(arm.start, budget, seed + arm.seed_offset)
        calls[name] = partial(_with_threads, num_threads, partial(measure, name, start, study.quality, inference=True))
    profiles = []
    for name, measured in workers.results(calls):
        final = measured.final
        if final.step == 0:
            msg = f"The profiled run of {name!r} at budget {budget:g} did no step. Give the study a larger cost_budget."
            raise RunError(msg)
        inference = measured.evaluation_seconds, measured.evaluated_rows
        profiles.append(CostProfile(name, turn, final.step, final.seconds, *inference, measured.num_threads))
    return tuple(profiles)


def _with_threads(num_threads: int | None, call: Callable[[], MeasuredRun]) -> MeasuredRun:
    """Carry a call out with so many threads, and leave as many as there were."""
    if num_threads is None:
        return call()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def _upgraded(line: dict[str, Any]) -> dict[str, Any]:
    """Give a turn of an earlier release what it couldn't say."""
    profiles = line.get("profiles")
    if not isinstance(profiles, list):
        return line
    return {**line, "profiles": [upgraded_cost(one) if isinstance(one, dict) else one for one in profiles]}


def _digest(study: Study, hardware: str, num_threads: int | None) -> str:
    arms = [[name, arm.recipe_text, arm.seed_offset] for name, arm in study.arms.items()]
    facts = [arms, _budget(study), study.seeds[0], hardware]
    if num_threads is not None:
        facts.append(num_threads)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
