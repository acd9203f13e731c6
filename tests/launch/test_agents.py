"""Agents of two nodes, begun by the shell command that schedulers are given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cosmati
from cosmati.launch.agents import agent_command
from cosmati.launch.engine import RankProgram
from tests.processes import free_port

PROGRAM = """
import os, sys
import torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
dist.barrier()
begun = Path(__file__).with_name("begun")
if os.environ["RANK"] == "1" and not begun.exists():
    begun.touch()
    sys.exit(3)
dist.barrier()
print("met")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_that_are_begun_again_meet_each_other_and_not_the_ones_before(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    program = RankProgram(command=(str(file),), folder=tmp_path, python=Path(sys.executable))
    agents, port = [], free_port()
    for is_host in ("true", "false"):
        command = agent_command(
            program,
            folder=str(tmp_path),
            per_node=1,
            restarts=2,
            nodes="2",
            run_id="it",
            endpoint=f"127.0.0.1:{port}",
            is_host=is_host,
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(cosmati.__file__).parents[1])}
        agents.append(subprocess.Popen(["bash", "-c", command], env=environment, start_new_session=True))
    try:
        assert [agent.wait(60) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    for rank in (0, 1):
        assert "met" in (tmp_path / f"rank-{rank}.log").read_text().split()
