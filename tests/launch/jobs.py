"""Jobs on real processes: a slow little recipe, its supervisor, and what may be killed of it."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cosmati.launch.engine import RankProgram
from cosmati.launch.guard import send
from cosmati.launch.job import JobRequest, LaunchedJob, attempt_folder
from cosmati.launch.notes import processes_in
from cosmati.launch.queue import JobQueue
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.ledger.verify import verify_ledger
from cosmati.records.ledger import StepEntry
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.processes import PythonProcess, run_python

RECIPE = """
import os, time, torch
from cosmati import Classification, InMemory, RunConfig
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW
from cosmati.recipes.recipe import Recipe


class Slow(Classification):
    def __call__(self, model, data):
        time.sleep(PAUSE)
        return super().__call__(model, data)


def data():
    generator = torch.Generator().manual_seed(1)
    return InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)


def recipe():
    config = RunConfig(
        budget="NUMba", num_microbatches=4, num_threads=1, checkpoint_every="2ba", ledger=True, progress=False
    )
    BEFORE
    return Recipe(
        name="slow", model=lambda: MLP((6, 8, 3)), loss=Slow(3), data=data, optimizers=(AdamW(lr=0.01),), config=config
    )
"""


def recipe_in(folder: Path, num_steps: int, pause: float = 0.01, before: str = "pass") -> Path:
    """Write a recipe that sleeps in each microbatch, and return its file."""
    text = RECIPE.replace("NUM", str(num_steps)).replace("PAUSE", str(pause)).replace("BEFORE", before)
    path = folder / "slow.py"
    path.write_text(text)
    return path


def asked(file: Path, run: Path, told: Sequence[str] = (), **changes: Any) -> JobRequest:
    """Return what is asked of the launcher to train a recipe."""
    more = (word for setting in told for word in ("--set", setting))
    command = ("-m", "cosmati", "train", str(file), "--run-folder", str(run), *more)
    program = RankProgram(command=command, folder=file.parent, python=Path(sys.executable))
    return JobRequest(**{"name": "slow", "program": program, "ranks": 2, "backoff_seconds": 0.0005, **changes})


def serving(home: Path, job_id: str) -> PythonProcess:
    """Begin a job's supervisor."""
    return PythonProcess(["-m", "cosmati.launch.serve", home, job_id])


def marks_of(jobs: JobQueue, job_id: str, kind: str) -> list[str]:
    """Return the processes of a kind of the latest attempt."""
    attempts = jobs.attempts(job_id)
    return list(processes_in(attempt_folder(jobs.home, job_id, len(attempts) - 1), kind)) if attempts else []


def until(holds: Callable[[], object], seconds: float = 60.0, every: float = 0.01) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(every)


def has_newer_checkpoint(run: Path) -> Callable[[], bool]:
    """Return what says whether the run has written a checkpoint since now."""
    before = {path.name for path in list_checkpoints(run / "checkpoints")}
    return lambda: bool({path.name for path in list_checkpoints(run / "checkpoints")} - before)


def kill_one(jobs: JobQueue, job_id: str, kind: str) -> None:
    """Kill a process of the latest attempt: the last of its kind."""
    until(lambda: marks_of(jobs, job_id, kind))
    assert send(marks_of(jobs, job_id, kind)[-1], signal.SIGKILL)


def alone(file: Path, run: Path) -> None:
    """Train a recipe in one process, undisturbed."""
    done = run_python(["-m", "cosmati", "train", file, "--run-folder", run])
    assert done.returncode == 0, done.stderr


def with_secrets_of(other: Path, run: Path) -> None:
    """Let a run that hasn't begun commit to rows as another one does."""
    shutil.copytree(other / "private", run / "private")


def standing_rows(run: Path) -> list[tuple[int, list[bytes]]]:
    """Return the steps that stand, each with what it commits to of its rows."""
    ledger = run / "ledger"
    scan = Scan(ledger, read_head(ledger, read_verifier_key(ledger)))
    entries = [(one.index, one.entry) for one in scan]
    stands = scan.history.standing()
    steps = [entry for index, entry in entries if index in stands and isinstance(entry, StepEntry)]
    return [(step.step, [cell.row_commitment for cell in step.microbatches]) for step in steps]


def assert_same_run(one: Path, other: Path, num_steps: int) -> None:
    """Check that two runs have ended with the same state, by the same rows, each once, and that both ledgers hold."""
    digests = [read_checkpoint(list_checkpoints(run / "checkpoints")[0]).state_digest for run in (one, other)]
    assert digests[0] == digests[1]
    for run in (one, other):
        report = verify_ledger(run / "ledger")
        assert (report.num_steps, report.diverged_steps, report.has_ended) == (num_steps, (), True)
        assert not list((run / "checkpoints").glob(".draft-*"))
    assert standing_rows(one) == standing_rows(other)
    assert [step for step, _ in standing_rows(one)] == list(range(num_steps))


def states_seen(job: LaunchedJob) -> str:
    """Return how a job stands, for messages."""
    return f"{job.state}: {job.reason}"


def is_there(mark: str) -> bool:
    """Return whether a process is there."""
    return send(mark, 0)
