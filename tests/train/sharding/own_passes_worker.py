"""Models and losses that write, freeze and differentiate by themselves; rank 0 prints what came of each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from cosmati import InMemory, RunConfig, Taxonomy, Trainer, load_policy
from cosmati.errors import CosmatiError
from cosmati.optim import AdamW

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
GENERATOR = torch.Generator().manual_seed(0)
ROWS, LABELS = torch.randn(64, 6, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)
POLICY = """
version: 1
taxonomy: t
regions:
  head: {params: 'head.*'}
  rest: {params: '*', exclude: 'head.*'}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, weight: 1}
  - {class: doubtful, region: head, weight: 0}
"""


class Reversible(torch.autograd.Function):
    """Computes its block anew in its backward, which differentiates by itself."""

    @staticmethod
    def forward(context: Any, rows: Tensor, block: nn.Module) -> Tensor:
        context.block = block
        context.save_for_backward(rows)
        with torch.no_grad():
            return block(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        (rows,) = context.saved_tensors
        rows = rows.detach().requires_grad_()
        with torch.enable_grad():
            found = context.block(rows)
        torch.autograd.backward(found, gradient)
        return rows.grad, None


class Net(nn.Module):
    """Blocks and a head.

    Args:
        kind: how blocks are run.
        has_first: whether something trains before the blocks.
    """

    def __init__(self, kind: str = "plain", *, has_first: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 6) if has_first else nn.Identity()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Tensor:
        # As transformers' `enable_input_require_grads` does where what comes first is frozen.
        rows = rows.requires_grad_() if isinstance(self.first, nn.Identity) else self.first(rows)
        for block in self.blocks:
            rows = self.run(block, rows)
        return self.head(rows)  # type: ignore[no-any-return]

    def run(self, block: nn.Module, rows: Tensor) -> Tensor:
        if self.kind == "reversible":
            return Reversible.apply(rows, block)  # type: ignore[no-any-return, no-untyped-call]
        if self.kind == "plain":
            return block(rows)  # type: ignore[no-any-return]
        return checkpoint(block, rows, use_reentrant=self.kind == "reentrant")  # type: ignore[no-any-return]


class Moving(nn.Linear):
    """A teacher's layer, which moves by itself."""

    def forward(self, rows: Tensor) -> Tensor:
        self.weight.mul_(0.9)
        return super().forward(rows)


class Taught(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(Moving(6, 6) for _ in range(2)).requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher[1](self.teacher[0](rows))
        return super().forward(rows + taught)


class Viewed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.head.weight.detach())


class Freezing(Net):
    def forward(self, rows: Tensor) -> Tensor:
        self.blocks[0].requires_grad_(False)
        return super().forward(rows)


class FrozenWithin(nn.Linear):
    """Freezes its own bias when it runs, after what gathers its weights."""

    def forward(self, rows: Tensor) -> Tensor:
        self.bias.requires_grad_(False)
        return super().forward(rows)


class FreezingWithin(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.Sequential(FrozenWithin(6, 6), nn.Tanh())


class Emptied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 6))

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + self.none.sum()


class Gapped(Net):
    """The head's weights lie in every other element of each row's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().repeat_interleave(2, 1)[:, ::2])


class Apart(nn.ModuleDict):
    def forward(self, rows: Tensor) -> Tensor:
        return self["net"](rows)  # type: ignore[no-any-return]


def plain(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(data[0]), data[1])


def penalized(model: nn.Module, data: Any) -> Tensor:
    """With a gradient penalty, whose gradient is one of a gradient."""
    rows = data[0].clone().requires_grad_()
    found = model(rows)
    (gradient,) = torch.autograd.grad(found.sum(), rows, create_graph=True)
    return cross_entropy(found, data[1]) + gradient.square().mean()


def replaced(model: Any) -> None:
    model.head.bias = nn.Parameter(torch.zeros(3))


def case(
    model: Callable[[], nn.Module],
    sharding: str,
    loss: Any = plain,
    *,
    is_governed: bool = False,
    between: Callable[[Any], None] | None = None,
) -> str:
    torch.manual_seed(0)
    own = model()
    config = RunConfig(budget="4ba", num_microbatches=4, num_threads=1, sharding=sharding)
    governed: dict[str, Any] = {}
    if is_governed:
        classes = (("open", "free to learn"), ("doubtful", "not for the head"))
        governed = {"policy": load_policy(POLICY), "taxonomy": Taxonomy("t", "1", classes)}
    data = InMemory((ROWS, LABELS), 16, class_ids=torch.arange(64) % 2, class_names=("open", "doubtful"))
    try:
        trainer = Trainer(own, loss, None if between else data, optimizers=[AdamW(lr=0.01)], config=config, **governed)
        if between is None:
            trainer.fit()
        else:
            with trainer:
                for step in range(4):
                    if step == 2:
                        between(own)
                    trainer.step((ROWS[step * 16 : step * 16 + 16], LABELS[step * 16 : step * 16 + 16]))
    except CosmatiError as error:
        return f"{type(error).__name__}: {error}"
    tensors = dict(trainer.assembly.layout.save())
    lost = [g.name for g in trainer.plan.guarantees if not g.holds]
    return f"{[float(one.detach().double().sum()) for one in tensors.values()]} without {lost}"


def main() -> None:
    if WORLD > 1:
        dist.init_process_group("gloo")
    found: dict[str, str] = {}
    for sharding in ("replicated", "optimizer"):
        for has_first in (False, True):
            for kind in ("plain", "checkpointed", "reentrant", "reversible"):
                name = f"{sharding}, {kind}{', after a layer' if has_first else ''}"
                found[name] = case(lambda: Net(kind, has_first=has_first), sharding, is_governed=True)  # noqa: B023
    for kind in ("plain", "checkpointed", "reentrant", "reversible"):
        found[f"full, {kind}"] = case(lambda: Net(kind), "full")  # noqa: B023
    found |= {
        "full, reentrant after a layer": case(lambda: Net("reentrant", has_first=True), "full"),
        "full, a moving teacher": case(Taught, "full"),
        "full, a view": case(Viewed, "full"),
        "full, freezing": case(Freezing, "full"),
        "full, freezing within": case(FreezingWithin, "full"),
        "optimizer, freezing within": case(FreezingWithin, "optimizer"),
        "replicated, freezing within": case(FreezingWithin, "replicated"),
        "full, a container": case(lambda: Apart({"net": Net()}), "full"),
        "full, a penalty": case(Net, "full", penalized),
        "full, replaced": case(Net, "full", between=replaced),
        "full, own loop": case(Net, "full", between=lambda _: None),
        "optimizer, a penalty": case(Net, "optimizer", penalized),
        "optimizer, nothing in a parameter": case(Emptied, "optimizer"),
        "optimizer, a parameter with gaps": case(Gapped, "optimizer"),
        "replicated, a parameter with gaps": case(Gapped, "replicated"),
        "replicated, nothing in a parameter": case(Emptied, "replicated"),
    }
    if RANK == 0:
        sys.stdout.write(json.dumps(found))
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
