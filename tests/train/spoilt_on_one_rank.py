"""Two ranks of which one holds what isn't finite when a checkpoint is due; each prints what it saw, and goes on."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from cosmati import RunConfig, Trainer
from cosmati.errors import words_of
from cosmati.train.run.checkpoints import list_checkpoints

RANK = int(os.environ.get("RANK", "0"))


class Masked(nn.Module):
    """Has a buffer that no forward pass reads."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 1)
        self.register_buffer("mask", torch.ones(2))

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows)


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(model(data[0]), data[1])


def spoil_buffer(trainer: Trainer, value: float) -> None:
    trainer.assembly.model.get_buffer("mask").fill_(value)


def spoil_option(trainer: Trainer, value: float) -> None:
    trainer.assembly.optimizers[0].optimizer.param_groups[0]["own"] = value


CASES: dict[str, tuple[Callable[[Trainer, float], None], int]] = {
    "a buffer of the first": (spoil_buffer, 0),
    "a buffer of the second": (spoil_buffer, 1),
    "an option of the second": (spoil_option, 1),
}


def seen(case: str, sharding: Any) -> dict[str, Any]:
    spoil, of = CASES[case]
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        model = Masked()
        trainer = Trainer(
            model,
            loss,
            optimizers=[torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
            config=RunConfig(budget="4ba", num_microbatches=2, run_folder=folder, sharding=sharding, num_threads=1),
        )
        told = ""
        with trainer:
            trainer.step((torch.ones(4, 3), torch.ones(4, 1)))
            if of == RANK:
                spoil(trainer, math.nan)
            try:
                trainer.save()
            except Exception as error:  # noqa: BLE001  (whatever it is, that's looked at)
                told = f"{type(error).__name__}: {words_of(error)}"
            spoil(trainer, 1.0)
            trainer.step((torch.ones(4, 3), torch.ones(4, 1)))
            trainer.save()
        dist.barrier()
        steps = sorted(path.name for path in list_checkpoints(folder / "checkpoints"))
        dist.barrier()
        return {"told": told, "steps": steps}


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {f"{case}, {sharding}": seen(case, sharding) for case in CASES for sharding in ("replicated", "optimizer")}
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found))
