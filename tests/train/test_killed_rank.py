"""SIGKILL of one rank or of all, streaming: the job ends with an error, and goes on with fewer to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmati.data.shards.writer import ShardWriter
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

RECIPE = """
import time
from pathlib import Path

from cosmati import Classification, RunConfig, StreamingDataset, StreamingSource
from cosmati.methods import EMA, MixUp
from cosmati.models.mlp import MLP
from cosmati.optim import AdamW
from cosmati.recipes.recipe import Recipe

HERE = Path(__file__).parent


def rows_of(batch):
    return batch.tensor("x") + batch.uniform("noise").float(), batch.tensor("y")


def data():
    return StreamingSource(StreamingDataset(HERE / "rows", transform=rows_of, window_rows=40), 16, num_workers=1)


class Slow(Classification):
    def __call__(self, model, batch):
        time.sleep(0.03)
        return super().__call__(model, batch)


def recipe():
    config = RunConfig(budget="40ba", num_microbatches=4, num_threads=1, checkpoint_every="3ba")
    methods = (MixUp(), EMA(half_life="3ba"))
    return Recipe(
        name="slow",
        model=lambda: MLP((6, 8, 3)),
        loss=Slow(3),
        data=data,
        optimizers=(AdamW(lr=0.01),),
        methods=methods,
        config=config,
    )
"""


def _command(folder: Path, run: str, world: int) -> list[str]:
    train = ["-m", "cosmati", "train", str(folder / "slow.py"), "--run-folder", str(folder / run)]
    if world == 1:
        return [sys.executable, *train]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *train]


def _ranks(parent: int) -> list[int]:
    """Return the processes that torchrun started, in the order of their ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"cosmati" in command:
            found.append(int(path.parent.name))
    return sorted(found)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).model)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
@pytest.mark.parametrize("victims", ["one", "all"])
def test_a_job_whose_ranks_are_killed_goes_on_to_the_same_bits(tmp_path: Path, victims: str) -> None:
    (tmp_path / "slow.py").write_text(RECIPE)
    generator = np.random.default_rng(0)
    with ShardWriter(
        tmp_path / "rows", {"x": "ndarray:float32:6", "y": "int"}, class_path="unknown", source="x", size_limit=8192
    ) as writer:
        for number in range(200):
            writer.write({"x": generator.standard_normal(6, np.float32), "y": number % 3})
    subprocess.run(_command(tmp_path, "whole", 1), check=True, capture_output=True)
    for world in (4, 2):
        job = subprocess.Popen(_command(tmp_path, "broken", world), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        before = len(list((tmp_path / "broken").glob("checkpoints/*"))) if (tmp_path / "broken").exists() else 0
        names = {path.name for path in (tmp_path / "broken").glob("checkpoints/*")} if before else set()
        while not {path.name for path in (tmp_path / "broken").glob("checkpoints/*")} - names:
            assert job.poll() is None, job.stderr.read() if job.stderr else ""
            time.sleep(0.05)
        ranks = _ranks(job.pid)
        assert len(ranks) == world
        for pid in ranks[1:2] if victims == "one" else ranks:
            os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=280)
        assert job.returncode != 0
    last = subprocess.run(_command(tmp_path, "broken", 1), check=False, capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert "completed after 40 steps" in last.stdout
    whole, broken = _weights(tmp_path / "whole"), _weights(tmp_path / "broken")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(value, broken[name]) for name, value in whole.items())
