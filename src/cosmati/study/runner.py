"""Run the arms of a study at all budgets and seeds, interleaved, and go on where an earlier process stopped."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from cosmati.core.clock import Clock
from cosmati.errors import DivergenceError, RunError
from cosmati.progress import ProgressDisplay
from cosmati.records.encoding import decode_record, encode_record
from cosmati.records.study import ArmRecord, ChecklistItem, EvaluationPoint, StudyRecord, StudyRun
from cosmati.storage.atomic import replace_file
from cosmati.train.observers import Observer
from cosmati.train.run.result import RunResult

LINES_FILE = "runs.jsonl"
STUDY_FILE = "study.json"
_LINE_VERSION = 1


class Run(Protocol):
    """What an arm gives for each run; a `Trainer` is one."""

    clock: Clock
    observers: list[Observer]

    def fit(self) -> RunResult:
        """Train to the end of the budget."""
        ...


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training.

    Args:
        start: makes the run for a budget and a seed.
        description: in words.
        recipe_text: all that says what the arm does; a finished run counts only for an equal text.
        methods: what it adds to the baseline.
        seed_offset: added to the study's seeds; an A/A arm is the baseline with other seeds.
    """

    start: Callable[[float, int], Run]
    description: str = ""
    recipe_text: str = ""
    methods: tuple[str, ...] = ()
    seed_offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it's asked for.

    Args:
        name: of the study.
        task: what is learnt from what, in words.
        arms: by name; the baseline among them.
        budgets: shares of the full budget.
        seeds: the same for all arms, but for an arm's offset.
        quality: name of the metric of the evaluation that counts.
        higher_is_better: whether a higher metric is the better one.
        baseline: name of the arm that the others are compared with.
        quality_name: of the metric in words; the metric's name if empty.
        unit: of the metric.
        checklist: what makes the baseline a strong one.
        notes: whatever a reader must know besides.
    """

    name: str
    task: str
    arms: Mapping[str, Arm]
    budgets: Sequence[float]
    seeds: Sequence[int]
    quality: str
    higher_is_better: bool
    baseline: str = "baseline"
    quality_name: str = ""
    unit: str = ""
    checklist: tuple[ChecklistItem, ...] = ()
    notes: str = ""

    def cells(self) -> Iterator[tuple[str, float, int]]:
        """Give arm, budget and seed of each run; arms take turns, each time from another one on, so drift hits all."""
        names = list(self.arms)
        for turn, seed in enumerate(self.seeds):
            for place, budget in enumerate(self.budgets):
                first = (turn + place) % len(names)
                for name in names[first:] + names[:first]:
                    yield name, budget, seed + self.arms[name].seed_offset


@dataclass(frozen=True)
class _Line:
    version: int
    recipe: str
    run: StudyRun


def run_study(
    study: Study,
    folder: str | Path,
    *,
    hardware: str,
    command: str = "",
    price_per_hour: float | None = None,
    console: Console | None = None,
) -> StudyRecord:
    """Run what isn't finished yet, and return the record, which is also written to `study.json`.

    Each finished run is a line of `runs.jsonl` in the folder, so a study that was stopped goes on. A line counts
    only for the same recipe on the same hardware. A run that diverged is kept, with a quality that isn't finite.

    Args:
        study: what to run.
        folder: of the study.
        hardware: what it runs on, in words.
        command: the command that makes the study, for the record.
        price_per_hour: of the hardware, None where it isn't known.
        console: where progress goes; None means standard error.

    Raises:
        RunError: a finished run's line is damaged, the metric isn't measured, or somebody stopped a run.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LINES_FILE
    done = _finished(path, study, hardware)
    cells = list(study.cells())
    left = [cell for cell in cells if cell not in done]
    total = sum(budget for _, budget, _ in cells)
    spent = total - sum(budget for _, budget, _ in left)
    with ProgressDisplay(study.name, start=spent / total, console=console) as progress:
        for arm, budget, seed in left:
            progress.update(spent / total, f"{arm}, budget {budget:g}, seed {seed}")
            run = done[arm, budget, seed] = _run(study, (arm, budget, seed))
            line = _Line(_LINE_VERSION, _digest(study.arms[arm], hardware), run)
            with path.open("a") as file:
                file.write(json.dumps(json.loads(encode_record(line))) + "\n")
            spent += budget
        progress.update(1.0, f"{len(cells)} runs")
    arms = tuple(ArmRecord(n, a.description, a.recipe_text, a.methods) for n, a in study.arms.items())
    record = StudyRecord(
        name=study.name,
        task=study.task,
        quality_name=study.quality_name or study.quality,
        higher_is_better=study.higher_is_better,
        unit=study.unit,
        baseline_arm=study.baseline,
        arms=arms,
        runs=tuple(done[cell] for cell in cells),
        checklist=study.checklist,
        hardware=hardware,
        price_per_hour=price_per_hour,
        command=command,
        notes=study.notes,
    )
    replace_file(folder / STUDY_FILE, record.to_json().encode())
    return record


def _digest(arm: Arm, hardware: str) -> str:
    return hashlib.sha256(json.dumps([arm.recipe_text, hardware]).encode()).hexdigest()


def _finished(path: Path, study: Study, hardware: str) -> dict[tuple[str, float, int], StudyRun]:
    """Read the runs that an earlier process finished, and cut off a line that it didn't."""
    if not path.exists():
        return {}
    whole, newline, torn = path.read_text().rpartition("\n")
    if torn:
        replace_file(path, (whole + newline).encode())
    lines = [decode_record(_Line, text, version=_LINE_VERSION) for text in whole.splitlines()]
    wanted = {name: _digest(arm, hardware) for name, arm in study.arms.items()}
    return {
        (line.run.arm, line.run.budget, line.run.seed): line.run
        for line in lines
        if wanted.get(line.run.arm) == line.recipe
    }


class _Points(Observer):
    """Keeps what evaluations on the way say."""

    every = 1 << 62  # is told of no step

    def __init__(self, quality: str) -> None:
        self.points: list[EvaluationPoint] = []
        self._quality = quality

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Keep a point."""
        if self._quality in metrics:
            point = EvaluationPoint(clock.step, seconds, metrics[self._quality], clock.rows, clock.tokens)
            self.points.append(point)


def _run(study: Study, cell: tuple[str, float, int]) -> StudyRun:
    name, budget, seed = cell
    run = study.arms[name].start(budget, seed)
    kept = _Points(study.quality)
    run.observers.append(kept)
    parts: Mapping[str, float] = {}
    try:
        result = run.fit()
    except DivergenceError:
        clock, quality, seconds = run.clock, math.nan, run.clock.seconds
    else:
        if result.outcome == "stopped":
            raise KeyboardInterrupt
        if study.quality not in result.metrics:
            msg = f"The runs of {name!r} measure {sorted(result.metrics)}, and the study asks for {study.quality!r}."
            raise RunError(msg)
        clock, quality, seconds, parts = (
            result.clock,
            result.metrics[study.quality],
            result.seconds,
            result.seconds_by_part,
        )
    point = EvaluationPoint(clock.step, seconds, quality, clock.rows, clock.tokens)
    before = [one for one in kept.points if one.step < point.step]
    return StudyRun(name, budget, seed, f"{name}-{budget:g}-{seed}", (*before, point), point, dict(parts))
