"""(b) What routing and ledger cost: a GPT, V = 8, against plain accumulation of the same microbatches."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import over_plain
from benchmarks.over_plain import Step, governed, table
from cosmati import Batch, Lineage, PolicyFile, load_policy, software_licences

TAXONOMY = software_licences()
CLASSES = [TAXONOMY.id_of("open/permissive"), TAXONOMY.id_of("open/psf")]


class Size(over_plain.Size):
    """What is measured: the model and the microbatches of a step."""

    def batches(self, confined: int) -> list[Batch]:
        """Return the microbatches, every `confined`-th of the class that may only teach the upper half; 0 for none."""
        found = []
        for index, rows in enumerate(self.data):
            class_id = CLASSES[1 if confined and index % confined == 0 else 0]
            lineage = Lineage(torch.arange(len(rows)) + index * len(rows), torch.full((len(rows),), class_id))
            found.append(Batch(rows, lineage, class_id))
        return found

    def policy(self) -> PolicyFile:
        """Return a policy that keeps `open/psf` out of the embedding and the lower half of the blocks."""
        half = self.config.num_blocks // 2
        names = ", ".join(["'embedding.*'", *(f"'blocks.{i}.*'" for i in range(half))])
        lower = f"  lower: {{params: [{names}]}}\n"
        upper = f"  upper: {{params: '*', exclude: [{names}]}}\n"
        rules = "rules:\n  - {class: '**', weight: 1}\n  - {class: open/psf, region: lower, weight: 0}\n"
        return load_policy(f"version: 1\ntaxonomy: software-licences\nregions:\n{lower}{upper}{rules}")


def arms_of(size: Size, runs: ExitStack) -> dict[str, Step]:
    """Return the governed arms."""

    def arm(confined: int, *, ledger: bool = True, norms: bool = True) -> Step:
        folder = Path(runs.enter_context(tempfile.TemporaryDirectory())) / "run" if ledger else None
        every = 1 if norms else 1_000_000
        batches = size.batches(confined)
        return governed(size, runs, batches, size.policy(), TAXONOMY, run_folder=folder, details_every=every)

    return {
        "all-ones, ledger": arm(0),
        "all-ones, ledger without norms": arm(0, norms=False),
        "all-ones, no ledger (tree only)": arm(0, ledger=False, norms=False),
        "a quarter confined, ledger": arm(4),
        "all confined, ledger": arm(1),
    }


def run(*, quick: bool) -> str:
    """Run the benchmark on CPU, write its results and return the tables. A ledger waits for the disk: wall time."""
    return "\n".join(
        table(
            f"routing_cost_{tokens}" + "_quick" * quick,
            Size.on_cpu(tokens, quick=quick),
            arms_of,
            rounds=2 if quick else 20,
            now=perf_counter,
        )
        for tokens in ((512,) if quick else (512, 2048))
    )
