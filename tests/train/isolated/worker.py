"""Runs in a process of their own: `worker.py FOLDER [STEP]`, killed after that step. Rank 0 writes FOLDER/facts.pt."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.data.tombstoned import Tombstoned
from cosmati.methods import EMA, GradientClipping
from cosmati.optim import AdamW, Muon
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer
from tests.train.isolated.samples import CASES, others, promise, source, trainer


class Kills(Observer):
    """Ends the process at once after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def made(folder: Path | None, *, gone: bool = False, kill_at: int = 0) -> Trainer:
    """Return the run, with the class present or tombstoned."""
    case = CASES["CNN with BatchNorm"]
    data = source(case)
    clipping = GradientClipping(clipping_type="norm", clipping_threshold=0.1, per_region=True)
    config = {} if folder is None else {"run_folder": folder, "checkpoint_every": "2ba"}
    return trainer(
        case,
        Tombstoned(data, ["personal"]) if gone else data,
        [Muon(lr=0.02), AdamW(lr=0.01)],
        [EMA(half_life="2ba"), clipping],
        observers=[Kills(kill_at)] if kill_at else [],
        config=config,
    )


def main() -> None:
    """Run one rank."""
    folder, kill_at = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    found = {}
    for name in ("present", "gone"):
        run = made(folder / "run" if kill_at else None, gone=name == "gone", kill_at=kill_at)
        run.fit()
        found[name] = {**others(run), "promise": str(promise(run))}
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, folder / "facts.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
