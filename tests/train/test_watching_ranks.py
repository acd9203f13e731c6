"""On two ranks, of which one is watched: its stop ends both, cleanly; its state goes on; bits are those of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cosmati.records.attempts import read_attempts
from tests.processes import launch_ranks, run_python
from tests.train.test_torchrun import RECIPE, _weights

pytestmark = pytest.mark.long

SCRIPT = """
import sys
from pathlib import Path
import torch.distributed as dist
from small import recipe
from cosmati.train.observers import Threshold
from cosmati.train.observers.monitors import EstimatedEnd, LossHealth, Monitors

folder, bound = sys.argv[1:]
dist.init_process_group("gloo")
watched = [Monitors([EstimatedEnd(), LossHealth()], every=2), Threshold("progress", above=float(bound))]
result = recipe().trainer(run_folder=folder, observers=watched if dist.get_rank() == 0 else []).fit()
print(f"rank {dist.get_rank()}: {result.outcome} after {result.clock.step}\\n", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_one_rank_asks_and_all_stop(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    (tmp_path / "watch.py").write_text(SCRIPT)

    def run(bound: str) -> str:
        return "".join(launch_ranks([tmp_path / "watch.py", tmp_path / "together", bound], 2))

    first = run("0.5")
    assert "rank 0: stopped after 6" in first
    assert "rank 1: stopped after 6" in first
    assert read_attempts(tmp_path / "together")[0].reason == "progress is 0.5, and 0.5 was enough"
    assert "rank 1: completed after 12" in run("2.0")
    steps = [json.loads(line)["step"] for line in (tmp_path / "together/monitors.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6, 8, 10, 12]
    alone = run_python(["-m", "cosmati", "train", tmp_path / "small.py", "--run-folder", tmp_path / "alone"])
    assert alone.returncode == 0, alone.stderr
    one, two = _weights(tmp_path / "alone"), _weights(tmp_path / "together")
    assert all(one[name].equal(two[name]) for name in one)
