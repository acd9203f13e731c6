"""The process of a supervisor: `python -m cosmati.launch.serve QUEUE JOB`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

from cosmati.errors import CosmatiError
from cosmati.launch.agent import ENVIRONMENT
from cosmati.launch.engines import engine_of
from cosmati.launch.keeper import NOT_OURS
from cosmati.launch.queue import JobQueue, StaleHolderError
from cosmati.launch.supervisor import Supervisor

_LOADED_ONCE = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "cosmati.train.trainer",
    "cosmati.integrations",
    "cosmati.recipes.recipe",
)
"""What runs import: ranks are forks of this process, and a restart then takes tenths of a second, and no seconds."""


def serve(home: Path, job_id: str) -> None:
    """See a job through.

    Raises:
        CosmatiError: the queue can't be used, or the job has a supervisor.
    """
    os.environ.update(ENVIRONMENT)
    with JobQueue(home) as queue:
        engine = engine_of(queue.get(job_id).request.engine)
        for module in _LOADED_ONCE if engine.name == "local" else ():
            importlib.import_module(module)
        with Supervisor(queue, job_id, engine, slots=num_devices()) as supervisor:
            supervisor.run()


def num_devices() -> int:
    """Return how many ranks this machine has room for: its accelerators, or its processors where it has none."""
    import torch

    return torch.cuda.device_count() or len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def main(home: str, job_id: str) -> int:
    """See a job through, and return the exit status: 0 at its end, else whether it may be tried again."""
    try:
        serve(Path(home), job_id)
    except CosmatiError as error:
        sys.stderr.write(f"Error: {error}\n")
        return NOT_OURS if isinstance(error, StaleHolderError) else 1
    return 0


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # a terminal's, which isn't the job's
    sys.exit(main(*sys.argv[1:3]))
