"""One rank of `test_ranks.py`: `ranks_worker.py FOLDER`. Runs pipelines, and compares its own microbatches."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from cosmati.methods import LabelSmoothing, MixUp, SelectiveBackprop, SeqLengthWarmup
from tests.train.tags.content import LENGTH
from tests.train.tags.pipelines import Pipeline, number_of, trained
from tests.train.tags.test_pipelines import compare_images, compare_packs, compare_sequences

SELECT = SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)
SHORTER = SeqLengthWarmup(duration=1.0, min_seq_length=2, max_seq_length=LENGTH, step_size=1, truncate=False)
PIPELINES = [
    Pipeline("images", "streamed", 4, 4, "pad", True, (MixUp(alpha=3.0), SELECT), False, False, 1, 1.5),
    Pipeline("images", "list", 2, 4, "pad", False, (MixUp(alpha=3.0),), False, False, 2, 1.0),
    Pipeline("tokens", "streamed", 4, 2, "carry", False, (LabelSmoothing(smoothing=0.1), SHORTER), False, True, 3, 2.0),
    Pipeline("tokens", "memory", 2, 4, "pad", True, (), True, False, 4, 1.0),
    Pipeline("packs", "streamed", 4, 2, "pad", True, (SHORTER, SELECT), False, False, 5, 1.0),
    Pipeline("packs", "memory", 2, 4, "pad", True, (), True, True, 6, 1.0),
]


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
