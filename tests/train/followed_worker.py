"""A run under a signed policy, in a process of its own: `followed_worker.py WORLD FOLDER STEP:EVENT ...`.

Events are `sign` (the next version), `revoke`, and `kill`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.provenance.authority.errors import NoLongerVouchedError
from tests.train.followed_world import World
from tests.train.policy_world import AFTER

if __name__ == "__main__":
    torch.set_num_threads(1)
    root, folder, *told = sys.argv[1:]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    world = World(Path(root), pin=(Path(root) / "pin").read_text())
    acts: dict[str, Callable[[], object]] = {
        "sign": world.sign(AFTER),
        "revoke": world.revoke,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    events = {int(step): acts[name] for step, _, name in (one.partition(":") for one in told)}
    try:
        world.trainer(Path(folder), events, run=folder).fit()
    except NoLongerVouchedError as error:
        sys.stdout.write(str(error))
    if dist.is_initialized():
        dist.destroy_process_group()
