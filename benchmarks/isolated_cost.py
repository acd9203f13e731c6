"""What isolated regions cost: a GPT, V = 8, one class with adapters or experts of its own, beside plain accumulation.

Arms differ in how many of the eight microbatches are of the class that has modules of its own. Operations are counted,
too; seconds on CPU are the process's own, so that what else the machine does counts less.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from benchmarks.over_plain import Size, Step, V, governed, table
from cosmati import Batch, Lineage, PolicyFile, Taxonomy, load_policy
from cosmati.methods import IsolatedAdapters

TAXONOMY = Taxonomy("t", "1", (("open", "free to learn from"), ("personal", "by itself")))
ADAPTERS = IsolatedAdapters(classes="personal", rank=8)
EXPERTS = IsolatedAdapters(classes="personal", layers="blocks.*.feed_forward", kind="expert")


class Tokens(Size):
    """What is measured: the model, and the microbatches of a step."""

    def batches(self, num_own: int) -> list[Batch]:
        """Return the microbatches, of which so many are of the class with modules of its own."""
        found = []
        for index, rows in enumerate(self.data):
            class_id = int(index * num_own // V < (index + 1) * num_own // V)
            lineage = Lineage(torch.arange(len(rows)) + index * len(rows), torch.full((len(rows),), class_id))
            found.append(Batch(rows, lineage, class_id))
        return found


def policy() -> PolicyFile:
    """Return the policy that confines the class."""
    return load_policy(
        "version: 1\ntaxonomy: t\n"
        "regions: {shared: {params: '*', exclude: '*.isolated.*'}, own: {tag: isolated/personal}}\nrules:\n"
        "  - {class: '**', weight: 1}\n  - {class: '**', region: own, weight: 0}\n"
        "  - {class: personal, region: shared, weight: 0}\n  - {class: personal, region: own, weight: 1}\n"
    )


def arms_of(size: Tokens, runs: ExitStack) -> dict[str, Step]:
    """Return the governed arms."""
    return {
        f"{kind}, {num_own} of 8 microbatches": governed(
            size, runs, size.batches(num_own), policy(), TAXONOMY, model=method.apply(size.model())
        )
        for kind, method in (("adapters", ADAPTERS), ("experts", EXPERTS))
        for num_own in (0, 2, 8)
    }


def run(*, quick: bool) -> str:
    """Run the benchmark on CPU, write its results and return the tables."""
    return "\n".join(
        table(
            f"isolated_cost_{tokens}" + "_quick" * quick,
            Tokens.on_cpu(tokens, quick=quick),
            arms_of,
            rounds=2 if quick else 12 if tokens < 2048 else 4,
        )
        for tokens in ((512,) if quick else (512, 2048))
    )
