"""Profile what a step of each arm costs: short runs, alone, in turns."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from cosmati.errors import RunError
from cosmati.progress import ProgressDisplay
from cosmati.records.study import CostProfile
from cosmati.study.definition import Study
from cosmati.study.jobs import InProcess, Jobs, LocalProcesses
from cosmati.study.lines import LINE_VERSION, LineFile
from cosmati.study.measured import measure

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
    console: Console | None = None,
) -> tuple[CostProfile, ...]:
    """Profile each arm `study.cost_turns` times by a short run, alone, in turns that each begin with another arm.

    Each arm has a run ahead that isn't counted: the first one reads data and fills caches. Each finished turn is a
    line of `costs.jsonl` in the folder, which counts only for the same arms, recipes, budget and hardware.

    Args:
        study: whose arms.
        folder: of the study.
        hardware: what it runs on, in words.
        one_thread: in a process of its own with one thread, as runs are where several go on at a time.
        console: where progress goes; None means standard error.

    Raises:
        RunError: a finished turn's line is damaged, or a run didn't do a step.
    """
    if not study.cost_turns:
        return ()
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    lines = LineFile(folder / COSTS_FILE, _TurnLine)
    digest = _digest(study, hardware)
    turns = [line.profiles for line in lines.read() if line.digest == digest][: study.cost_turns]
    if len(turns) < study.cost_turns:
        start, names = len(turns) / study.cost_turns, list(study.arms)
        label, workers = f"{study.name}, costs", LocalProcesses(1) if one_thread else InProcess()
        with ProgressDisplay(label, start=start, console=console) as progress, workers:
            progress.update(start, "warm-up")
            _profile_turn(study, names, 0, workers)
            for turn in range(len(turns), study.cost_turns):
                first = turn % len(names)
                turns.append(_profile_turn(study, names[first:] + names[:first], turn, workers))
                lines.append(_TurnLine(LINE_VERSION, digest, turns[-1]))
                progress.update((turn + 1) / study.cost_turns, f"turn {turn + 1}")
    return tuple(profile for turn in turns for profile in turn)


def _budget(study: Study) -> float:
    return min(study.budgets) if study.cost_budget is None else study.cost_budget


def _profile_turn(study: Study, names: list[str], turn: int, workers: Jobs) -> tuple[CostProfile, ...]:
    budget, seed = _budget(study), study.seeds[0]
    calls = {}
    for name in names:
        arm = study.arms[name]
        calls[name] = partial(measure, name, partial(arm.start, budget, seed + arm.seed_offset), study.quality)
    profiles = []
    for name, measured in workers.results(calls):
        if measured.final.step == 0:
            msg = f"The profiled run of {name!r} at budget {budget:g} did no step. Give the study a larger cost_budget."
            raise RunError(msg)
        profiles.append(CostProfile(name, turn, measured.final.step, measured.final.seconds))
    return tuple(profiles)


def _digest(study: Study, hardware: str) -> str:
    arms = [[name, arm.recipe_text, arm.seed_offset] for name, arm in study.arms.items()]
    facts = [arms, _budget(study), study.seeds[0], hardware]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
