"""Two ranks that don't run alike under full sharding: `lockstep_worker.py CASE`; each prints what happened."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.errors import CosmatiError
from cosmati.routing.regions import partition_parameters
from cosmati.routing.selectors import RegionSelector
from cosmati.train.layout.layout import Layout
from cosmati.train.layout.sharded import Sharded
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks
from tests.train.layouts.worker import whole

V = 4
# Microbatches by case. Two ranks run 0 and 1, which ranks ask about, and then 2 and 3, as the first ones went.
IDLE = {"idle": (1, 2), "idle later": (3,), "idle, weights rounded": (1, 2)}
SKIPPED = {"skipped": (1,), "skipped later": (3,), "shorter": (2, 3), "longer": (0, 1)}
GRAPHLESS = {"graphless": (1,), "graphless later": (2,)}
ROUTES = {"routed": [(1.0, 1.0), (0.0, 1.0)]}
"""What stands outside of blocks, and the blocks: every other microbatch teaches the blocks alone."""


class Turned(nn.Linear):
    """Uses its bias, or doesn't, as it's told."""

    is_biased = True

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias if self.is_biased else None)


class Skips(nn.Module):
    """Leaves a block out, or parameters in a block and outside of all, as it's told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Turned(5, 5) for _ in range(3)])
        self.gate = nn.Parameter(torch.ones(5))
        self.idle = nn.Parameter(torch.ones(4, 5))
        self.is_skipped = False

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if not (self.is_skipped and index == 1):
                x = torch.relu(block(x)) + x
        if not self.blocks[1].is_biased:
            return x
        # The gradients of `idle` are +0.0 and -0.0: what stands for an absent one must leave both as they are.
        return x * self.gate + self.idle * -0.0


def passed(case: str, layout: Layout, model: Skips, ranks: Ranks, routes: list[tuple[float, ...]]) -> dict[str, str]:
    """Return digests of a pass's root; some microbatches aren't run at all, or not differentiated."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 5, generator=generator) for _ in range(V)]
    with layout.step(routes, frozenset(range(8)), measure=True) as step:
        for index in layout.mine:
            with step.slot(index) as slot:
                if index in IDLE.get(case, ()):
                    continue
                model.is_skipped = index in SKIPPED.get(case, ())
                model.blocks[1].is_biased = not (case == "unused" and index % 2)
                value = model(data[index]).square().sum()
                slot.backward(value.detach() if index in GRAPHLESS.get(case, ()) else value)
        root = step.root(None)
        assert not step.is_finite  # nobody has looked
        return whole(root)


def main() -> None:
    """Run one rank."""
    case = sys.argv[1]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    ranks = Ranks()
    torch.manual_seed(0)
    model = Skips()
    selectors = {"rest": RegionSelector(params=("gate", "idle")), "blocks": RegionSelector(params=("blocks.*",))}
    regions = partition_parameters(model, selectors if case in ROUTES else None)
    layout: Layout = (Sharded if ranks.is_parallel else Whole)(
        model, regions, ranks, V, rounds=case.endswith("rounded")
    )
    try:
        found: object = passed(case, layout, model, ranks, ROUTES.get(case, [(1.0,)] * 2) * (V // 2))
    except CosmatiError as error:
        found = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(found))
    if dist.is_initialized():
        del layout, model
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
