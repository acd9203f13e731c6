"""What routes by token cost: packs of 1 to 8 classes in a GPT, V = 8, against plain accumulation of the same packs.

Every pack has eight documents; arms differ in whose they are. Half of the classes may not teach the lower half of the
model, and half of these teach the upper half at 0.5: with two classes one region is masked, with four and more both. On
CPU the seconds are the process's own, so that what else the machine does counts less.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.over_plain import Size, Step, V, governed, table
from cosmati import Batch, Lineage, PolicyFile, Taxonomy, load_policy

CLASSES, DOCUMENTS = 8, 8
TAXONOMY = Taxonomy("t", "1", tuple((f"c{index}", f"class {index}") for index in range(CLASSES)))


class Packs(Size):
    """What is measured: the model, and the packs of a step."""

    def drawn(self, shape: tuple[int, int], generator: torch.Generator) -> list[Any]:
        """Return the packs of each microbatch, eight documents in each."""
        self.documents = (torch.arange(shape[1]) * DOCUMENTS // shape[1]).expand(shape).contiguous()
        is_border = torch.ones(shape, dtype=torch.bool)
        is_border[:, :-1] = self.documents[:, 1:] != self.documents[:, :-1]
        found = []
        for _ in range(V):
            tokens = torch.randint(0, 256, shape, generator=generator)
            target = tokens.roll(-1, 1).masked_fill(is_border, -100)
            data = {"input": tokens, "target": target, "documents": self.documents}
            found.append({name: tensor.to(self.device) for name, tensor in data.items()})
        return found

    def policy(self) -> PolicyFile:
        """Return the policy: what is denied or attenuated goes by the class's number."""
        half = self.config.num_blocks // 2
        names = ", ".join(["'embedding.*'", *(f"'blocks.{i}.*'" for i in range(half))])
        lower, upper = f"  lower: {{params: [{names}]}}\n", f"  upper: {{params: '*', exclude: [{names}]}}\n"
        rules = "  - {class: '**', weight: 1}\n"
        rules += "".join(f"  - {{class: c{index}, region: lower, weight: 0}}\n" for index in range(1, CLASSES, 2))
        rules += "".join(f"  - {{class: c{index}, region: upper, weight: 0.5}}\n" for index in range(3, CLASSES, 4))
        return load_policy(f"version: 1\ntaxonomy: t\nregions:\n{lower}{upper}rules:\n{rules}")

    def batches(self, num_classes: int | None) -> list[Batch]:
        """Return microbatches of packs with so many classes; None gives pure ones, whose classes take turns."""
        found = []
        for index, data in enumerate(self.data):
            rows = len(data["input"])
            ids = torch.arange(rows) + index * rows
            if num_classes is None:
                found.append(Batch(data, Lineage(ids, torch.full((rows,), index % 4)), index % 4))
            else:
                classes = self.documents % num_classes
                lineage = Lineage(ids, torch.full((rows,), -1), None, None, classes, ids[:, None] * 8 + self.documents)
                found.append(Batch(data, lineage))
        return found

    def mixed(self) -> Batch:
        """Return a step's rows in one batch: of four classes as they come, 5, 7, 3 and 1 of each 16."""
        data = {name: torch.cat([one[name] for one in self.data]) for name in self.data[0]}
        places = torch.arange(len(data["input"]))
        kinds = torch.arange(4).repeat_interleave(torch.tensor([5, 7, 3, 1]))
        return Batch(data, Lineage(places, kinds[places * 7 % 16]))


def arms_of(size: Packs, runs: ExitStack) -> dict[str, Step]:
    """Return the governed arms."""
    arms = {"pure: one class a microbatch": None, "packs of 1 class": 1} | {
        f"packs of {n} classes": n for n in (2, 4, 8)
    }
    return {name: governed(size, runs, size.batches(n), size.policy(), TAXONOMY) for name, n in arms.items()}


def run(*, quick: bool) -> str:
    """Run the benchmark on CPU, write its results and return the tables."""
    return "\n".join(
        table(
            f"token_routing_{tokens}" + "_quick" * quick,
            Packs.on_cpu(tokens, quick=quick),
            arms_of,
            rounds=2 if quick else 12,
        )
        for tokens in ((512,) if quick else (512, 2048))
    )
