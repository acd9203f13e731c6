"""What a study has done by a process of another machine: a run, a look at the hardware, a profile of its costs.

    python -m cosmati.launch.study_task run ARRAY_FOLDER NUMBER
    python -m cosmati.launch.study_task hardware ASKED FILE[:FUNCTION]
    python -m cosmati.launch.study_task profile ASKED FILE[:FUNCTION] HARDWARE ARM...

It reads the study's file again, without its searches: what they found stands in the study's record, ASKED.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cosmati.errors import RunError
from cosmati.records.encoding import FileRecord
from cosmati.records.study import StudyRecord
from cosmati.storage.atomic import replace_file
from cosmati.study.costs import profile_costs
from cosmati.study.definition import Study
from cosmati.study.jobs import FailedCall
from cosmati.study.measured import MeasuredRun
from cosmati.study.python_file import call_of
from cosmati.study.runner import arm_digest, call_of_cell, hardware_of
from cosmati.study.search import no_search

ARRAY_FILE, ASKED_FILE = "array.json", "asked.json"
HARDWARE_MARK = "cosmati-hardware: "
"""Ahead of the answer: the study's file may print too."""


@dataclass(frozen=True, kw_only=True)
class ArrayCell:
    """A run of an array.

    Attributes:
        arm: its arm.
        budget: share of the full budget.
        seed: its seed.
        recipe: the digest that it counts for.
        result: name of the file for what it reaches.
    """

    arm: str
    budget: float
    seed: int
    recipe: str
    result: str


@dataclass(frozen=True, kw_only=True)
class ArrayPlan(FileRecord):
    """The runs of an array; a task's number is that of its cell.

    Attributes:
        file: the study's, absolute, with the function after a colon.
        hardware: that the runs are to train on, in words.
        results: the folder for what they reach, absolute; the study's record is beside it.
        cells: the runs.
        version: of this form.
    """

    version: int = 1
    file: str
    hardware: str
    results: str
    cells: tuple[ArrayCell, ...]


@dataclass(frozen=True, kw_only=True)
class TaskResult(FileRecord):
    """How a run has ended.

    Attributes:
        measured: what it reached; None where it failed.
        error: what it failed with, in words.
        trace: where.
        is_final: nothing of the study can go on.
        version: of this form.
    """

    version: int = 1
    measured: MeasuredRun | None = None
    error: str = ""
    trace: str = ""
    is_final: bool = False


def study_as_asked(file: str, asked: Path) -> Study:
    """Return the study of a file, with what its searches found when it was begun.

    Raises:
        RunError: the file returns no study, or has a search that the study hadn't.
    """
    with no_search(StudyRecord.from_json(asked.read_text())):
        study = call_of(file, Study, "study")
    assert isinstance(study, Study), "checked"
    return study


def run_task(folder: Path, number: int) -> None:
    """Train a run of an array, and write down how it ended.

    Args:
        folder: of the array.
        number: of the task.

    Raises:
        OSError: that can't be written. KeyboardInterrupt: somebody stopped it.
    """
    plan = ArrayPlan.from_json((folder / ARRAY_FILE).read_text())
    cell, results = plan.cells[number], Path(plan.results)
    try:
        result = TaskResult(measured=_measured(plan, cell, results.parent / ASKED_FILE))
    except Exception as error:  # noqa: BLE001  # told to whoever waits for it
        failed = FailedCall(error)
        is_final = isinstance(error, RunError)
        result = TaskResult(error=str(error) if is_final else failed.text, trace=failed.trace, is_final=is_final)
        sys.stderr.write(failed.trace)
    replace_file(results / cell.result, result.to_json().encode())


def _measured(plan: ArrayPlan, cell: ArrayCell, asked: Path) -> MeasuredRun:
    study = study_as_asked(plan.file, asked)
    arm = study.arms.get(cell.arm)
    if arm is None or arm_digest(arm, plan.hardware) != cell.recipe:
        msg = (
            f"{plan.file} has another recipe of {cell.arm!r} than when the study was begun, or none. Begin the study "
            "again: what is finished for the new recipe stays."
        )
        raise RunError(msg)
    return call_of_cell(study, (cell.arm, cell.budget, cell.seed))()


def _profile(asked: Path, file: str, hardware: str, arms: list[str]) -> None:
    study = study_as_asked(file, asked)
    study = replace(study, arms={name: study.arms[name] for name in arms})
    profile_costs(study, asked.parent.parent, hardware=hardware)


def main(arguments: list[str]) -> None:
    """Do what is asked for, with one thread where a recipe doesn't say."""
    torch.set_num_threads(1)
    what, first, *rest = arguments
    if what == "run":
        run_task(Path(first), int(rest[0]))
    elif what == "hardware":
        print(f"\n{HARDWARE_MARK}{hardware_of(study_as_asked(rest[0], Path(first)))}")  # noqa: T201  # the answer
    else:
        _profile(Path(first), rest[0], rest[1], rest[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
