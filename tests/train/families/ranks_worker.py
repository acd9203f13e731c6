"""One rank of `test_ranks.py`: `ranks_worker.py FILE`. Each family, by pure microbatches and by packs; rank 0 tells."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.core.plan import Promise
from cosmati.core.state import parameter_root
from tests.train.families.samples import BIASED, FAMILIES, OPTIMIZERS, language, microbatches, policy, trainer
from tests.train.packs import samples as packs

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main() -> None:
    """Train each family, and write the digest of what it has become, and whether it's promised to be the same."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Parameters are read in ways")
    if WORLD > 1:
        dist.init_process_group("gloo")
    found = {}
    for index, (name, family) in enumerate({**FAMILIES, "biased": BIASED}.items()):
        optimizers = list(OPTIMIZERS.values())[index % len(OPTIMIZERS)]
        network = family.model()
        made = trainer(family, network, optimizers(), policy(family))
        with made:
            for step in range(2):
                batches = microbatches(family, "pure", step)
                made.step_microbatches(batches[RANK::WORLD], [batch.class_id for batch in batches])
        kept = parameter_root(dict(made.model.state_dict())).hex()
        found[f"{name}, pure"] = [kept, made.plan.holds(Promise.ELASTIC)]
        if family.loss is language:
            network = family.model()
            data = packs.source(packs.documents(60), rows_per_step=8)
            made = packs.trainer(
                network, data, policy(family), optimizers=optimizers(), budget="2ba", num_microbatches=4
            )
            made.fit()
            kept = parameter_root(dict(made.model.state_dict())).hex()
            found[f"{name}, packed"] = [kept, made.plan.holds(Promise.ELASTIC)]
    if RANK == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
