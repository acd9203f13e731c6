"""One rank of `test_bytes_sent.py`: trains three steps, and says how many bytes of gradients the last one sent."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.recipes.recipe import Recipe
from cosmati.train.layout import exchange
from tests.planning import recipes

SMALLEST = 4096
"""Bytes: below it's facts, and no gradients."""


class Counting:
    """Counts what this rank sends to others through the collectives that gradients take."""

    def __init__(self, world: int) -> None:
        self.world, self.sent = world, 0

    def to_all(self, output: Tensor, own: Tensor, received: list[int], sent: list[int], **more: Any) -> Any:
        """Count by what goes to each other rank."""
        if own.nbytes >= SMALLEST:
            self.sent += (sum(sent) - sent[dist.get_rank()]) * own.element_size()
        return ALL_TO_ALL(output, own, received, sent, **more)

    def gather(self, gathered: Tensor, own: Tensor, **more: Any) -> Any:
        """Count what goes to each other rank alike."""
        if gathered.nbytes >= SMALLEST:
            self.sent += own.nbytes * (self.world - 1)
        return GATHER(gathered, own, **more)


ALL_TO_ALL, GATHER = dist.all_to_all_single, exchange.all_gather


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recipe: Recipe = recipes.dense(width=256)
    trainer = recipe.trainer()
    assert trainer.feed is not None
    counting = Counting(dist.get_world_size())
    dist.all_to_all_single, exchange.all_gather = counting.to_all, counting.gather
    whole = (torch.ones(128, 32), torch.ones(128, 1))
    for _ in range(3):
        counting.sent = 0
        trainer.step(whole)
    json.dump({"sent": counting.sent, "mine": list(trainer.assembly.layout.mine)}, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
