"""A run over signed data in a process of its own: `vouched_worker.py WORLD FOLDER GRACE STEP:EVENT ...`.

Events are those of `vouched_world`, and `kill`, which ends the process after a step as nothing else does.
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
from tests.provenance.authority.people import PII
from tests.train.vouched_world import World, hide, revoke

EVENTS: dict[str, Callable[[World], object]] = {
    "revoke": revoke(PII),
    "hide": hide,
    "kill": lambda _world: os.kill(os.getpid(), signal.SIGKILL),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    root, folder, grace, *told = sys.argv[1:]
    events = {int(step): EVENTS[name] for step, _, name in (one.partition(":") for one in told)}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    try:
        outcome = World.found_in(Path(root)).trainer(Path(folder), events, grace=grace, run=folder).fit().outcome
    except NoLongerVouchedError as error:
        outcome = f"stopped: {error}"
    sys.stdout.write(outcome)
    if dist.is_initialized():
        dist.destroy_process_group()
