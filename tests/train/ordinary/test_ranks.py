"""People's loaders and metrics under torchrun: the bits of one rank, whatever each process has drawn before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import launch_ranks

pytestmark = pytest.mark.long

SCRIPT = """
import json, os, random, sys
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from cosmati import Classification, Evaluation, RunConfig, Stateful, Trainer
from cosmati.optim import SGD


class Rows(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        noise = torch.rand(3).sum() + random.random() + float(np.random.rand())
        return {"name": f"row {index}", "x": torch.arange(3.0) * index / 48 + noise, "y": index % 3}


class Recall:
    def reset(self):
        self.hits, self.rows = torch.zeros(3), torch.zeros(3)

    def update(self, predicted, target):
        self.rows += torch.bincount(target, minlength=3)
        self.hits += torch.bincount(target[predicted == target], minlength=3)

    def compute(self):
        return {"macro": (self.hits / self.rows).mean(), "rows": self.rows.sum()}


class Named(Classification):
    def __call__(self, model, data):
        assert len(data["name"]) == len(data["x"])
        return super().__call__(model, data)


torch.manual_seed(0)
model = nn.Linear(3, 3)
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(rank + 1), random.seed(rank + 1), np.random.seed(rank + 1)
held = [(torch.eye(3)[[i % 3, 0]], torch.tensor([i % 3, 1])) for i in range(5)]
metrics = {"recall": Stateful(Recall(), lambda model, data: (model(data[0]).argmax(1), data[1])),
           "mean": lambda model, data: model(data[0]).mean()}
run = Trainer(model, Named(3), DataLoader(Rows(), batch_size=8, shuffle=True), optimizers=[SGD(lr=0.1)],
              evaluation=Evaluation(held, metrics), config=RunConfig(budget="2ep", num_microbatches=4, num_threads=1))
result = run.fit()
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({"weights": [p.tolist() for p in model.parameters()], "metrics": dict(result.metrics)}, file)
"""
SHARE = "\nfrom torch.utils.data import DistributedSampler\n"


def _result(script: Path, ranks: int) -> dict[str, Any]:
    out = script.with_name(f"{ranks}.json")
    launch_ranks([script, out], ranks)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.timeout(300)
def test_a_shuffling_loader_and_a_stateful_metric_are_those_of_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = _result(script, 1)
    assert alone["metrics"]["recall/rows"] == 10
    assert _result(script, 2) == alone


COUNTING = """
class Counting(nn.Linear):
    seen = 0.0

    def forward(self, rows):
        before, self.seen = self.seen, float(rows.mean())
        return super().forward(rows) + before * torch.arange(3.0)


torch.manual_seed(0)
model = Counting(3, 3)
rank = int(os.environ.get("RANK", 0))
held = [(torch.rand(8, 3), torch.arange(8) % 3) for _ in range(2)]
run = Trainer(model, Classification(3), held, optimizers=[SGD(lr=0.1)],
              config=RunConfig(budget="2ba", num_microbatches=4, num_threads=1))
run.fit()
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump({"weights": model.weight.tolist(), "parity": run.plan.holds("parity")}, file)
"""


@pytest.mark.timeout(300)
def test_state_that_forward_changes_breaks_parity_on_two_ranks(tmp_path: Path) -> None:
    """One rank takes all microbatches in their order, as a bare loop does; of two, each sees half of them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT[: SCRIPT.index("class Rows")] + COUNTING)
    alone, shared = _result(script, 1), _result(script, 2)
    assert alone["weights"] != shared["weights"]
    assert (alone["parity"], shared["parity"]) == (True, False)


@pytest.mark.timeout(300)
def test_a_distributed_sampler_is_refused_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    sampler = 'DistributedSampler(Rows(), num_replicas=int(os.environ["WORLD_SIZE"]), rank=rank)'
    made = f"DataLoader(Rows(), batch_size=8, sampler={sampler})"
    script.write_text(SHARE + SCRIPT.replace("DataLoader(Rows(), batch_size=8, shuffle=True)", made))
    with pytest.raises(AssertionError, match=r"each of 2 ranks a share of its own \(DistributedSampler\)"):
        _result(script, 2)
