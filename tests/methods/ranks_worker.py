"""One rank: trains every case of the contract suite, and rank 0 writes what each ended with: `ranks_worker.py OUT`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.core.state import parameter_root
from cosmati.methods import ChannelsLast, GradientClipping

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.methods.cases import CASES, everything, run_of, trainer
from tests.train.strategies import whole_runs as strategies


def main() -> None:
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    found = {}
    # Norms follow a gradient's strides, which a flat buffer on its way between ranks doesn't keep by itself.
    clipped = trainer([ChannelsLast(), GradientClipping(clipping_type="norm", clipping_threshold=0.05)])
    governed = {str(one): strategies.whole_run(one) for one in strategies.BOTH}
    runs = {**{str(case): run_of(case) for case in CASES}, "ChannelsLast, clipped": clipped, **governed}
    for name, run in runs.items():
        run.fit()
        found[name] = {
            "elastic": run.plan.holds("elastic"),
            "root": parameter_root(everything(run)).hex(),
            "steps": run.clock.step,
        }
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
        # Threads that outlive the group may bring the process down while the interpreter ends.
        tasks = Path("/proc/self/task")
        left = [(task / "comm").read_text().strip() for task in tasks.iterdir()] if tasks.exists() else []
        assert "pt_gloo_runloop" not in left, left


if __name__ == "__main__":
    main()
