"""A study's runs as one array job of Slurm: each task trains one run, and leaves what it reached in a file.

The array needs nobody who waits for it. Whoever begins the study again finds what tasks have left, and those that go
on. In the study's folder, on a disk that all nodes share:

    slurm/asked.json    the study without its runs
    slurm/results/      a file for each run that has ended, until it's a line of `runs.jsonl`
    slurm/array-K/      array.json   its runs   array.sbatch   what was submitted   task-N.log   stop   it's to end
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast

from cosmati.errors import RunError
from cosmati.launch.agents import check_settings, count_of
from cosmati.launch.array_jobs import arrays_of, cancel, cancel_all, tasks_of
from cosmati.launch.slurm import OPTIONS, as_name, ask_slurm, one_line
from cosmati.launch.study_task import (
    ARRAY_FILE,
    ASKED_FILE,
    HARDWARE_MARK,
    ArrayCell,
    ArrayPlan,
    TaskResult,
)
from cosmati.storage.atomic import replace_file
from cosmati.study.definition import Study, StudyCell
from cosmati.study.jobs import FailedCall, Jobs
from cosmati.study.lines import made_folder, readable, writable

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_ARRAY, _SCRIPT = "array-", "array.sbatch"
_REQUEUES = 3
_MOST_TASKS = 1000
"""Of one array: Slurm's own limit where nobody has changed it. The rest comes in a further one."""
_POLL_SECONDS = 2.0
_LOOKS = 3
"""That a task may be gone from the queue without a result: a shared disk may show that late."""


@dataclass(frozen=True)
class ToldFailure(FailedCall):
    """A run that failed on another machine, as that one told it."""

    told: str = ""
    where: str = ""

    @property
    def text(self) -> str:
        """The error with its kind, in one line."""
        return self.told

    @property
    def trace(self) -> str:
        """The error with where it was raised."""
        return self.where


class SlurmStudy:
    """Carries a study's runs out as tasks of arrays.

    Args:
        file: the study's, `FILE[:FUNCTION]`.
        folder: of the study, on a disk that all nodes share.
        num_jobs: how many tasks at a time.
        settings: `requeues`, and what `sbatch` is given as it is.

    Raises:
        RunError: Slurm has no such setting, or it has a value that's none.
    """

    def __init__(self, file: str, folder: Path, num_jobs: int, settings: Mapping[str, str]) -> None:
        path, colon, function = file.partition(":")
        self._file = f"{Path(path).absolute()}{colon}{function}"
        self.num_jobs = num_jobs
        self._settings = check_settings("slurm", settings, (*OPTIONS, "requeues"))
        self._requeues = count_of(self._settings, "requeues", _REQUEUES)
        self._folder = folder.expanduser().absolute() / "slurm"

    @property
    def first_array(self) -> Path:
        """The folder of the study's first array."""
        return self._folder / f"{_ARRAY}0"

    def script(self, folder: Path, num_tasks: int) -> str:
        """Return the batch script of an array.

        Args:
            folder: of the array.
            num_tasks: runs in it.

        Raises:
            RunError: a setting can't stand in it.
        """
        directives = {
            "job-name": f"cosmati-{self._folder.parent.name}",
            "comment": str(folder),
            "array": f"0-{num_tasks - 1}%{self.num_jobs}",
            "nodes": "1",
            "ntasks": "1",
            "output": f"{as_name(folder)}/task-%a.log",
            "open-mode": "append",
            **self._options(),
        }
        return _TEMPLATE.format(
            directives="\n".join(f"#SBATCH --{name}={one_line(value)}" for name, value in directives.items()),
            folder=shlex.quote(str(folder)),
            directory=shlex.quote(str(Path.cwd())),
            python=shlex.quote(sys.executable),
            requeues=self._requeues,
        )

    def hardware(self, study: Study) -> str:
        """Return what runs train on: a node is asked, by a job of one task.

        Raises:
            RunError: it can't be, or can make no run.
        """
        self._ask(study)
        said = self._on_a_node("hardware", str(self._folder / ASKED_FILE), self._file)
        return said.rpartition(HARDWARE_MARK)[2].strip()

    def profile(self, study: Study, hardware: str) -> None:
        """Profile costs on a node that nobody else is on.

        Raises:
            RunError: it failed; turns that were finished stay.
        """
        self._on_a_node("profile", str(self._folder / ASKED_FILE), self._file, hardware, *study.arms, exclusive=True)

    def workers(self, study: Study, recipes: Mapping[str, str], hardware: str) -> SlurmArrays:
        """Return what carries cells out."""
        self._ask(study)
        return SlurmArrays(
            self,
            study.quality,
            recipes,
            ArrayPlan(file=self._file, hardware=hardware, results=str(self._folder / "results"), cells=()),
        )

    def _ask(self, study: Study) -> None:
        made_folder(self._folder / "results")
        with writable(self._folder / ASKED_FILE):
            replace_file(self._folder / ASKED_FILE, study.record(hardware="").to_json().encode())

    def _options(self) -> dict[str, str]:
        return {name: self._settings[name] for name in OPTIONS if name in self._settings}

    def _on_a_node(self, *words: str, exclusive: bool = False) -> str:
        options = [f"--{name}={value}" for name, value in self._options().items()]
        alone = ["--exclusive"] if exclusive else []
        module = [sys.executable, "-m", "cosmati.launch.study_task"]
        try:
            return ask_slurm("srun", "--nodes=1", "--ntasks=1", *alone, *options, *module, *words, max_seconds=None)
        except KeyboardInterrupt:
            cancel_all({}, self._folder)
            raise


