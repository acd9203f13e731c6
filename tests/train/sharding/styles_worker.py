"""One rank of the tests of styles: `styles_worker.py train FOLDER CASES STOP T SHARDING`, `slips T`, `peer`, `dies`.

`train` runs cases, which have commas between, and rank 0 writes what came out of each as JSON; STOP 0 goes to the end.
`slips` has each rank print, as JSON, what's said of each model that can't be cut so. `peer` has each rank print by how
much loss and gradients differ from those of PyTorch's own `parallelize_module`, in float64. In `dies` the second rank
is killed before the first step, and the other one prints what it says of that. DIES_AT is as for `virtual_worker`.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cosmati.core.loss import LanguageModel
from cosmati.core.parallel_styles import ColwiseLinear, StyledShards, cut_by_styles, named_styles
from cosmati.core.state import parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.launch.worker import is_of_others
from cosmati.methods import EMA, SAM, GradientClipping
from cosmati.optim import AdamW, Cosine, Muon
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, batches
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.observers import Observer
from cosmati.train.ranks import Ranks
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train.elastic_worker import StopAt
from tests.train.sharding.full_worker import give_same_secrets, standing
from tests.train.sharding.virtual_worker import agreed, die_at

STEPS, LENGTH, TOKENS, WIDTH, HEAD = 6, 10, 23, 32, 4
ROWS = torch.randint(TOKENS, (60, LENGTH + 1), generator=torch.Generator().manual_seed(1))
STYLES = {
    "blocks.*.attention.[qkv]": "colwise",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.feed_forward.gate": ColwiseParallel(),
    "blocks.*.feed_forward.up": ColwiseParallel(),
    "blocks.*.feed_forward.down": RowwiseParallel(),
}
TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output")))
POLICY = """
version: 1
taxonomy: t
regions:
  near_input: {params: ["embedding.*", "blocks.0.*", "blocks.1.attention.*"]}
  near_output: {params: "*", exclude: ["embedding.*", "blocks.0.*", "blocks.1.attention.*"]}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 0.5}
"""
CLIPPED = GradientClipping(clipping_type="norm", clipping_threshold=0.3)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"optimizers": AdamW(lr=1e-2, schedule=Cosine()), "methods": [CLIPPED, EMA(half_life="3ba")]},
    "routed": {"optimizers": AdamW(lr=1e-2), "methods": [SAM(interval=2)], "policy": True},
    "muon": {"optimizers": [Muon(lr=0.02), AdamW(lr=1e-2)], "methods": [], "precision": "bfloat16"},
}


class Attention(nn.Module):
    """Heads as wide as ever, however many a rank has: eight, and four of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (one(hidden).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(seen.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.norms[0](hidden)))
        return hidden + self.feed_forward(self.norms[1](hidden))


