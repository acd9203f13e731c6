"""One rank of the tests of virtual shards: `virtual_worker.py FOLDER CASES STOP U T SHARDING`.

CASES have commas between. Rank 0 writes what came out of each as JSON. STOP 0 goes to the end; U 0 cuts nothing. Where
the environment has DIES_AT, `RANK NUMBER`, that rank kills itself as it begins that exchange with others; CONTROL sums
parts otherwise than in the tree, and COMPARES lets it be seen before the first step.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.loss import LanguageModel
from cosmati.core.state import parameter_root
from cosmati.core.virtual_shards import VirtualShards
from cosmati.data.in_memory import InMemory
from cosmati.methods import EMA, SAM, SWA, GradientClipping, LabelSmoothing, LayerFreezing
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.optim import SGD, SOAP, AdamW, Cosine, Lion, Muon, NorMuon
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train import gradients
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, batches
from cosmati.train.layout.in_replicas import InReplicas
from cosmati.train.layout.optimizer_sharded import OptimizerSharded
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.layout.whole import Whole
from cosmati.train.observers import Observer
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train.elastic_worker import StopAt
from tests.train.sharding.full_worker import give_same_secrets, standing

STEPS, LENGTH, TOKENS = 6, 12, 23
TAXONOMY = Taxonomy(
    "t", "1", (("open", "free to learn from"), ("doubtful", "only near the output"), ("closed", "learnt from at first"))
)
POLICY = """
version: 1
taxonomy: t
regions:
  near_input: {params: ["embedding.*", "position.*", "blocks.0.*", "blocks.1.attention.*"]}
  near_output: {params: "*", exclude: ["embedding.*", "position.*", "blocks.0.*", "blocks.1.attention.*"]}
phases: [{name: first, until: 3ba}, {name: rest}]
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 0.5}
  - {class: closed, phase: first, weight: 0.25}
  - {class: closed, phase: rest, decision: reject}
"""
CLIPPED = GradientClipping(clipping_type="norm", clipping_threshold=0.3)
ADAMW = AdamW(lr=1e-2, weight_decay=0.1, schedule=Cosine())
CASES: dict[str, dict[str, Any]] = {
    "everything": {
        "model": {"dropout": 0.1, "value_embeddings": 1, "ngrams": (2,), "ngram_rows": 40, "qk_norm": True},
        "optimizers": [Muon(lr=0.02, schedule=Cosine()), AdamW(lr=1e-2)],
        "methods": [CLIPPED, EMA(half_life="3ba"), LabelSmoothing(smoothing=0.1)],
    },
    "routed": {
        "model": {"rotary": False, "dropout": 0.1},
        "optimizers": [ADAMW],
        "methods": [SAM(interval=2), CLIPPED],
        "policy": True,
    },
    "bfloat16": {
        "model": {"normalisation": "rms", "activation": "relu_squared", "tied": True, "all_scores": True},
        "optimizers": [SGD(lr=0.1, momentum=0.9)],
        "precision": "bfloat16",
    },
    "documents": {"model": {"document_end": 3, "logit_soft_cap": 5.0}, "optimizers": [ADAMW], "methods": [SWA()]},
    "frozen": {"optimizers": [ADAMW], "methods": [LayerFreezing(freeze_start=0.2, freeze_level=1.0)]},
    "double": {"type": torch.float64, "optimizers": [ADAMW], "methods": [EMA(half_life="3ba")]},
    "soap": {"optimizers": [SOAP(lr=1e-2, precondition_frequency=2)], "methods": [CLIPPED]},
    "rows": {"optimizers": [NorMuon(lr=0.02), Lion(lr=1e-3)]},
    "own": {"own": True, "optimizers": [ADAMW]},
    "narrow": {"type": torch.bfloat16, "optimizers": [ADAMW]},
}


class Own(nn.Module):
    """Says of one of its matrices another dimension than that along which it's cut, and nothing of the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS)
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.shards: VirtualShards | None = None

    def compute_in_parts(self, shards: VirtualShards | None) -> dict[str, int]:
        self.shards = shards
        return {"down.weight": 0}

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, shards = self.embedding(tokens), self.shards
        if shards is None:
            return self.head(hidden + self.down(self.up(hidden).tanh()))
        cut = zip(
            shards.copies(hidden),
            shards.weights(self.up.weight, 0),
            shards.weights(self.down.weight, 1),
            strict=True,
        )
        return self.head(hidden + shards.total([F.linear(F.linear(one, up).tanh(), down) for one, up, down in cut]))


