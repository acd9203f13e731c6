"""Benchmark (b) on a GPU: d = 768, 12 blocks, bfloat16, V = 8, 16k and 65k tokens a microbatch. See gpu.sh."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.measure import write
from benchmarks.routing_cost import Size, V, compare
from cosmati.models.size import count_parameters


def main() -> None:
    """Run it, and write its results to `$OUT` or `benchmarks/results`."""
    folder = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    for tokens, steps in ((16_384, 3), (65_536, 2)):
        size = Size(768, 12, tokens, 1024, "cuda", bfloat16=True)
        torch.cuda.reset_peak_memory_stats()
        rows = compare(size, steps, 3)
        notes = {
            "parameters": count_parameters(size.model()),
            "V": V,
            "tokens a microbatch": tokens,
            "peak memory, GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        }
        print(write(f"routing_cost_gpu_{tokens}", rows, notes, folder), flush=True)


if __name__ == "__main__":
    main()
