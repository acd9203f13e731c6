"""One rank of `test_bytes_sent.py`: trains three steps, and says how many bytes of gradients the last one sent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.recipes.recipe import Recipe
from cosmati.train import communication
from tests.planning import recipes

SMALLEST = 4096
"""Bytes: below it's facts, and no gradients."""


class Counting:
    """Counts what this rank sends to others as messages."""

    def __init__(self) -> None:
        self.sent = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(sent: Sequence[Tensor], received: Sequence[Tensor], members: dist.ProcessGroup, what: str) -> Any:
            others = [tensor.nbytes for rank, tensor in enumerate(sent) if rank != members.rank()]
            self.sent += sum(size for size in others if size >= SMALLEST)
            return function(sent, received, members, what)

        return counted


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recipe: Recipe = recipes.dense(width=256)
    trainer = recipe.trainer()
    assert trainer.feed is not None
    counting = Counting()
    communication._exchanged = counting.around(communication._exchanged)
    whole = (torch.ones(128, 32), torch.ones(128, 1))
    for _ in range(3):
        counting.sent = 0
        trainer.step(whole)
    json.dump({"sent": counting.sent, "mine": list(trainer.assembly.layout.mine)}, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
