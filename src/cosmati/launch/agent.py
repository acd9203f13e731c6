"""A torchelastic agent: begins the ranks of one node, watches them, and ends with the supervisor.

It's a fork of the supervisor, and its ranks are forks of it: PyTorch is loaded once, and a restart takes no seconds. So
neither may touch an accelerator before it forks.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cosmati.launch.guard import die_with_parent
from cosmati.launch.notes import PLACE_VARIABLE, note_process
from cosmati.launch.worker import run_program

MEETING = {"is_host": "false", "join_timeout": 300, "last_call_timeout": 3}
"""The supervisor hosts the store. Tried: an agent that hosts it takes the others down with it."""
KEEP_ALIVE = {"keep_alive_interval": 2, "keep_alive_max_attempt": 150}
"""Long: the supervisor sees an agent end, whose child it is. On 2 cores with a load of 12 and more, two agents took
longer than a minute to meet, in 3 of 5 attempts: for each event that it notes, PyTorch looks through all modules."""
ENVIRONMENT = {
    # A store that agents and ranks share would go with the agent of rank 0.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # One rank is lost, so the attempt is: the others may wait for it in a collective.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "0",
    # Counts devices without taking hold of them, which a forked rank couldn't do again.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def run_agent(
    connection: Connection,
    parent: int,
    node: int,
    num_nodes: int,
    places: Sequence[str],
    run_id: str,
    folder: str,
    command: Sequence[str],
) -> None:
    """Run the ranks of one node to their end; the process ends with 1 where one of them ended badly.

    Args:
        connection: gives the store's port.
        parent: the supervisor's process.
        node: the agent's number.
        num_nodes: agents.
        places: names of the places of its ranks, in their order.
        run_id: of the attempt.
        folder: of the attempt.
        command: of the program.
    """
    die_with_parent(parent)
    note_process(Path(folder), f"agent-{node}")
    port = connection.recv()
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Python 3.12 warns of forks of a process with threads; PyTorch's own have let go of all locks that matter.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=len(places),
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={**MEETING, **KEEP_ALIVE},
        max_restarts=0,  # the supervisor's affair, who counts them and fences off who is left
        start_method="fork",
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, _run_rank)(folder, tuple(command), os.getpid(), tuple(places))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        place = places[first.local_rank] if first.local_rank < len(places) else ""
        connection.send((place, first.exitcode))
        sys.exit(1)


def _run_rank(folder: str, command: Sequence[str], parent: int, places: Sequence[str]) -> None:
    os.setpgid(0, 0)  # what it forks is ended with it
    os.environ[PLACE_VARIABLE] = places[int(os.environ["LOCAL_RANK"])]
    run_program(folder, command, parent)
