"""Run the arms of a study at all budgets and seeds, interleaved, and go on where an earlier process stopped.

A run that raises an error is told and written to `failed.jsonl`, and the others go on. At their end the study stops: it
isn't whole. Begun again, it runs what failed once more; what fails then too is a failed run in its record.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cosmati.errors import RunError
from cosmati.progress import ProgressDisplay
from cosmati.records.study import EvaluationPoint, StudyRecord, StudyRun
from cosmati.records.study_upgrades import upgraded_run
from cosmati.storage.atomic import replace_file, replace_files
from cosmati.study.cluster import Cluster
from cosmati.study.costs import profile_costs
from cosmati.study.definition import Arm, RegistrationPlan, Study, StudyCell
from cosmati.study.jobs import FailedCall, Jobs, hardware_of_starts, jobs_of, named_call
from cosmati.study.lines import LINE_VERSION, LineFile, made_folder, only_one, writable
from cosmati.study.measured import MeasuredRun, Run, measure
from cosmati.study.registration import register
from cosmati.study.row_sample import joined

__all__ = [
    "LINES_FILE",
    "STUDY_FILE",
    "Arm",
    "RegistrationPlan",
    "Study",
    "arm_digest",
    "call_of_cell",
    "finished_runs",
    "first_starts",
    "hardware_of",
    "run_study",
    "unfinished_record",
]

LINES_FILE = "runs.jsonl"
FAILED_FILE = "failed.jsonl"
STUDY_FILE = "study.json"
STARTED_FILE = "started.json"
"""The study without its runs, while they go on."""
PLANNED_FILE = "planned.json"
"""Its cells, and the digests of the recipes that lines count for; it stands as long as `started.json` does."""
_MOST_NAMED = 3


@dataclass(frozen=True)
class _RunLine:
    """A finished run; `jobs` is how many ran at a time, `quality` the metric that counted, empty in older lines."""

    version: int
    recipe: str
    run: StudyRun
    jobs: int
    quality: str
    evaluated_on: tuple[str, ...]


@dataclass(frozen=True)
class _FailedLine:
    """A run that raised an error, and where."""

    version: int
    recipe: str
    arm: str
    budget: float
    seed: int
    error: str
    trace: str


def run_study(
    study: Study,
    folder: str | Path,
    *,
    hardware: str | None = None,
    command: str = "",
    price_per_hour: float | None = None,
    jobs: int = 1,
    cluster: Cluster | None = None,
    console: Console | None = None,
) -> StudyRecord:
    """Run what isn't finished yet, and return the record, which is also written to `study.json`.

    Each finished run is a line of `runs.jsonl` in the folder, so a study that was stopped goes on; until `study.json`
    stands, `started.json` says what the study is, and `planned.json` which runs it will have. A line counts
    only for the same recipe on the same hardware, with as many runs at a time. A run that diverged is kept, with a
    quality that isn't finite. One that raised an error is a line of `failed.jsonl`, and the others go on; what fails
    again when the study is begun again is kept in the record with its error, and counts as one that diverged.

    Args:
        study: what to run.
        folder: of the study.
        hardware: what it runs on, in words; None takes the device that its trainers train on, which must be one.
        command: the command that makes the study, for the record.
        price_per_hour: of the hardware, None where it isn't known.
        jobs: how many runs at a time; more than one are processes of their own, one thread each. Costs are
            profiled one at a time whatever it is.
        cluster: what carries runs out, and profiles costs; `jobs` is then its number. None is this machine.
        console: where progress goes; None means standard error.

    Raises:
        RunError: a finished run's line is damaged or can't be written, the metric isn't measured, another process runs
            the study, the study isn't what it was when it was registered, or runs failed that didn't before.
            KeyboardInterrupt: somebody stopped a run.
    """
    folder = made_folder(folder)
    with only_one(folder):
        lines = LineFile(folder / LINES_FILE, _RunLine, upgrade=_upgraded)
        kept = lines.read()
        registration = register(study, folder, has_runs=bool(kept))
        jobs = cluster.num_jobs if cluster else jobs
        where = hardware or (cluster.hardware(study) if cluster else hardware_of(study, jobs=jobs))
        digests = {name: arm_digest(arm, where) for name, arm in study.arms.items()}
        done = _finished(study, kept, digests, jobs)
        begun = study.record(hardware=where, price_per_hour=price_per_hour, command=command, registration=registration)
        planned = json.dumps({"recipes": digests, "cells": list(study.cells())}).encode()
        with writable(folder / STARTED_FILE):
            replace_files(folder, {PLANNED_FILE: planned, STARTED_FILE: begun.to_json().encode()})
        failures = _Failures(folder, digests)
        workers = cluster.workers(study, digests, where) if cluster else jobs_of(jobs)
        state = digests, done, failures
        _run_cells(study, lines, state, (jobs, workers), None if hardware else where, console)
        failures.refuse_new(study)
        to_profile = _to_profile(study, done)
        if cluster and to_profile.cost_turns:
            cluster.profile(to_profile, where)
        costs = profile_costs(to_profile, folder, hardware=where, one_thread=jobs > 1, console=console)
        runs = tuple(done[cell].run if cell in done else failures.run(cell) for cell in study.cells())
        rows = joined(done[cell].evaluated_on for cell in study.cells() if cell in done)
        record = replace(begun, runs=runs, costs=costs, evaluated_on=rows)
        with writable(folder / STUDY_FILE):
            replace_file(folder / STUDY_FILE, record.to_json().encode())
        for name in (STARTED_FILE, PLANNED_FILE):
            (folder / name).unlink()
    return record


def _upgraded(line: dict[str, Any]) -> dict[str, Any]:
    """Give a line of an earlier release what it couldn't say."""
    run = line.get("run")
    return {
        "jobs": 1,
        "quality": "",
        "evaluated_on": [],
        **line,
        **({"run": upgraded_run(run)} if isinstance(run, dict) else {}),
    }


