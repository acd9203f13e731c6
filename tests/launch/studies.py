"""A study that takes its time, for clusters; its runs train in earnest."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from cosmati.records.study import EvaluationPoint, StudyRecord
from cosmati.study.cluster import Cluster
from cosmati.study.python_file import call_of
from cosmati.study.runner import LINES_FILE, Study, run_study

STUDY = """
import os, time
from functools import partial
from pathlib import Path

import torch

from cosmati import Classification, Evaluation, InMemory, RunConfig, Trainer
from cosmati.models.mlp import MLP
from cosmati.optim import SGD, AdamW
from cosmati.study.runner import Arm, Study

HERE = Path(__file__).parent
OPTIMIZERS = {"baseline": SGD(lr=0.1), "adam": AdamW(lr=0.01)}


def start(arm, budget, seed):
    with (HERE / "starts.txt").open("a") as file:
        file.write(f"{arm} {budget:g} {seed} {os.getpid()} {os.environ.get('SLURMD_NODENAME', '')}\\n")
    while (HERE / "stall").exists() and budget == 1.0:
        time.sleep(0.1)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, 6, generator=generator), torch.randint(3, (96,), generator=generator)
    torch.manual_seed(seed)
    return Trainer(
        MLP((6, 8, 3)),
        Classification(3),
        InMemory((x[:64], y[:64]), 16),
        optimizers=[OPTIMIZERS[arm]],
        config=RunConfig(budget=f"{round(budget * 40)}ba", seed=seed, evaluate_every="10ba"),
        evaluation=Evaluation([(x[64:], y[64:])], {"loss": Classification(3)}),
    )


def study():
    arms = {name: Arm(start=partial(start, name), recipe_text=repr(one)) for name, one in OPTIMIZERS.items()}
    return Study(name="small", task="none", arms=arms, budgets=(0.5, 1.0), seeds=(0,), quality="loss",
                 higher_is_better=False, cost_turns=TURNS)
"""


def study_file(folder: Path, turns: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "small_study.py"
    path.write_text(STUDY.replace("TURNS", str(turns)))
    return path


def run_in(file: Path, folder: Path, cluster: Cluster | None = None) -> StudyRecord:
    study = call_of(str(file), Study, "study")
    assert isinstance(study, Study)
    return run_study(study, folder, jobs=2, cluster=cluster, console=Console(file=io.StringIO()))


def reached(record: StudyRecord) -> list[tuple[str, float, int, int, tuple[tuple[int, float, int], ...]]]:
    """Return what runs have reached, to the last bit; not how long that took."""

    def point(one: EvaluationPoint) -> tuple[int, float, int]:
        return one.step, one.quality, one.rows

    return [
        (run.arm, run.budget, run.seed, run.num_threads, tuple(point(one) for one in run.points)) for run in record.runs
    ]


def num_done(folder: Path) -> int:
    path = folder / LINES_FILE
    return len(path.read_text().splitlines()) if path.exists() else 0


def starts_of(file: Path) -> list[list[str]]:
    """Return arm, budget, seed, process and node of each start so far."""
    path = file.with_name("starts.txt")
    return [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []
