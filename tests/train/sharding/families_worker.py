"""One rank of `test_families.py`: `families_worker.py FOLDER SHARDING`; rank 0 writes FOLDER/facts.json.

Every family of models by every kind of optimizer, governed and not. Rows are in the caller's hands: each rank is given
its own microbatches, as the layout has shared them out.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cosmati.core.batch import Batch, Lineage
from cosmati.core.method import Method
from cosmati.core.plan import Promise
from cosmati.core.state import parameter_root
from cosmati.methods import EMA, SAM, GradientClipping
from cosmati.optim import SGD, SOAP, AdamW, Muon, Optimizer
from cosmati.train.config import RunConfig
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.trainer import Trainer
from tests.train.families.samples import CLASSES, FAMILIES, TAXONOMY, Family, policy

MICROBATCHES, ROWS, STEPS = 8, 2, 3
OPTIMIZERS: dict[str, tuple[Callable[[], list[Optimizer]], list[Method]]] = {
    "SGD": (lambda: [SGD(lr=0.1, momentum=0.9, weight_decay=0.01)], [EMA(half_life="2ba")]),
    "AdamW": (
        lambda: [AdamW(lr=0.01, weight_decay=0.1)],
        [GradientClipping(clipping_type="norm", clipping_threshold=0.3)],
    ),
    "Muon": (lambda: [Muon(lr=0.02), AdamW(lr=0.01)], []),
    "SOAP": (lambda: [SOAP(lr=0.01)], [SAM()]),
}


def microbatches(family: Family, step: int) -> list[Batch]:
    """Return a step's microbatches, each of one class."""
    found = []
    for index in range(MICROBATCHES):
        first = ROWS * (MICROBATCHES * step + index)
        class_id = TAXONOMY.id_of(CLASSES[index * index % 3])  # 0, 1, 1: ranks of a slot have unlike routes
        data = family.make(torch.Generator().manual_seed(first), ROWS)
        lineage = Lineage(first + torch.arange(ROWS), torch.full((ROWS,), class_id))
        found.append(Batch(data, lineage, class_id))
    return found


def train(family: Family, optimizers: list[Optimizer], methods: Sequence[Method], folder: Path, **more: Any) -> Any:
    """Train a few steps, and return digests of all that was kept, and the losses."""
    config = RunConfig(
        budget=f"{STEPS}ba", num_microbatches=MICROBATCHES, num_threads=1, run_folder=folder, **more.pop("config")
    )
    made = Trainer(family.model(), family.loss, optimizers=optimizers, methods=methods, config=config, **more)
    losses = []
    with made:
        for step in range(STEPS):
            batches = microbatches(family, step)
            own = [batches[index] for index in made.assembly.layout.mine]
            losses.append(float(made.step_microbatches(own, [batch.class_id for batch in batches]).loss))
    last = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    return {
        "step": last.step,
        "losses": losses,
        "model": parameter_root(last.model).hex(),
        "state": parameter_root(last.state).hex(),
        "elastic": made.plan.holds(Promise.ELASTIC),
    }


def main() -> None:
    """Run one rank."""
    folder, sharding = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Parameters are read in ways")
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    found = {}
    for name, family in FAMILIES.items():
        for kind, (optimizers, methods) in OPTIMIZERS.items():
            for is_governed in (False, True):
                more: dict[str, Any] = {"policy": policy(family), "taxonomy": TAXONOMY} if is_governed else {}
                case = f"{name}, {kind}{', governed' * is_governed}"
                config = {"sharding": sharding, "ledger": False}
                where = folder / case.replace(" ", "-")
                found[case] = train(family, optimizers(), methods, where, config=config, **more)
    if os.environ["RANK"] == "0":
        (folder / "facts.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