class _Failures:
    """What failed when the study was begun before, and what fails now.

    Args:
        folder: of the study.
        digests: of the arms' recipes, for which failures count.
    """

    def __init__(self, folder: Path, digests: dict[str, str]) -> None:
        self._digests, self._path = digests, folder / FAILED_FILE
        self._lines = LineFile(self._path, _FailedLine)
        self._before = {
            (one.arm, one.budget, one.seed): one.error
            for one in self._lines.read()
            if digests.get(one.arm) == one.recipe
        }
        self._now: dict[StudyCell, str] = {}

    def add(self, cell: StudyCell, failed: FailedCall) -> None:
        """Write down that a run failed."""
        self._now[cell] = failed.text
        arm, budget, seed = cell
        self._lines.append(_FailedLine(LINE_VERSION, self._digests[arm], arm, budget, seed, failed.text, failed.trace))

    def run(self, cell: StudyCell) -> StudyRun:
        """Return a run that failed again as the record keeps it."""
        return _failed_run(cell, self._now[cell])

    def before(self, cells: Collection[StudyCell]) -> tuple[StudyRun, ...]:
        """Return those of `cells` that failed when the study was begun before."""
        return tuple(_failed_run(cell, error) for cell, error in self._before.items() if cell in cells)

    def refuse_all(self, study: Study) -> None:
        """Stop where a run of each arm has failed, and this is called before one went well."""
        if {arm for arm, _, _ in self._now} == set(study.arms):
            self._refuse(list(self._now), f"No run of {study.name!r} goes well")

    def refuse_new(self, study: Study) -> None:
        """Stop where runs failed that hadn't failed before."""
        new = [cell for cell in self._now if cell not in self._before]
        if new:
            num_cells = len(list(study.cells()))
            self._refuse(new, f"{len(new)} of {num_cells} runs of {study.name!r} failed, and the others are finished")

    def _refuse(self, cells: Sequence[StudyCell], what: str) -> None:
        first = "; ".join(f"{_words(cell)}: {self._now[cell]}" for cell in cells[:_MOST_NAMED])
        rest = f"; and {len(cells) - _MOST_NAMED} more" if len(cells) > _MOST_NAMED else ""
        msg = (
            f"{what}: {first}{rest}. Mend it and begin again: what failed is run once more, and counts as a run that "
            f"diverged if it fails again. {self._path} says where."
        )
        raise RunError(msg)


def _failed_run(cell: StudyCell, error: str) -> StudyRun:
    arm, budget, seed = cell
    nothing = EvaluationPoint(0, 0.0, math.nan)
    return StudyRun(arm, budget, seed, f"{arm}-{budget:g}-{seed}", (), nothing, {}, error=error)


def _words(cell: StudyCell) -> str:
    arm, budget, seed = cell
    return f"{arm}, budget {budget:g}, seed {seed}"


def _finished(study: Study, lines: list[_RunLine], digests: dict[str, str], jobs: int) -> dict[StudyCell, _RunLine]:
    found = [line for line in lines if digests.get(line.run.arm) == line.recipe and line.quality in ("", study.quality)]
    others = {line.jobs for line in found} - {jobs}
    if others and not study.cost_turns:
        # A run beside another one takes longer. Where costs are profiled the runs' own seconds don't count.
        msg = (
            f"Finished runs of {study.name!r} went on {others.pop()} at a time, and now it's {jobs}: their seconds "
            "can't be compared. Go on as they began, take a new folder, or profile the costs: Study(cost_turns=8)."
        )
        raise RunError(msg)
    cells = set(study.cells())
    runs = {(line.run.arm, line.run.budget, line.run.seed): line for line in found}
    return {cell: line for cell, line in runs.items() if cell in cells}


def _to_profile(study: Study, done: Iterable[StudyCell]) -> Study:
    """Return the study without arms of which no run went well: what fails each time can't be profiled either."""
    went_well = {arm for arm, _, _ in done}
    arms = {name: arm for name, arm in study.arms.items() if name in went_well}
    return replace(study, arms=arms) if study.baseline in arms else replace(study, cost_turns=0)


