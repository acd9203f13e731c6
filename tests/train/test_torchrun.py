"""torchrun as it is: a script that says nothing of ranks trains on several, to the bits of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint

# Every rank inherits it.
STRICT = {**os.environ, "PYTHONWARNINGS": "error"}
RECIPE = """
import torch
from cosmati import Classification, InMemory, RunConfig
from cosmati.models.mlp import MLP
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe


def model():
    return MLP((6, 8, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    return InMemory((torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)), 16)


def recipe():
    config = RunConfig(budget="12ba", num_microbatches=4, num_threads=1)
    optimizers = (SGD(lr=0.1),)
    return Recipe(name="small", model=model, loss=Classification(3), data=data, optimizers=optimizers, config=config)
"""


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(list_checkpoints(folder / "checkpoints")[0]).model)


@pytest.mark.timeout(300)
def test_torchrun_gives_the_bits_of_one_rank(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    alone, together = tmp_path / "alone", tmp_path / "together"
    train = ["-m", "cosmati", "train", str(tmp_path / "small.py"), "--run-folder"]
    subprocess.run([sys.executable, *train, str(alone)], check=True, capture_output=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *train, str(together)], check=False, capture_output=True, text=True, env=STRICT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("small: completed after 12 steps") == 1
    one, two = _weights(alone), _weights(together)
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
