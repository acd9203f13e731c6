"""One rank of `test_elastic_more.py`: `elastic_more_worker.py FOLDER STOP SHARDING`; STOP 0 goes to the end.

A governed run with SAM, clipping, averaged weights and a ledger, in FOLDER/run. Rank 0 writes FOLDER/facts.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.state import parameter_root
from cosmati.data.in_memory import InMemory
from cosmati.methods import EMA, SAM, GradientClipping
from cosmati.optim import AdamW, Cosine, Muon
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, accuracy, batches
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train.elastic_worker import ConvNet, StopAt

STEPS, MICROBATCHES = 16, 8
TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output")))
POLICY = """
version: 1
taxonomy: t
regions:
  near_input: {params: ["conv.*", "norm.*"]}
  near_output: {params: "*", exclude: ["conv.*", "norm.*"]}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 0.5}
"""


class DroppedThenNormed(ConvNet):
    """Dropout before BatchNorm too: what is recalibrated depends on draws."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(images, 0.3, self.training))


def make_trainer(folder: Path, stop: int, sharding: Any, *, draws_before_norm: bool = False) -> Trainer:
    """Return the trainer; everything follows from fixed seeds."""
    generator = torch.Generator().manual_seed(1)
    data = (torch.randn(250, 1, 8, 8, generator=generator), torch.randint(5, (250,), generator=generator))
    classes = (torch.arange(250) % 3 == 0).long()
    torch.manual_seed(0)
    return Trainer(
        DroppedThenNormed() if draws_before_norm else ConvNet(),
        Classification(5),
        InMemory(data, 64, class_ids=classes, class_names=("open", "doubtful"), tail="pad"),
        optimizers=[Muon(lr=0.02, schedule=Cosine()), AdamW(lr=1e-2)],
        methods=[
            SAM(interval=2),
            GradientClipping(clipping_type="norm", clipping_threshold=0.5),
            EMA(half_life="3ba"),
        ],
        policy=load_policy(POLICY),
        taxonomy=TAXONOMY,
        evaluation=Evaluation(batches(data, 32), {"accuracy": accuracy, "loss": Classification(5)}),
        observers=[StopAt(stop)],
        config=RunConfig(
            budget=f"{STEPS}ba",
            num_microbatches=MICROBATCHES,
            num_threads=1,
            run_folder=folder,
            sharding=sharding,
            details_every=1,
            update_norm_every=3,
            direction_every=2,
            update_direction_every=6,
            digests_every=4,
            entropy_every=5,
        ),
    )


def main() -> None:
    """Run one rank."""
    base, stop, sharding = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    trainer = make_trainer(base / "run", stop, sharding)
    result = trainer.fit()
    last = read_checkpoint(list_checkpoints(base / "run" / "checkpoints")[0])
    facts = {
        "elastic": trainer.plan.holds("elastic"),
        "outcome": result.outcome,
        "step": last.step,
        "model": parameter_root(last.model).hex(),
        "state": {name: parameter_root({name: value}).hex() for name, value in sorted(last.state.items())},
        "metrics": dict(result.metrics),
    }
    if not stop:
        # A run of its own, since its metric is known to be in doubt.
        drawn = make_trainer(base / "drawn", 0, sharding, draws_before_norm=True)
        facts["drawn"] = dict(drawn.fit().metrics)
    if os.environ["RANK"] == "0":
        (base / "facts.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
