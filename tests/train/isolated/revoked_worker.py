"""A run with what is a class's own, in a process of its own: `revoked_worker.py WORLD FOLDER STEP:EVENT ...`.

Where the world has another authority, whose tokenizer it goes by, `hide` lets that one's repository be gone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.provenance.authority.errors import NoLongerVouchedError
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from tests.provenance.authority.people import PII
from tests.train.isolated.revoked_world import trainer
from tests.train.prepared_world import at_others, tokenizer
from tests.train.vouched_world import World, hide, revoke

EVENTS: dict[str, Callable[[World], object]] = {
    "revoke": revoke(PII),
    "hide": at_others(hide),
    "kill": lambda _world: os.kill(os.getpid(), signal.SIGKILL),
}


def weights_of(folder: Path) -> dict[str, Tensor]:
    return dict(read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).model)


def step_of(folder: Path) -> int:
    return read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).step


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, folder, *told = sys.argv[1:]
    events = {int(step): EVENTS[name] for step, _, name in (one.partition(":") for one in told)}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    world, own = World.found_in(Path(root)), {}
    try:
        if (world.people.root / "others").exists():
            own["artifacts"] = [tokenizer(world, run=folder)]
        trainer(world, Path(folder), events, "{revocation: reject}", run=folder, **own).fit()
    except NoLongerVouchedError as error:
        sys.stdout.write(str(error))
    if dist.is_initialized():
        dist.destroy_process_group()
