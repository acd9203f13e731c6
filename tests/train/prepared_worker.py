"""A run with signed artifacts in a process of its own: `prepared_worker.py WORLD RUN STEP:EVENT ...`.

Events are `eve` and `fay`, whose keys are revoked (she has signed the tokenizer, or what is evaluated on), and `kill`.
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
from tests.provenance.authority.people import NEWS
from tests.train.prepared_world import REJECT, at_others, evaluation, tokenizer
from tests.train.vouched_world import OPEN, World, revoke

EVENTS: dict[str, Callable[[World], object]] = {
    "eve": at_others(revoke(OPEN)),
    "fay": at_others(revoke(NEWS)),
    "kill": lambda _world: os.kill(os.getpid(), signal.SIGKILL),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    root, folder, *told = sys.argv[1:]
    events = {int(step): EVENTS[name] for step, _, name in (one.partition(":") for one in told)}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    world = World.found_in(Path(root))
    own = {"artifacts": [tokenizer(world, run=folder)], "evaluation": evaluation(world, run=folder)}
    try:
        world.trainer(Path(folder), events, grace=REJECT, run=folder, evaluate_every="2ba", **own).fit()
    except NoLongerVouchedError as error:
        sys.stdout.write(str(error))
    if dist.is_initialized():
        dist.destroy_process_group()
