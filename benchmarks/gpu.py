"""What training costs on a GPU: d = 768, 12 blocks, bfloat16, V = 8, 16k and 65k tokens a microbatch. See gpu.sh.

python -m benchmarks.gpu [NAME ...] [--dry-run]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks import isolated_cost, over_plain, routing_cost, scaling_gpu, strategies, token_routing
from benchmarks.over_plain import table

MEASURED = (
    ("scaling", over_plain.Size, scaling_gpu.arms_of, 16_384),
    ("routing_cost", routing_cost.Size, routing_cost.arms_of, 65_536),
    ("routing_cost", routing_cost.Size, routing_cost.arms_of, 16_384),
    ("token_routing", token_routing.Packs, token_routing.arms_of, 16_384),
    ("isolated_cost", isolated_cost.Tokens, isolated_cost.arms_of, 16_384),
    ("strategies", token_routing.Packs, strategies.arms_of, 16_384),
)
NAMES = tuple(dict.fromkeys(name for name, *_ in MEASURED))


def run(names: list[str], folder: Path | None, *, is_dry: bool) -> None:
    """Run what is named, and write its results.

    Args:
        names: of `NAMES`; all where none is.
        folder: for the results; None is `benchmarks/results`.
        is_dry: a tiny model on the CPU, two rounds: to see that it runs.
    """
    for name, size, arms_of, tokens in MEASURED:
        if names and name not in names:
            continue
        of = size.on_cpu(tokens, quick=True) if is_dry else size(768, 12, tokens, 1024, "cuda", bfloat16=True)
        suffix, rounds = ("dry", 2) if is_dry else (f"gpu_{tokens}", 3)
        print(table(f"{name}_{suffix}", of, arms_of, steps=2, rounds=rounds, folder=folder), flush=True)
        if name == "scaling":
            print(scaling_gpu.hashing(f"hashing_{suffix}", of, rounds=rounds, folder=folder), flush=True)


def main() -> None:
    """Run what the command line names; results go to `$OUT` or `benchmarks/results`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)}; all by default")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU, to see that it runs")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"nothing called {', '.join(unknown)} is measured; there are {', '.join(NAMES)}")
    run(arguments.names, Path(os.environ["OUT"]) if "OUT" in os.environ else None, is_dry=arguments.dry_run)


if __name__ == "__main__":
    main()