def _run_cells(
    study: Study,
    lines: LineFile[_RunLine],
    state: tuple[dict[str, str], dict[StudyCell, _RunLine], _Failures],
    carried: tuple[int, Jobs],
    hardware: str | None,
    console: Console | None,
) -> None:
    """Run what isn't done, on that hardware if it's given, and add it, or that it failed."""
    (digests, done, failures), (jobs, carrier) = state, carried
    console = console or Console(stderr=True)
    cells = list(study.cells())
    left = {cell: call_of_cell(study, cell) for cell in cells if cell not in done}
    total = sum(budget for _, budget, _ in cells)
    spent = total - sum(budget for _, budget, _ in left)
    with ProgressDisplay(study.name, start=spent / total, console=console) as progress, carrier as workers:
        for cell, measured in workers.outcomes(left):
            arm, budget, seed = cell
            spent += budget
            if isinstance(measured, FailedCall):
                failures.add(cell, measured)
                text = f"A run failed: {_words(cell)}: {measured.text}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)
                if not done:
                    failures.refuse_all(study)
                continue
            if hardware not in (None, measured.hardware):
                msg = f"{arm!r} trains on {measured.hardware}, and {study.baseline!r} on {hardware}: use one device."
                raise RunError(msg)
            run = _as_run(cell, measured)
            done[cell] = _RunLine(LINE_VERSION, digests[arm], run, jobs, study.quality, measured.evaluated_on)
            lines.append(done[cell])
            if len(done) < len(cells):
                text = f"{arm}, budget {budget:g}, seed {seed} was run {len(done)} of {len(cells)}"
                progress.update(spent / total, text)
        progress.update(1.0, f"{len(cells)} runs")


def _as_run(cell: StudyCell, measured: MeasuredRun) -> StudyRun:
    arm, budget, seed = cell
    reached = measured.points, measured.final, measured.seconds_by_part, measured.num_threads
    return StudyRun(arm, budget, seed, f"{arm}-{budget:g}-{seed}", *reached)


def hardware_of(study: Study, *, jobs: int = 1) -> str:
    """Return what a study's runs train on, in words: the device of a run that is made for it, the baseline's if it can.

    Raises:
        RunError: no arm's run can be made.
    """
    return hardware_of_starts(first_starts(study), jobs)


def first_starts(study: Study) -> dict[str, Callable[[], Run]]:
    """Return what makes a small run of each arm, the baseline's first."""
    names = sorted(study.arms, key=lambda name: name != study.baseline)
    return {name: partial(study.arms[name].start, min(study.budgets), study.seeds[0]) for name in names}


def unfinished_record(folder: Path, record: StudyRecord) -> StudyRecord:
    """Return the record of a study that was begun and isn't finished with notes whose first line says so.

    Args:
        folder: of the study.
        record: with the runs that are finished.

    Raises:
        RunError: none is, for its recipes.
    """
    failed: tuple[StudyRun, ...] = ()
    try:
        planned = json.loads((folder / PLANNED_FILE).read_text())
        num_cells: int | str = len(planned["cells"])
        left = {tuple(cell) for cell in planned["cells"]} - {(one.arm, one.budget, one.seed) for one in record.runs}
        failed = _Failures(folder, planned["recipes"]).before(left)
    except (OSError, ValueError, KeyError, TypeError):
        num_cells = "as yet unknown"
    before = f" {STUDY_FILE} is what an earlier beginning left, and isn't shown." * (folder / STUDY_FILE).exists()
    if not record.runs:
        msg = (
            f"The study in {folder} was begun, and none of its {num_cells} runs is finished.{before} Run it to its end."
        )
        raise RunError(msg)
    text = (
        f"Not finished: {len(record.runs)} of {num_cells} runs, without profiled costs. All that is said here is of "
        f"these alone, and may change.{before}{f' Failed besides: {len(failed)}.' if failed else ''}"
    )
    return replace(record, runs=(*record.runs, *failed), notes=f"{text}\n{record.notes}" if record.notes else text)


def finished_runs(folder: str | Path) -> tuple[StudyRun, ...]:
    """Return the finished runs that a study's folder holds, whatever their recipes were; none where there's no folder.

    Raises:
        RunError: a finished run's line is damaged, or another process runs the study.
    """
    path = Path(folder).expanduser() / LINES_FILE
    if not path.exists():
        return ()
    with only_one(path.parent):
        return tuple(line.run for line in LineFile(path, _RunLine, upgrade=_upgraded).read())


def call_of_cell(study: Study, cell: StudyCell) -> Callable[[], MeasuredRun]:
    """Return what trains the run of an arm, a budget and a seed."""
    arm, budget, seed = cell
    run = partial(measure, arm, partial(study.arms[arm].start, budget, seed), study.quality)
    return partial(named_call, _words(cell), run)


def arm_digest(arm: Arm, hardware: str) -> str:
    """Return the digest, as hex, for which finished runs of an arm count."""
    return hashlib.sha256(json.dumps([arm.recipe_text, hardware]).encode()).hexdigest()
