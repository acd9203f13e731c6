"""One rank of `test_bytes_sent.py`: trains three steps, and says how many bytes of gradients the last one sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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

    def around(self, function: Callable[..., Any], own: int) -> Callable[..., Any]:
        def counted(*tensors: Tensor, **more: Any) -> Any:
            size = tensors[own].numel() * tensors[own].element_size()
            if size >= SMALLEST:
                self.sent += size * (self.world - 1) // (self.world if own and function is ALL_TO_ALL else 1)
            return function(*tensors, **more)

        return counted


ALL_TO_ALL = dist.all_to_all_single


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recipe: Recipe = recipes.dense(width=256)
    trainer = recipe.trainer()
    assert trainer.feed is not None
    counting = Counting(dist.get_world_size())
    dist.all_to_all_single = counting.around(ALL_TO_ALL, 1)
    exchange.all_gather = counting.around(exchange.all_gather, 1)
    whole = (torch.ones(128, 32), torch.ones(128, 1))
    for _ in range(3):
        counting.sent = 0
        trainer.step(whole)
    json.dump({"sent": counting.sent, "mine": list(trainer.assembly.layout.mine)}, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
