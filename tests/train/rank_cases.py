"""What people do under torchrun, each on its own model; rank 0 prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, random_split

from cosmati import RunConfig, Trainer
from cosmati.errors import CosmatiError
from cosmati.optim import SGD

GENERATOR = torch.Generator().manual_seed(0)
ROWS, LABELS = torch.randn(48, 6, generator=GENERATOR), torch.randint(3, (48,), generator=GENERATOR)
SUMMING = "all_reduce"
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def plain(model: nn.Module, data: Any) -> Tensor:
    return cross_entropy(model(torch.as_tensor(data[0])), torch.as_tensor(data[1]))


def batches(rows: Tensor = ROWS) -> list[tuple[Tensor, Tensor]]:
    return [(rows[i : i + 8], LABELS[i : i + 8]) for i in range(0, 48, 8)]


ddp_rank = RANK
master_process = ddp_rank == 0


class Writer:
    last = 0.0


writer = None if RANK else Writer()


def told_by_first(model: nn.Module, data: Any) -> Tensor:
    """As scripts for one process for each device have it."""
    loss = plain(model, data)
    if master_process and ddp_rank == 0:
        sys.stdout.write("")
    return loss


def written_by_first(model: nn.Module, data: Any) -> Tensor:
    loss = plain(model, data)
    if writer is not None:
        writer.last = 0.0
    return loss


def of_the_same_name(model: nn.Module, data: Any) -> Tensor:
    return plain(model, data)


if RANK:  # a node whose files are of yesterday

    def of_the_same_name(model: nn.Module, data: Any) -> Tensor:
        return plain(model, data) * 1.5


class Settings:
    """As transformers' models have it: Python gives strings another hash in each process."""

    def __init__(self) -> None:
        self._original_object_hash = hash(f"settings {RANK}")


def with_settings(model: nn.Module) -> None:
    model.generation_config = Settings()  # type: ignore[assignment]


class Own(Dataset[tuple[Tensor, Tensor]]):
    """Rows with content that each rank has drawn for itself."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return ROWS[index] + RANK, LABELS[index]


class Endless:
    """Strings beside rows, other ones on each rank from the third step on."""

    def __iter__(self) -> Any:
        return ((*batch, [f"row {RANK if i >= 2 else 0}"] * 8) for i, batch in enumerate(batches() * 9))


class Shorter:
    """Batches that can't be counted; rank 1 has fewer."""

    def __iter__(self) -> Any:
        return iter(batches()[: 4 - RANK])


def gathered(model: nn.Module, data: Any) -> Tensor:
    found = normalize(model(data[0]))
    if dist.is_initialized():
        parts = [torch.empty_like(found) for _ in range(WORLD)]
        dist.all_gather(parts, found.detach().contiguous())
        parts[RANK] = found
        found = torch.cat(parts)
    return cross_entropy(found @ found.T, torch.arange(len(found)))


def gathered_by_rank(model: nn.Module, data: Any) -> Tensor:
    """Each rank takes a part of what all have, as with a queue that's shared out."""
    return gathered(model, data) * (1 + RANK)


def hooked(model: nn.Module) -> None:
    """Sum gradients as DDP would; the name of what is called isn't in the code."""

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if WORLD > 1:
            getattr(dist, SUMMING)(gradient)
        return gradient

    for parameter in model.parameters():
        parameter.register_hook(summed)


class Graph(nn.Module):
    """A sparse graph beside its model, which is made anew each time."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        return (self.edges @ rows.T).T


def with_graph(differs: float = 0.0, *, by_rows: bool = False) -> Callable[[nn.Module], None]:
    """Put a sparse graph before a model, one that differs by rank if asked."""
    edges = torch.eye(6) + torch.eye(6).roll(1, 0) * differs * RANK
    with warnings.catch_warnings(action="ignore"):  # "Sparse CSR tensor support is in beta state"
        sparse = edges.to_sparse_csr() if by_rows else edges.to_sparse()
    return lambda model: model.insert(0, Graph(sparse))


def case(
    loss: Callable[..., Tensor] = plain,
    data: Any = None,
    steps: Any = None,
    prepare: Callable[[nn.Module], None] = lambda _: None,
    is_wrapped: bool = False,
) -> str:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    prepare(model)
    if is_wrapped and WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model)
    config = RunConfig(budget="6ba", num_microbatches=2, num_threads=1)
    try:
        trainer = Trainer(model, loss, data, optimizers=[SGD(lr=0.1)], config=config)
        if steps is None:
            trainer.fit()
        else:
            with trainer:
                for step in range(6):
                    trainer.step(steps[step % len(steps)])
    except CosmatiError as error:
        return f"{type(error).__name__}: {error}"
    lost = [f"{g.name} {g.because}" for g in trainer.plan.guarantees if not g.holds]
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    return f"{total} without {lost}"


def main() -> None:
    if WORLD > 1:
        dist.init_process_group("gloo")
    sampler = DistributedSampler(TensorDataset(ROWS, LABELS), num_replicas=WORLD, rank=RANK, shuffle=False)
    shares = list(DataLoader(TensorDataset(ROWS, LABELS), 8 // WORLD, sampler=sampler))
    torch.manual_seed(7 + RANK)
    split = random_split(TensorDataset(ROWS, LABELS), [32, 16])[0]
    by_rank = torch.Generator().manual_seed(7 + RANK)
    found = {
        "the same": case(data=batches()),
        "own loop": case(steps=batches()),
        "own loop, shares": case(steps=shares),
        "own loop, arrays": case(steps=[(x.numpy() + RANK, y.numpy()) for x, y in batches()]),
        "a generator by rank": case(data=DataLoader(TensorDataset(ROWS, LABELS), 8, shuffle=True, generator=by_rank)),
        "a split by rank": case(data=DataLoader(split, 8, shuffle=True)),
        "rows by rank": case(data=DataLoader(Own(), 8)),
        "strings by rank, later": case(data=Endless()),
        "ends earlier on one rank": case(data=iter(Shorter())),
        "ends alike": case(data=iter(batches()[:4])),
        "told by the first": case(told_by_first, data=batches()),
        "written by the first": case(written_by_first, data=batches()),
        "a gathering loss": case(gathered, data=batches()),
        "a gathering loss by rank": case(gathered_by_rank, data=batches()),
        "a hook that sums": case(data=batches(), prepare=hooked),
        "other code on one rank": case(of_the_same_name, data=batches()),
        "other code on one rank, own loop": case(of_the_same_name, steps=batches()),
        "a hash of its own": case(data=batches(), prepare=with_settings),
        "a graph": case(data=batches(), prepare=with_graph()),
        "a graph by rows": case(data=batches(), prepare=with_graph(by_rows=True)),
        "another graph on each rank": case(data=batches(), prepare=with_graph(0.5)),
        "another graph by rows": case(data=batches(), prepare=with_graph(0.5, by_rows=True)),
        "DDP": case(data=batches(), is_wrapped=True),
    }
    if RANK == 0:
        sys.stdout.write(json.dumps(found))
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
