"""What routing costs on a GPU: d = 768, 12 blocks, bfloat16, V = 8, 16k and 65k tokens a microbatch. See gpu.sh."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks import isolated_cost, routing_cost, strategies, token_routing
from benchmarks.over_plain import table

MEASURED = (
    ("routing_cost", routing_cost.Size, routing_cost.arms_of, 65_536),
    ("routing_cost", routing_cost.Size, routing_cost.arms_of, 16_384),
    ("token_routing", token_routing.Packs, token_routing.arms_of, 16_384),
    ("isolated_cost", isolated_cost.Tokens, isolated_cost.arms_of, 16_384),
    ("strategies", token_routing.Packs, strategies.arms_of, 16_384),
)


def main() -> None:
    """Run it, and write its results to `$OUT` or `benchmarks/results`."""
    folder = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    for name, size, arms_of, tokens in MEASURED:
        large = size(768, 12, tokens, 1024, "cuda", bfloat16=True)
        print(table(f"{name}_gpu_{tokens}", large, arms_of, steps=2, rounds=3, folder=folder), flush=True)


if __name__ == "__main__":
    main()
