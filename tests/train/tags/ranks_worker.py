"""One rank of `test_ranks.py`: `ranks_worker.py FOLDER`. Runs pipelines, and compares its own microbatches."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.tags.pipelines import PIPELINES, number_of, trained
from tests.train.tags.test_pipelines import compare_images, compare_packs, compare_sequences


def main() -> None:
    """Run one rank; each rank writes the ids of the rows that it has trained on."""
    base, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    shards, seen = base / "shards", []
    for number, pipeline in enumerate(PIPELINES):
        dataset = pipeline.dataset(shards) if pipeline.road == "streamed" else None
        batches = trained(pipeline, shards, base / f"run-{number}")
        compare = {"images": compare_images, "tokens": compare_sequences, "packs": compare_packs}[pipeline.kind]
        for batch in batches:
            compare(batch, int if dataset is None else partial(number_of, dataset), pipeline)
        seen.append(sorted(row for batch in batches for row in batch.lineage.row_ids.tolist()))
    (base / f"seen-{rank}.json").write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