def make_trainer(
    case: str, folder: Path, shards: int, degree: int, *, observers: Sequence[Observer] = (), **more: Any
) -> Trainer:
    """Return the trainer of a case; everything follows from fixed seeds."""
    given = CASES[case]
    settings: dict[str, Any] = {
        "budget": f"{STEPS}ba",
        "num_microbatches": 4,
        "num_threads": 1,
        "precision": given.get("precision", "float32"),
        "virtual_shards": shards or None,
        "tensor_parallel": degree,
        "ledger": True,
        "details_every": 2,
        "update_norm_every": 2,
        "direction_every": 3,
        "update_direction_every": 3,
        "digests_every": 3,
        "checkpoint_every": "2ba",
    }
    rows = torch.randint(TOKENS, (60, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    shape = {"vocabulary_size": TOKENS, "sequence_length": LENGTH, "width": 16, "num_blocks": 2, "num_heads": 4}
    gpt = GPTConfig(**{**shape, **given.get("model", {})})
    model = (Own() if "own" in given else GPT(gpt)).to(given.get("type", torch.float32))
    named = {"class_ids": torch.arange(60) // 3 % 3, "class_names": ("open", "doubtful", "closed"), "tail": "pad"}
    is_routed = "policy" in given
    return Trainer(
        model,
        LanguageModel(TOKENS),
        InMemory(rows, 12, **(named if is_routed else {})),
        optimizers=given["optimizers"],
        methods=given.get("methods", []),
        policy=load_policy(POLICY) if is_routed else None,
        taxonomy=TAXONOMY if is_routed else None,
        evaluation=Evaluation(batches(rows, 25), {"loss": LanguageModel(TOKENS)}),
        observers=observers,
        config=RunConfig(run_folder=folder, **{**settings, **more}),
    )


def control(kind: str) -> None:
    """Sum parts in the collective's own order, or from left to right, and let nobody compare them before."""
    if "COMPARES" not in os.environ:
        gradients.refuse_unlike_parts = lambda *_: None

    def total(self: ReplicaPeers, own: Tensor) -> Tensor:
        if kind == "all_reduce":
            own = own.clone()
            dist.all_reduce(own, group=self._group)
            return own
        first, *others = self.everyone(own)
        return sum(others, start=first)

    ReplicaPeers.total = total  # type: ignore[method-assign]


def die_at(rank: int, number: int) -> None:
    """Kill a rank as it begins an exchange of its own."""
    exchange, numbers = dist.all_to_all_single, itertools.count(1)

    def die(*args: Any, **more: Any) -> Any:
        if next(numbers) == number and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args, **more)

    dist.all_to_all_single = die


def agreed(layout: Any) -> bool:
    """Whether all ranks have the same weights to the last bit."""
    roots: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(roots, layout.digest())
    return len({*roots}) == 1


def run(case: str, base: Path, stop: int, shards: int, degree: int, sharding: str) -> dict[str, Any]:
    """Train one case, and return digests and metrics."""
    folder = base / case
    give_same_secrets(folder)
    trainer = make_trainer(case, folder, shards, degree, observers=[StopAt(stop)], sharding=sharding)
    result = trainer.fit()
    layout, is_parallel = trainer.assembly.layout, dist.is_initialized()
    assert not is_parallel or agreed(layout)
    kind = OptimizerSharded if sharding == "optimizer" else InReplicas if degree > 1 else Whole
    assert type(layout) is (kind if is_parallel else Whole)
    last = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    return {
        "withdrawn": sorted(f"{g.name}: {g.because}" for g in trainer.plan.guarantees if not g.holds),
        "outcome": result.outcome,
        "step": last.step,
        "model": {name: parameter_root({name: value}).hex() for name, value in sorted(last.model.items())},
        "state": {name: parameter_root({name: value}).hex() for name, value in sorted(last.state.items())},
        "metrics": dict(result.metrics),
        "signed": last.signed_digest.hex(),
        "ledger": standing(folder / "ledger"),
    }


def main() -> None:
    """Run the cases under one process group."""
    base, cases = Path(sys.argv[1]), sys.argv[2].split(",")
    stop, shards, degree = map(int, sys.argv[3:6])
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    if "CONTROL" in os.environ:
        control(os.environ["CONTROL"])
    if "DIES_AT" in os.environ:
        die_at(*map(int, os.environ["DIES_AT"].split()))
    found = {case: run(case, base, stop, shards, degree, sharding=sys.argv[6]) for case in cases}
    if os.environ["RANK"] == "0":
        (base / f"{stop}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
