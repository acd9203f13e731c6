"""One rank of `test_ranks.py`: `ranks_worker.py FOLDER`. A run on packs with a ledger; rank 0 writes FOLDER/facts.json.

Documents of the last microbatch see one another, which only the rank that runs it can notice.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cosmati.core.loss import LanguageModel
from cosmati.core.state import parameter_root
from cosmati.ledger.query import VerifiedLedger, contributions
from cosmati.methods import EMA, GradientClipping
from cosmati.optim import AdamW, Muon
from cosmati.routing.selective_masking import SelectiveGradientMasking
from tests.train.packs.samples import VOCABULARY, documents, model, policy, source, trainer


def together(network: nn.Module, data: Any) -> Any:
    """Take the documents of packs that begin with an odd token for one."""
    documents = torch.where(data["input"][:, :1] % 2 == 1, 0, data["documents"])
    return LanguageModel(VOCABULARY)(network, {**data, "documents": documents})


def run(folder: Path, loss: Any, *more: Any) -> dict[str, Any]:
    """Train, and return what a run on another number of ranks is compared by."""
    config = {"run_folder": folder, "details_every": 1}
    made = trainer(
        model(dropout=0.1),
        source(documents(90), rows_per_step=8),
        policy(),
        loss=loss,
        optimizers=[Muon(lr=0.02), AdamW(lr=0.01)],
        methods=[
            EMA(half_life="2ba"),
            GradientClipping(clipping_type="norm", clipping_threshold=0.1, per_region=True),
            *more,
        ],
        budget="6ba",
        num_microbatches=4,
        config=config,
    )
    made.fit()
    facts = {"model": parameter_root(dict(made.model.state_dict())).hex(), "plan": list(map(str, made.plan.guarantees))}
    if os.environ["RANK"] != "0":
        return facts
    ledger = VerifiedLedger(folder / "ledger")
    cells = [
        [(c.class_id, c.phase, c.route_id, c.num_rows, c.weight) for c in entry.microbatches]
        for _, entry, _ in ledger.steps()
    ]
    table = [(c.class_name, c.region, c.num_rows, c.weight) for c in contributions(ledger).cells]
    return facts | {"cells": cells, "contributions": table}


def main() -> None:
    """Run one rank."""
    base = Path(sys.argv[1])
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    facts = {"apart": run(base / "apart", None), "together": run(base / "together", together)}
    facts["masked"] = run(base / "masked", None, SelectiveGradientMasking(forget="upper"))
    if os.environ["RANK"] == "0":
        (base / "facts.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
