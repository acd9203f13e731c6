"""One rank of `test_ranks.py`: `ranks_worker.py FILE`. Each family, by each strategy; rank 0 tells."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cosmati.core.batch import Batch, Lineage
from cosmati.core.plan import Promise
from cosmati.core.state import parameter_root
from cosmati.train.trainer import Trainer
from tests.train.families.samples import BIASED, FAMILIES, OPTIMIZERS, SIZES, language, microbatches, policy, trainer
from tests.train.families.samples import mixed as loaded
from tests.train.packs import samples as packs

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def what_became(made: Trainer) -> list[Any]:
    """Return the digest of a model, and whether it's promised to be the same on any number of ranks."""
    return [parameter_root(dict(made.model.state_dict())).hex(), made.plan.holds(Promise.ELASTIC)]


def main() -> None:
    """Train each family, and write the digest of what it has become, and whether it's promised to be the same."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Parameters are read in ways")
    if WORLD > 1:
        dist.init_process_group("gloo")
    found = {}
    for index, (name, family) in enumerate({**FAMILIES, "biased": BIASED}.items()):
        optimizers = list(OPTIMIZERS.values())[index % len(OPTIMIZERS)]
        for strategy in SIZES:
            made = trainer(family, family.model(), optimizers(), policy(family))
            with made:
                for step in range(2):
                    batches = microbatches(family, strategy, step)
                    mine = [batches[index] for index in made.assembly.layout.mine]
                    made.step_microbatches(mine, [batch.class_id for batch in batches])
            found[f"{name}, {strategy}"] = [*what_became(made), made.clock.rows, made.clock.tokens]
        if family.unit == "row":
            made = trainer(family, family.model(), optimizers(), policy(family))
            classes = torch.tensor([0, 2, 2, 1, 0, 2, 2, 2, 1, 2, 2])
            rows = family.make(torch.Generator().manual_seed(0), len(classes))
            made.step(Batch(rows, Lineage(torch.arange(len(classes)), classes)))
            found[f"{name}, mixed"] = [*what_became(made), made.clock.rows, made.clock.tokens]
            made = trainer(family, family.model(), optimizers(), policy(family), data=loaded(family), budget="2ba")
            made.fit()
            found[f"{name}, loaded"] = [*what_became(made), made.clock.rows, made.clock.tokens]
        if family.loss is language:
            data = packs.source(packs.documents(60), rows_per_step=8)
            made = packs.trainer(
                family.model(), data, policy(family), optimizers=optimizers(), budget="2ba", num_microbatches=4
            )
            made.fit()
            found[f"{name}, packed"] = what_became(made)
    if RANK == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
