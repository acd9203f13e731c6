"""One rank of `test_sharding.py`: `worker.py FOLDER SHARDING STOP CASE ...`; rank 0 writes FOLDER/facts.json.

Each case trains in FOLDER/CASE, to the end where STOP is 0, or goes on there. Where the environment has DIES_AT,
`WHAT NUMBER`, the last rank kills itself as it begins that exchange of "gradients" or "parameters", of which each step
has one, and there are checkpoints every second step.
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
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.method import Method
from cosmati.core.state import parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.methods import EMA, SAM, GradientClipping, LayerFreezing, MixUp
from cosmati.optim import SGD, SGDW, SOAP, AdamW, Cosine, Lion, Muon, NorMuon, ScheduleFreeAdamW, Sophia
from cosmati.optim.optimizers import Optimizer
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy, batches
from cosmati.train.layout.exchange import RankSum
from cosmati.train.layout.optimizer_sharded import OptimizerSharded
from cosmati.train.layout.owned import OwnedCut
from cosmati.train.observers import Observer, StepReport
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer

STEPS, MICROBATCHES = 7, 8


def _clipped(kind: Any, threshold: float, *, per_region: bool = False) -> GradientClipping:
    return GradientClipping(clipping_type=kind, clipping_threshold=threshold, per_region=per_region)


CASES: dict[str, tuple[Sequence[Optimizer], Sequence[Method]]] = {
    "sgd": ([SGD(lr=0.1, momentum=0.9, schedule=Cosine())], [_clipped("norm", 0.5)]),
    "sgd fused": ([SGD(lr=0.1, momentum=0.9, fused=True)], [EMA(half_life="3ba")]),
    "adamw": ([AdamW(lr=1e-2, weight_decay=0.1, decay_vectors=False)], [SAM(), MixUp()]),
    "adamw fused": ([AdamW(lr=1e-2, fused=True, schedule=Cosine())], [_clipped("adaptive", 0.1)]),
    "on spheres": (
        [AdamW(lr=1e-2, parameters=("blocks.*.weight", "table"), weight_decay=0.0, hyperball=True), SGDW(lr=0.1)],
        [],
    ),
    "muon": ([Muon(lr=0.02, schedule=Cosine()), AdamW(lr=1e-2)], [EMA(half_life="3ba"), LayerFreezing()]),
    "muon in bfloat16": ([Muon(lr=0.02, bfloat16=True), Lion(lr=1e-3)], []),
    "normuon": ([NorMuon(lr=0.02), Sophia(lr=1e-2, num_labels=40)], [_clipped("norm", 1.0)]),
    "soap": ([SOAP(lr=1e-2, precondition_frequency=2)], [_clipped("value", 0.1)]),
    "schedule-free": ([ScheduleFreeAdamW(lr=1e-2)], []),
    "routed": ([AdamW(lr=1e-2)], [_clipped("norm", 0.5, per_region=True), SAM(interval=2)]),
}
TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output")))
POLICY = """
version: 1
taxonomy: t
regions:
  near_input: {params: ["conv.*", "norm.*", "table"]}
  near_output: {params: "*", exclude: ["conv.*", "norm.*", "table"]}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 0.5}
"""


class Net(nn.Module):
    """A convolution kept channels-last, BatchNorm, a table that is most of the model, and what is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.table = nn.Parameter(torch.randn(5, 250) / 10)
        self.blocks = nn.ModuleList([nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 12)])
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(images))).flatten(1)
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        logits = self.head(nn.functional.dropout(hidden, 0.2, self.training))
        return logits + logits.softmax(-1) @ self.table.tanh().sum(1, keepdim=True) * self.table[:, :5].mean()


class Watch(Observer):
    """Keep what steps report, and ask the run to stop after one."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.seen: list[list[float]] = []

    def on_step(self, report: StepReport) -> None:
        self.seen.append([float(report.loss), report.gradient_norm()])
        if report.clock.step == self.stop:
            os.kill(os.getpid(), 2)


def make_trainer(case: str, folder: Path | None, sharding: Any, watch: Watch) -> Trainer:
    """Return the trainer of a case; everything follows from fixed seeds."""
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(96, 2, 6, 6, generator=generator), torch.randint(5, (96,), generator=generator))
    classes = (torch.arange(96) % 3 == 0).long() if case == "routed" else None
    more: dict[str, Any] = {"policy": load_policy(POLICY), "taxonomy": TAXONOMY} if case == "routed" else {}
    names = {"class_ids": classes, "class_names": ("open", "doubtful")} if case == "routed" else {}
    torch.manual_seed(0)
    optimizers, methods = CASES[case]
    return Trainer(
        Net(),
        Classification(5),
        InMemory(data, 32, tail="pad", **names),
        optimizers=optimizers,
        methods=methods,
        evaluation=Evaluation(batches(data, 32), {"accuracy": accuracy}),
        observers=[watch],
        config=RunConfig(
            budget=f"{STEPS}ba",
            num_microbatches=MICROBATCHES,
            num_threads=1,
            run_folder=folder,
            sharding=sharding,
            gather_precision="bfloat16" if case == "routed" else "float32",
            checkpoint_every="2ba" if "DIES_AT" in os.environ else None,
            ledger=False,
        ),
        **more,
    )


def run(case: str, folder: Path, sharding: str, stop: int) -> dict[str, Any]:
    """Train a case, and return digests and figures."""
    watch = Watch(stop)
    trainer = make_trainer(case, folder, sharding, watch)
    result = trainer.fit()
    with trainer.averaged() as model:
        averaged = parameter_root(dict(model.state_dict())).hex()
    last = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    layout = trainer.assembly.layout
    assert isinstance(layout, OptimizerSharded) == (sharding == "optimizer" and int(os.environ["WORLD_SIZE"]) > 1)
    return {
        "elastic": trainer.plan.holds("elastic"),
        "outcome": result.outcome,
        "step": last.step,
        "model": {name: parameter_root({name: value}).hex() for name, value in sorted(last.model.items())},
        "state": {name: parameter_root({name: value}).hex() for name, value in sorted(last.state.items())},
        "groups": last.facts["optimizers"],
        "averaged": averaged,
        "metrics": dict(result.metrics),
        "seen": watch.seen,
    }


def _die_in_exchange(what: str, number: str) -> None:
    holder, name = {"gradients": (RankSum, "_send"), "parameters": (OwnedCut, "spread")}[what]
    exchange, numbers = getattr(holder, name), itertools.count(1)

    def die(*args: Any) -> None:
        if next(numbers) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(*args)

    setattr(holder, name, die)


def main() -> None:
    """Run one rank."""
    base, sharding, stop, cases = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
        if "DIES_AT" in os.environ and dist.get_rank() == dist.get_world_size() - 1:
            _die_in_exchange(*os.environ["DIES_AT"].split())
    facts = {case: run(case, base / case, sharding, stop) for case in cases}
    if os.environ["RANK"] == "0":
        (base / "facts.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