class Llama(nn.Module):
    """A model of somebody else's, who knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Slip(nn.Module):
    """A feed-forward layer with something between its two products that isn't cut.

    Args:
        slip: what it is.
    """

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.slip = slip
        self.embedding, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("largest", torch.zeros(()))
        if slip == "a complex buffer":
            self.register_buffer("rotations", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
        if slip == "a parameter before zeros":
            nn.init.zeros_(self.down.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        between = self.up(hidden).tanh()
        if self.slip == "a norm":
            between = F.rms_norm(between, between.shape[-1:])
        elif self.slip == "draws":
            between = F.dropout(between, 0.5, self.training)
        elif self.slip.startswith("a parameter"):
            between = between * self.scale
        elif self.slip == "a buffer":
            self.largest.copy_(between.detach().amax())
        elif self.slip == "a fixed number of heads":
            between = between.unflatten(-1, (4, 4)).cumsum(-1).flatten(-2)
        elif self.slip == "odd in two rows" and len(tokens) == 2 and isinstance(self.up, ColwiseLinear):
            between = between * 2
        elif self.slip == "rows in fours":
            assert len(tokens) % 4 == 0, f"{len(tokens)} rows make no fours"
        added = self.down(between)
        return self.head(hidden + (1e-6 * added if self.slip == "a parameter of little weight" else added))


BOTH = {"up": "colwise", "down": "rowwise"}
SLIPS = {
    "none": BOTH,
    "rows in fours": BOTH,
    "its own copy": BOTH,
    "an autocast of its own": BOTH,
    "standardised over rows": BOTH,
    "odd in two rows": BOTH,
    "a complex buffer": BOTH,
    "a norm": BOTH,
    "draws": BOTH,
    "a parameter": BOTH,
    "a parameter before zeros": BOTH,
    "a parameter of little weight": BOTH,
    "a parameter, no labels at first": BOTH,
    "a parameter, no loss at first": BOTH,
    "a buffer": BOTH,
    "a fixed number of heads": BOTH,
    "fails alone too": BOTH,
    "only one": {"up": "colwise"},
    "the other one": {"down": "rowwise"},
}


def loss_of(slip: str, model: nn.Module) -> Any:
    """Return the loss for a model with a slip."""
    whole = LanguageModel(TOKENS)
    if slip == "its own copy":  # from which it differs by rounding alone
        return partial(distilled, teacher=copy.deepcopy(model))
    if slip == "an autocast of its own":
        return under_autocast
    if slip == "standardised over rows":
        return standardised
    if slip == "fails alone too":
        return lambda model, rows: F.linear(model(rows[:, :-1]), torch.ones(1, 99)).sum()
    if slip.endswith("at first"):
        return partial(of_few, fill=0.0 if "labels" in slip else torch.nan)
    return whole


def of_few(model: nn.Module, rows: Tensor, *, fill: float) -> Tensor:
    """A loss that the first rows of a microbatch have no part in; alone they have none."""
    losses = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none").mean(1)
    return losses[2:].mean() if losses[2:].numel() else losses.sum() * fill


def standardised(model: nn.Module, rows: Tensor) -> Tensor:
    """Barlow Twins' correlations: of two rows nothing is left but which has more, and their gradients are noise."""
    pooled = model(rows[:, :-1]).mean(1)
    scaled = (pooled - pooled.mean(0)) / (pooled.std(0) + 1e-6)
    return (scaled.T @ scaled / len(scaled) - torch.eye(TOKENS)).square().sum()


def distilled(model: nn.Module, rows: Tensor, *, teacher: nn.Module) -> Tensor:
    """How far a model is from another one."""
    with torch.no_grad():
        aim = teacher(rows[:, :-1])
    return F.mse_loss(model(rows[:, :-1]), aim)