_TEMPLATE = """\
#!/bin/bash
{directives}
#SBATCH --requeue
set -u
folder={folder}
cd {directory}
restarts=${{SLURM_RESTART_COUNT:-0}}
if [ "$restarts" -gt {requeues} ]; then
  echo "Begun $restarts times again, and {requeues} are allowed: given up."
  exit 1
fi
{python} -m cosmati.launch.study_task run "$folder" "$SLURM_ARRAY_TASK_ID" && exit 0
status=$?
if [ ! -e "$folder/stop" ] && [ "$restarts" -lt {requeues} ]; then
  echo "Back to the queue, for time $((restarts + 1)) of {requeues}: it ended with status $status."
  # The task alone: an array's number without it may mean all of its tasks.
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" && exit 0
fi
exit "$status"
"""


class SlurmArrays(Jobs):
    """Carries cells out, and at its end whatever still runs is cancelled.

    Args:
        slurm: has the settings.
        quality: name of the metric that counts.
        recipes: by arm the digests for which finished runs count.
        plan: of an array, without its cells.
    """

    def __init__(self, slurm: SlurmStudy, quality: str, recipes: Mapping[str, str], plan: ArrayPlan) -> None:
        self._slurm, self._quality, self._recipes, self._plan = slurm, quality, recipes, plan
        self._results = Path(plan.results)
        self._arrays: dict[str, Path] = {}
        """Folders, by the job's number."""

    def outcomes(self, calls: Mapping[K, Callable[[], T]]) -> Iterator[tuple[K, T | FailedCall]]:
        """Give each cell and what its run reached, or what it failed with; tasks find their calls by themselves.

        Raises:
            RunError: nothing can go on, a task says, or Slurm takes no array.
        """
        cells = {self._cell(cast("StudyCell", key)): key for key in calls}
        places = self._find(set(cells))
        self._forget_failures(set(cells) - set(places))
        left = [one for one in cells if one not in places]
        waits, gone = {*places, *(one for one in left if self._path(one).exists())}, dict[ArrayCell, int]()
        left = [one for one in left if one not in waits]
        while waits or left:
            if not waits:
                places = self._submit(left[:_MOST_TASKS])
                waits, left = {*left[:_MOST_TASKS]}, left[_MOST_TASKS:]
            is_there = self._there()
            for cell in [one for one in cells if one in waits]:
                outcome = self._outcome(cell)
                if outcome is None and is_there is not None and places[cell] not in is_there:
                    gone[cell] = gone.get(cell, 0) + 1
                    outcome = self._lost(places[cell]) if gone[cell] >= _LOOKS else None
                if outcome is None:
                    continue
                waits.remove(cell)
                yield cells[cell], cast("T | FailedCall", outcome)
                self._path(cell).unlink(missing_ok=True)
            time.sleep(_POLL_SECONDS if waits else 0)

    def _cell(self, cell: StudyCell) -> ArrayCell:
        arm, budget, seed = cell
        facts = json.dumps([self._recipes[arm], self._quality, arm, budget, seed])
        name = f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"
        return ArrayCell(arm=arm, budget=budget, seed=seed, recipe=self._recipes[arm], result=name)

    def _path(self, cell: ArrayCell) -> Path:
        return self._results / cell.result

    def _outcome(self, cell: ArrayCell) -> object:
        """Return how a run has ended, None where it hasn't.

        Raises:
            RunError: nothing can go on.
        """
        path = self._path(cell)
        result = _result_in(path)
        if result is None:
            return None
        if result.is_final:
            raise RunError(result.error)
        return result.measured or ToldFailure(RunError(result.error), result.error, result.trace)

    def _forget_failures(self, cells: set[ArrayCell]) -> None:
        """Take away what is no reason not to run these: failures that nobody has heard of, runs on other hardware."""
        for path in map(self._path, cells):
            result = _result_in(path)
            if result and (result.measured is None or result.measured.hardware != self._plan.hardware):
                path.unlink()

    def _find(self, cells: set[ArrayCell]) -> dict[ArrayCell, tuple[str, int]]:
        """Return tasks of before that go on, and cancel arrays that are of another recipe.

        Raises:
            RunError: Slurm doesn't say.
        """
        arrays = arrays_of(self._results.parent)
        # A controller that says nothing now isn't one that has nothing: then nothing is cancelled, and nothing begun.
        tasks = tasks_of(arrays)
        self._arrays |= arrays
        planned, found = {job: self._planned(folder) for job, folder in arrays.items()}, {}
        for job, number in tasks:
            cell = planned[job][number] if number < len(planned[job]) else None
            if cell in cells:
                found[cell] = job, number
        for job in set(self._arrays) - {job for job, _ in found.values()}:
            cancel(job, self._arrays.pop(job))
        return found

    @staticmethod
    def _planned(folder: Path) -> Sequence[ArrayCell]:
        """Return the runs of an array; none where somebody has taken its folder away."""
        try:
            return ArrayPlan.from_json((folder / ARRAY_FILE).read_text()).cells
        except FileNotFoundError:
            return ()

    def _submit(self, cells: Sequence[ArrayCell]) -> dict[ArrayCell, tuple[str, int]]:
        parent = self._results.parent
        before = (path.name.removeprefix(_ARRAY) for path in parent.glob(f"{_ARRAY}*"))
        number = max((int(name) for name in before if name.isdecimal()), default=-1) + 1
        folder = made_folder(parent / f"{_ARRAY}{number}")
        with writable(folder):
            plan = ArrayPlan(
                file=self._plan.file, hardware=self._plan.hardware, results=self._plan.results, cells=tuple(cells)
            )
            replace_file(folder / ARRAY_FILE, plan.to_json().encode())
            replace_file(folder / _SCRIPT, self._slurm.script(folder, len(cells)).encode())
        job = ask_slurm("sbatch", "--parsable", str(folder / _SCRIPT)).strip().partition(";")[0]
        self._arrays[job] = folder
        sys.stderr.write(f"Slurm has {len(cells)} runs as tasks of job {job}; what they say is in {folder}.\n")
        return {cell: (job, task) for task, cell in enumerate(cells)}

    def _there(self) -> set[tuple[str, int]] | None:
        """Return the tasks, by job and number, that Slurm still has; None where it doesn't say."""
        try:
            tasks = tasks_of(self._arrays)
        except RunError:
            return None
        with readable(self._results):
            list(self._results.iterdir())  # a shared disk then looks for new files
        return tasks

    def _lost(self, place: tuple[str, int]) -> FailedCall:
        job, number = place
        log = self._arrays[job] / f"task-{number}.log"
        msg = (
            f"Task {number} of Slurm's job {job} has ended and left no result: it was cancelled, out of time, "
            f"killed more often than it may be begun again, or had no room on the disk. See {log}, and give it more: "
            "--with time=, --with mem=, --with requeues=."
        )
        return FailedCall(RunError(msg))

    def __enter__(self) -> Self:
        """Begin; the array is submitted with the calls."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is left.

        Raises:
            RunError: something can't be cancelled; everything else is.
        """
        cancel_all(self._arrays, self._results.parent if kind is KeyboardInterrupt else None)


def _result_in(path: Path) -> TaskResult | None:
    """Return what a task has left; None where it has left nothing yet.

    Raises:
        RunError: it can't be read.
    """
    with readable(path):
        text = path.read_text() if path.exists() else None
    try:
        return None if text is None else TaskResult.from_json(text)
    except RunError as error:
        msg = f"{path} is damaged: {error} Or take it away: the run is then done once more."
        raise RunError(msg) from error
