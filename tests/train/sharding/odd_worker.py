"""Two ranks with a model that can't be sharded to the same bits: `odd_worker.py`; prints what's said of each case."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.errors import CosmatiError
from cosmati.routing.regions import partition_parameters
from cosmati.train.layout.sharded import Sharded
from cosmati.train.ranks import Ranks


class Twofold(nn.Linear):
    """Reads its input twice, or reads a copy of it."""

    is_copied = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x) if self.is_copied else x
        return super().forward(x).sigmoid() * x


class Odd(nn.Module):
    """Does what it's told before its blocks."""

    def __init__(self, first: Callable[[nn.ModuleList], object] = lambda _: None, is_copied: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.ModuleList([Twofold(4, 4), Twofold(4, 4)])])
        self.first = first
        for block in self.inner:
            block.is_copied = is_copied

    @property
    def inner(self) -> nn.ModuleList:
        found = self.blocks[0]
        assert isinstance(found, nn.ModuleList)
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + sum(block(x) for block in self.inner) + (self.first(self) or 0.0)


def _clamp(model: Odd) -> None:
    with torch.no_grad():
        model.stem.weight.clamp_(-0.1, 0.1)


def _clamp_past_autograd(model: Odd) -> None:
    model.stem.weight.data.clamp_(-0.1, 0.1)


CASES: dict[str, Callable[[], Odd]] = {
    "none": Odd,
    "written": lambda: Odd(_clamp),
    "written past autograd": lambda: Odd(_clamp_past_autograd),
    "grouped": lambda: Odd(is_copied=False),
    "used outside": lambda: Odd(lambda model: (model.inner[0].weight @ model.stem.weight).sum()),
}


def said_of(model: Odd, ranks: Ranks) -> str:
    """Run a step's pass; return what it's refused with."""
    layout = Sharded(model, partition_parameters(model), ranks, 2)
    try:
        with layout.step([(1.0,)] * 2, frozenset(range(6)), measure=False) as step:
            for index in layout.mine:
                with step.slot(index) as slot:
                    slot.backward(model(torch.ones(3, 4)).square().sum())
            step.root(None)
    except CosmatiError as error:
        return str(error)
    return f"{len(layout.groups)} groups"


def main() -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    dist.init_process_group("gloo")
    ranks = Ranks()
    sys.stdout.write(json.dumps({case: said_of(make(), ranks) for case, make in CASES.items()}))
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
