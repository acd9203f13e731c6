"""The contract over ranks: every method gives the same bits on two ranks as on one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmati import methods

WORKER = Path(__file__).with_name("ranks_worker.py")


def _launch(out: Path, world: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(out)],
            env={**environment, "RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [rank.communicate(timeout=280)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.timeout(300)
def test_two_ranks_give_the_bits_of_one(tmp_path: Path) -> None:
    one, two = (_launch(tmp_path / f"{world}.json", world) for world in (1, 2))
    assert list(one) == [*(method.__name__ for method in methods.ALL), "ChannelsLast, clipped"]
    assert all(facts["elastic"] for facts in one.values())
    assert {name for name in one if one[name] != two[name]} == set()
    assert len({facts["root"] for facts in one.values()}) == len(one), "each method trains to bits of its own"
