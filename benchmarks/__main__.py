"""`python -m benchmarks [NAME ...] [--quick] [--only TEXT] [--rounds N]`: results go to `benchmarks/results/`."""

from __future__ import annotations

import argparse

from benchmarks import (
    accumulation,
    augmentations,
    checkpoints,
    composed,
    decoding,
    import_cost,
    isolated_cost,
    ledger_learning,
    ledger_queries,
    loop_overhead,
    method_cost,
    policy_compile,
    remote,
    routing_cost,
    scaling,
    strategies,
    streaming,
    token_routing,
    virtual_shards,
    vouching,
    watching,
)

BENCHMARKS = {
    "accumulation": accumulation.run,
    "loop_overhead": loop_overhead.run,
    "routing_cost": routing_cost.run,
    "scaling": scaling.run,
    "checkpoints": checkpoints.run,
    "virtual_shards": virtual_shards.run,
    "strategies": strategies.run,
    "import_cost": import_cost.run,
    "streaming": streaming.run,
    "token_routing": token_routing.run,
    "isolated_cost": isolated_cost.run,
    "remote": remote.run,
    "method_cost": method_cost.run,
    "augmentations": augmentations.run,
    "composed": composed.run,
    "decoding": decoding.run,
    "watching": watching.run,
    "vouching": vouching.run,
    "policy_compile": policy_compile.run,
    "ledger_queries": ledger_queries.run,
    "ledger_learning": ledger_learning.run,
}

WITH_CASES = ("accumulation", "scaling")
"""Of these, single results can be measured."""


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs; not for quoting")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help=f"only results that have this in their name, of {' or '.join(WITH_CASES)}: --only ddp_07m_512_v2",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        metavar="N",
        help=f"rounds of each result of {' or '.join(WITH_CASES)}, where a difference is small and the machine noisy",
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    names, told = arguments.names or list(BENCHMARKS), {}
    for option in ("only", "rounds"):
        if value := getattr(arguments, option):
            if not set(names) <= set(WITH_CASES):
                parser.error(f"--{option} is for {' and '.join(WITH_CASES)}: name one of them")
            told[option] = value
    if arguments.rounds < 0 or arguments.rounds == 1:
        parser.error("--rounds 2 or more, for quartiles")
    is_any = False
    for name in names:
        if tables := BENCHMARKS[name](quick=arguments.quick, **told):
            print(tables, flush=True)
            is_any = True
    if not is_any:
        parser.error(f"no result has {arguments.only!r} in its name (see benchmarks/results/)")


if __name__ == "__main__":
    main()
