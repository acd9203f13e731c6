"""One rank of `test_parts.py`: `parts_worker.py FOLDER SHARDING STOP [SETTING ...]`; each says in JSON what it saw.

The run in FOLDER/run goes on to the end, or up to step STOP where that isn't 0. A SETTING is `name=JSON`.
Where the environment has WRITES, the last rank is `slow` to write its part, or is `killed` as it writes the second one,
or the disk is `full` when the first rank finishes the second one.
Where FOLDER's name begins with `odd`, the model has a convolution that is laid out channels-last.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.data.in_memory import InMemory
from cosmati.methods import EMA
from cosmati.optim import AdamW, Muon
from cosmati.train.config import RunConfig
from cosmati.train.layout.owned import OwnedCut
from cosmati.train.layout.shard_cut import RowCut
from cosmati.train.run import checkpoints, saving
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.run.session import OpenRun
from cosmati.train.trainer import Trainer
from tests.train.elastic_worker import StopAt

STEPS = 4


class Net(nn.Module):
    """Matrices of several chunks, which no number of ranks divides, small ones, BatchNorm, and a large convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 401, 16)
        self.norm = nn.BatchNorm1d(401)
        self.blocks = nn.ModuleList([nn.Linear(401, 701), nn.Linear(701, 401)])
        self.head = nn.Linear(401, 5)
        # Its infinities, which are meant, lie with the last rank.
        self.mask = nn.Parameter(torch.tensor([0.0] * 6 + [-torch.inf] * 2), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images).flatten(1)) + self.mask.clamp(min=0).sum()
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        return self.head(hidden)


def make_trainer(folder: Path, sharding: Any, stop: int, **settings: Any) -> Trainer:
    """Return the trainer; everything follows from fixed seeds."""
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(32, 3, 16, 16, generator=generator), torch.randint(5, (32,), generator=generator))
    torch.manual_seed(0)
    model = Net()
    if folder.parent.name.startswith("odd"):
        model.conv.to(memory_format=torch.channels_last)
    return Trainer(
        model,
        Classification(5),
        InMemory(data, 16),
        optimizers=[Muon(lr=0.02, parameters=("blocks.1.weight",)), AdamW(lr=1e-3)],
        methods=[EMA(half_life="3ba")],
        observers=[StopAt(stop)],
        config=RunConfig(
            budget=f"{STEPS}ba",
            num_microbatches=4,
            num_threads=1,
            run_folder=folder,
            sharding=sharding,
            ledger=True,
            num_checkpoints=9,
            checkpoint_every="1ba",
            **settings,
        ),
    )


def watch_gathering() -> dict[str, int]:
    """Count what is gathered whole while a checkpoint is saved, by the function that does."""
    counted = {"saves": 0, "whole": 0, "wholes": 0}
    saving = [False]

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any, **more: Any) -> Any:
            counted[name] += saving[0]
            return call(*args, **more)

        return counts

    def saves(*args: Any, **more: Any) -> None:
        counted["saves"] += 1
        saving[0] = True
        save(*args, **more)
        saving[0] = False

    save, OpenRun.save = OpenRun.save, saves  # type: ignore[assignment,method-assign]
    RowCut.whole = counting("whole", RowCut.whole)  # type: ignore[method-assign]
    OwnedCut.wholes = counting("wholes", OwnedCut.wholes)  # type: ignore[method-assign]
    return counted


def disturb(how: str) -> None:
    """Let the last rank's part come late, or never."""
    write, numbers = saving.write_part, itertools.count(1)

    def disturbed(draft: Path, rank: int, world: int, *given: Any) -> None:
        if rank == world - 1 and how == "slow":
            time.sleep(0.3)
        if rank == world - 1 and how == "killed" and next(numbers) == 2:
            draft.mkdir(exist_ok=True)
            (draft / "part-00001-of-00002.safetensors").write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        write(draft, rank, world, *given)

    saving.write_part = disturbed
    finish, finishes = checkpoints.finish_parts, itertools.count(1)

    def finished(*given: Any) -> Any:
        if how == "full" and next(finishes) == 2:
            raise OSError(28, "No space left on device")
        return finish(*given)

    checkpoints.finish_parts = finished


def run(base: Path, sharding: Any, stop: int, **settings: Any) -> dict[str, Any]:
    """Let the run go on, and return what its newest checkpoint is."""
    trainer = make_trainer(base / "run", sharding, stop, **settings)
    result = trainer.fit()
    newest = list_checkpoints(base / "run" / "checkpoints")[0]
    last = read_checkpoint(newest)
    return {
        "outcome": result.outcome,
        "step": last.step,
        "signed": last.signed_digest.hex(),
        "root": trainer.assembly.layout.digest().hex(),
        "buffers": sum("running" in name for name in trainer.assembly.layout.held()),
        "files": {path.name: path.stat().st_size for path in sorted(newest.iterdir()) if path.is_file()},
        "bytes": sum(one.nbytes for one in (*last.model.values(), *last.state.values())),
    }


def main() -> None:
    """Run one rank."""
    base, sharding, stop = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    settings = {name: json.loads(text) for name, _, text in (one.partition("=") for one in sys.argv[4:])}
    torch.set_num_threads(1)
    # FSDP2 itself calls what PyTorch 2.13 has renamed.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    counted = watch_gathering()
    disturb(os.environ.get("WRITES", ""))
    print(json.dumps({**run(base, sharding, stop, **settings), "counted": counted}))  # noqa: T201
    if dist.is_initialized():
        gc.collect()  # FSDP's modules hold the group, in circles.
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
