"""Odd models have the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train import hostile_worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def _launch(world: int) -> dict[str, str]:
    """Run the worker on so many ranks, and return what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, hostile_worker.__file__],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0] * world, "\n".join(error for _, error in said)
    found: dict[str, str] = json.loads(said[0][0])
    return found


def test_odd_models_have_the_same_bits_on_any_number_of_ranks() -> None:
    alone = _launch(1)
    assert len(set(alone.values())) == len(alone)
    assert _launch(2) == alone
    assert _launch(4) == alone
