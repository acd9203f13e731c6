"""One rank: trains every case of the contract suite, and rank 0 writes what each ended with: `ranks_worker.py OUT`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.core.state import parameter_root


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("contract", Path(__file__).with_name("test_contract.py"))
    assert spec is not None
    assert spec.loader is not None
    contract = importlib.util.module_from_spec(spec)
    sys.modules["contract"] = contract
    spec.loader.exec_module(contract)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    found = {}
    for case in contract.CASES:
        run = contract.trainer([case.on], is_text=case.is_text)
        run.fit()
        found[str(case)] = {
            "elastic": run.plan.holds("elastic"),
            "root": parameter_root(contract.everything(run)).hex(),
            "steps": run.clock.step,
        }
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