def under_autocast(model: nn.Module, rows: Tensor) -> Tensor:
    """A loss whose products are narrower than the run's precision says."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())


def make_trainer(case: str, degree: int, *, observers: Sequence[Observer] = (), **more: Any) -> Trainer:
    """Return the trainer of a case; everything follows from fixed seeds."""
    given, is_routed = CASES[case], "policy" in CASES[case]
    settings: dict[str, Any] = {
        "budget": f"{STEPS}ba",
        "num_microbatches": 4,
        "num_threads": 1,
        "precision": given.get("precision", "float32"),
        "tensor_parallel": degree,
        "parallel_styles": STYLES,
        "ledger": True,
        "details_every": 2,
        "update_norm_every": 2,
        "direction_every": 3,
        "digests_every": 3,
        "checkpoint_every": "2ba",
    }
    torch.manual_seed(0)
    named = {"class_ids": torch.arange(60) // 3 % 2, "class_names": ("open", "doubtful"), "tail": "pad"}
    return Trainer(
        Llama(),
        LanguageModel(TOKENS),
        InMemory(ROWS, 12, **(named if is_routed else {})),
        optimizers=given["optimizers"],
        methods=given["methods"],
        policy=load_policy(POLICY) if is_routed else None,
        taxonomy=TAXONOMY if is_routed else None,
        evaluation=Evaluation(batches(ROWS, 25), {"loss": LanguageModel(TOKENS)}),
        observers=observers,
        config=RunConfig(**{**settings, **more}),
    )


def train(case: str, base: Path, stop: int, degree: int, sharding: str) -> dict[str, Any]:
    """Train one case, and return digests and metrics."""
    folder = base / case
    give_same_secrets(folder)
    trainer = make_trainer(case, degree, observers=[StopAt(stop)], run_folder=folder, sharding=sharding)
    result = trainer.fit()
    assert not dist.is_initialized() or agreed(trainer.assembly.layout)
    last = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    return {
        "withdrawn": sorted(f"{g.name}: {g.because}" for g in trainer.plan.guarantees if not g.holds),
        "outcome": result.outcome,
        "step": last.step,
        "model": {name: parameter_root({name: value}).hex() for name, value in sorted(last.model.items())},
        "state": {name: parameter_root({name: value}).hex() for name, value in sorted(last.state.items())},
        "metrics": dict(result.metrics),
        "ledger": standing(folder / "ledger"),
    }


def said_of(slip: str, degree: int) -> str:
    """Train a model that can or can't be cut so; return with what it's refused."""
    torch.manual_seed(0)
    config = RunConfig(budget="4ba", num_microbatches=2, parallel_styles=SLIPS[slip], tensor_parallel=degree)
    model, rows = Slip(slip), ROWS[:16]
    source = InMemory(rows, 8)
    trainer = Trainer(model, loss_of(slip, model), source, optimizers=AdamW(lr=1e-2), config=config)
    begun = parameter_root(dict(trainer.model.state_dict()))
    try:
        outcome = trainer.fit().outcome
    except (PlanError, RuntimeError) as error:
        is_first = parameter_root(dict(trainer.model.state_dict())) == begun
        return f"{type(error).__name__} after {'no' if is_first else 'some'} steps: {error}"
    kinds = type(trainer.model.up).__name__, type(trainer.model.down).__name__
    return f"{outcome}, {', '.join(kinds)}, in lockstep: {trainer.assembly.ranks.in_lockstep}"


class Dies(Slip):
    """The second rank ends, or breaks off, where it first computes a part."""

    def forward(self, tokens: Tensor) -> Tensor:
        if isinstance(self.up, ColwiseLinear) and dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens)


def loses_the_other() -> str:
    """Return what a rank says that loses the other one before the first step."""
    config = RunConfig(budget="4ba", num_microbatches=2, parallel_styles=BOTH, tensor_parallel=2)
    trainer = Trainer(
        Dies("none"), LanguageModel(TOKENS), InMemory(ROWS[:16], 8), optimizers=AdamW(lr=1e-2), config=config
    )
    try:
        return trainer.fit().outcome
    except (PlanError, RuntimeError) as error:
        return f"{type(error).__name__}, of others: {is_of_others(error)}"


def furthest_from_peer() -> float:
    """Return by how much loss or any gradient differs from PyTorch's own styles, of its norm."""
    torch.manual_seed(0)
    model = Llama().double().eval()
    peer = parallelize_module(
        copy.deepcopy(model),
        init_device_mesh("cpu", (dist.get_world_size(),)),
        # PyTorch takes an object for each; its styles keep no state.
        {name: {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()}[how] for name, how in named_styles(STYLES)},
    )
    peers = ReplicaPeers(Ranks(dist.get_world_size()))
    cut_by_styles(model, named_styles(STYLES), StyledShards(peers.degree, peers))
    found = []
    for one in (model, peer):
        loss = LanguageModel(TOKENS)(one, ROWS[:4]).mean()
        loss.backward()
        whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in one.named_parameters()}
        found.append({"loss": loss.detach(), **whole})
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name]).norm() / theirs["blocks.0.attention.q.weight"].norm()) for name in ours
    )


def main() -> None:
    """Run what's asked for under one process group."""
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    if "DIES_AT" in os.environ:
        die_at(*map(int, os.environ["DIES_AT"].split()))
    kind, *given = sys.argv[1:]
    if kind == "train":
        base, stop, degree = Path(given[0]), int(given[2]), int(given[3])
        found = {case: train(case, base, stop, degree, given[4]) for case in given[1].split(",")}
        if os.environ["RANK"] == "0":
            (base / f"{stop}.json").write_text(json.dumps(found))
    elif kind == "dies":
        sys.stdout.write(loses_the_other())
        sys.stdout.flush()
        os._exit(0)  # there's no group left to be left
    elif kind == "slips":
        sys.stdout.write(json.dumps({slip: said_of(slip, int(given[0])) for slip in SLIPS}))
    else:
        sys.stdout.write(json.dumps(furthest_from_peer()))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
