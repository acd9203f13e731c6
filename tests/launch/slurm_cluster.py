"""A cluster of two nodes on this machine, and runs that take their time on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cosmati
from cosmati.launch.engine import AttemptPhase, AttemptRequest, AttemptStanding, RankProgram
from cosmati.launch.slurm import SlurmEngine
from cosmati.ledger.verify import verify_ledger
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

RECIPE = """
import os, time, torch
from pathlib import Path
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
    config = RunConfig(budget="60ba", num_microbatches=4, num_threads=1, ledger=True, checkpoint_every="5ba")
    return Recipe(
        name="small", model=lambda: MLP((6, 8, 3)), loss=Slow(3), data=data, optimizers=(AdamW(lr=0.01),), config=config
    )
"""

ENVIRONMENT = {"PYTHONPATH": str(Path(cosmati.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


class Job:
    """A job of two ranks on Slurm, which trains the recipe above into `run`."""

    def __init__(self, folder: Path, pause: float, recipe: str = RECIPE, **settings: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "small.py").write_text(recipe.replace("PAUSE", str(pause)))
        self.run = folder / "run"
        self.engine = SlurmEngine()
        self.request = request_of(
            folder, ("-m", "cosmati", "train", str(folder / "small.py"), "--run-folder", str(self.run)), **settings
        )
        self.handle = self.engine.submit(self.request)

    @property
    def standing(self) -> AttemptStanding:
        return self.engine.poll(self.handle)

    @property
    def log(self) -> str:
        return "\n".join(path.read_text() for path in self.engine.logs(self.handle) if path.exists())

    @property
    def step(self) -> int:
        """The last step that the run has written down."""
        return step_of(self.run)

    @property
    def num_requeues(self) -> int:
        """How often Slurm has begun it again."""
        command = ["scontrol", "show", "job", self.handle.partition(" ")[0], "--oneliner"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return int(said.partition(" Restarts=")[2].split()[0])

    @property
    def is_running(self) -> bool:
        """Whether both ranks have noted themselves since the job was last begun."""
        is_on = self.standing.phase is AttemptPhase.RUNNING
        return is_on and len(list(self.request.folder.glob("rank-*.process"))) == 2

    def until(self, is_so: Callable[[], bool], seconds: float = 120.0) -> None:
        until(is_so, seconds, lambda: f"{self.standing}\n{self.log}")

    def ended(self, seconds: float = 120.0) -> AttemptStanding:
        self.until(lambda: self.standing.phase is AttemptPhase.ENDED, seconds)
        return self.standing


def request_of(folder: Path, command: tuple[str, ...], ranks: int = 2, **settings: str) -> AttemptRequest:
    """Return an attempt of a job that finds this repository's modules."""
    program = RankProgram(command=command, folder=folder, python=Path(sys.executable), environment=ENVIRONMENT)
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    name = f"{folder.name.replace('_', '-')}-{os.getpid()}"
    return AttemptRequest(job=name, number=0, program=program, ranks=ranks, folder=folder / "attempt-0", settings=given)


def until(is_so: Callable[[], bool], seconds: float = 120.0, told: Callable[[], str] = str) -> None:
    """Wait until something is so, and fail with what is told where it isn't in time."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, told()
        time.sleep(0.2)


def step_of(run: Path) -> int:
    """Return the last step that a run has written down."""
    path = run / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def result_of(run: Path) -> tuple[bytes, int]:
    """Return the digest of a run's last checkpoint, and the steps that its ledger proves."""
    last = read_checkpoint(list_checkpoints(run / "checkpoints")[0])
    return last.state_digest, verify_ledger(run / "ledger").num_steps
