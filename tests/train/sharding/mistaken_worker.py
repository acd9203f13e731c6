"""Ranks that compute a model of the user's own together, with a slip in it: `mistaken_worker.py DEGREE SLIPS`.

SLIPS have commas between. Each rank prints, as JSON, what's said of each slip, or the weights' root where nothing is.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.loss import LanguageModel
from cosmati.core.state import parameter_root
from cosmati.core.virtual_shards import VirtualShards
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

TOKENS, SHARDS = 11, 4
ROWS = torch.randint(TOKENS, (16, 6), generator=torch.Generator().manual_seed(1))


class Own(nn.Module):
    """A feed-forward layer in parts.

    Args:
        slip: what is wrong with it.
        told: of which parameters it says that they're cut.
    """

    def __init__(self, slip: str = "none", told: object = None) -> None:
        super().__init__()
        self.slip, self.told = slip, {"up.weight": 0, "down.weight": 1} if told is None else told
        self.embedding, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.bias = nn.Parameter(torch.full((8,), 0.1))
        self.norm = nn.BatchNorm1d(16 // SHARDS, affine=False)
        self.shards: VirtualShards | None = None
        self.num_runs = 0

    def compute_in_parts(self, shards: VirtualShards | None) -> object:
        self.shards = shards
        return self.told

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_runs += self.training
        hidden, shards = self.embedding(tokens), self.shards or VirtualShards(SHARDS)
        copies = [hidden] * len(shards.own) if self.slip == "no copies" else shards.copies(hidden)
        cut = zip(copies, shards.weights(self.up.weight, 0), shards.weights(self.down.weight, 1), strict=True)
        parts = [F.linear(self._within(F.linear(one, up).tanh()), down) for one, up, down in cut]
        if self.slip == "a bias in each part":
            parts = [part + self.bias for part in parts]
        hidden = hidden + (sum(parts) if self.slip == "no total" else shards.total(parts))
        if self.slip == "draws on the last rank" and shards.own.start:
            torch.rand(1)
        # Of seconds, float32 keeps no more than some milliseconds.
        odd = 1 + time.perf_counter_ns() % 1_000_003 if self.slip == "another loss each time" else 1
        return self.head(hidden) * odd

    def _within(self, hidden: Tensor) -> Tensor:
        if self.slip == "draws":
            return F.dropout(hidden, 0.5, self.training)
        return self.norm(hidden.flatten(0, 1)).view_as(hidden) if self.slip == "statistics" else hidden


def planned(model: nn.Module, degree: int = 1, **changed: object) -> Trainer:
    """Return the trainer of a model; everything follows from fixed seeds."""
    config = RunConfig(
        budget="2ba", num_microbatches=2, num_threads=1, virtual_shards=SHARDS, tensor_parallel=degree, **changed
    )
    return Trainer(model, LanguageModel(TOKENS), InMemory(ROWS, 8), optimizers=AdamW(lr=1e-2), config=config)


def said_of(slip: str, degree: int) -> str:
    """Train a model with a slip in it; return with what it's refused."""
    torch.manual_seed(0)
    trainer = planned(Own(slip), degree)
    begun = parameter_root(dict(trainer.model.state_dict()))
    try:
        trainer.fit()
    except PlanError as error:
        assert parameter_root(dict(trainer.model.state_dict())) == begun, "before the first commit"
        return str(error)
    assert trainer.model.shards.peers.degree == degree, "it's cut as before"
    return f"{parameter_root(dict(trainer.model.state_dict())).hex()}, {trainer.model.num_runs} runs"


def main() -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    sys.stdout.write(json.dumps({slip: said_of(slip, int(sys.argv[1])) for slip in sys.argv[2].split(",")}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
