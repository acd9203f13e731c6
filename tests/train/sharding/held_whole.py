"""A layout of two blocks that one process holds whole: what a cut layout's step and slots need of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cosmati.core.pieces import Pieces
from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.shard_cut import RowsCut
from cosmati.train.layout.shard_groups import ShardGroup
from cosmati.train.layout.sharded_step import Arrivals, ShardedSlot, ShardedStep
from cosmati.train.ranks import Ranks

NAMES = ("one.weight", "one.bias", "two.weight", "two.bias")
REGION = {"one.weight": 0, "one.bias": 1, "two.weight": 1, "two.bias": 1}
ALL = frozenset(range(4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 3), nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, rows: Tensor, *, skips: bool = False) -> Tensor:
        hidden = torch.tanh(self.one(rows))
        out: Tensor = hidden if skips else self.two(input=hidden)
        return out


class HandMade:
    """A layout of two blocks, each a group, that this process holds whole."""

    def __init__(
        self, *, frozen: Sequence[str] = (), slots: Sequence[Sequence[int]] = ((0,), (1,), (2,), (3,))
    ) -> None:
        self.model, self.device = Net(), torch.device("cpu")
        named = dict(self.model.named_parameters())
        for name in frozen:
            named[name].requires_grad_(False)
        learning = [name for name in NAMES if name not in frozen]
        self.parameters = tuple(Parameter(i, name, REGION[name], named[name]) for i, name in enumerate(learning))
        self.index_of = {p.name: p.index for p in self.parameters}
        self.members = [[p.index for p in self.parameters if p.region == region] for region in range(2)]
        rows = {name: RowsCut(tuple(named[name].shape), 1) for name in NAMES}
        self.groups = [
            ShardGroup(number, module, names, tuple(n for n in names if n in learning), {n: rows[n] for n in names})
            for number, (module, names) in enumerate(((self.model.one, NAMES[:2]), (self.model.two, NAMES[2:])))
        ]
        self.group_of = {name: group.number for group in self.groups for name in group.names}
        self.ranks: Any = SimpleNamespace(rank=0, slots=lambda _: slots)
        self.shards: Any = SimpleNamespace(rank=0, world=1)
        self.replicas = Ranks.alone()
        self.lockstep: Any = SimpleNamespace(together=self.together)
        self.told = list[Any]()
        self.arrivals = Arrivals(self)  # type: ignore[arg-type]

    @contextmanager
    def together(self, kind: frozenset[int]) -> Iterator[None]:
        self.told.append(kind)
        try:
            yield
        except ArithmeticError:
            self.told.append("failed")
            raise
        else:
            self.told.append("alone" if self.arrivals.slot is None else "with a slot")

    def model_parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)

    def nothing(self, group: ShardGroup) -> Tensor:
        return torch.full((group.num_summed,), -0.0)

    def weights(self) -> Pieces:
        return Pieces({p.name: p.tensor for p in self.parameters}, {p.name: p.region for p in self.parameters})

    def clear(self) -> None:
        self.told.append("clear")
        for parameter in self.model.parameters():
            parameter.grad = None

    def step(self, *routes: tuple[float, float], learns: frozenset[int] = ALL, **options: Any) -> ShardedStep:
        return ShardedStep(self, routes, learns, **{"measure": True, **options})  # type: ignore[arg-type]

    def sum_up(self, step: ShardedStep, slot: ShardedSlot) -> None:
        """Do what FSDP2 does as a block's backward ends: sum what all ranks have, here one."""
        for group in self.groups:
            found = [self.model_parameter(name).grad for name in group.trained]
            if group.number in slot.run and any(one is not None for one in found):
                step.take(group, torch.cat([one.reshape(-1) for one in found if one is not None]))


def rows(microbatch: int) -> Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(microbatch))


def loss_of(model: nn.Module, microbatch: int, *, skips: bool = False) -> Tensor:
    loss: Tensor = model(rows(microbatch), skips=skips).square().sum()
    return loss


def plainly(microbatch: int, *, skips: bool = False) -> dict[str, Tensor | None]:
    model = Net()
    found = torch.autograd.grad(loss_of(model, microbatch, skips=skips), list(model.parameters()), allow_unused=True)
    return dict(zip(NAMES, found, strict=True))


def swept(layout: HandMade, step: ShardedStep, microbatches: Sequence[int], **options: bool) -> list[ShardedSlot]:
    slots = []
    for m in microbatches:
        with step.slot(m) as slot:
            slot.backward(loss_of(layout.model, m, **options))
            layout.sum_up(step, slot)
        slots.append(slot)
    return slots
