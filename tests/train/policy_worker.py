"""A governed run in a process of its own: `policy_worker.py FOLDER STEP:EVENT ...`; events are `leave` and `kill`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.policy_world import AFTER, Event, leave, trainer

EVENTS: dict[str, Event] = {"leave": leave(AFTER), "kill": lambda _run: os.kill(os.getpid(), signal.SIGKILL)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *told = sys.argv[1:]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    events = {int(step): EVENTS[name] for step, _, name in (one.partition(":") for one in told)}
    trainer(Path(folder), events).fit()
    if dist.is_initialized():
        dist.destroy_process_group()
