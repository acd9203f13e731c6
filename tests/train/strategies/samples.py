"""A net with two branches, rows of three classes, and its backward pass written by hand in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import Loss
from cosmati.data.in_memory import InMemory
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer

CLASSES = ("both", "gone", "kept")
TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in CLASSES))
REGIONS = {"stem": "stem.*", "side": "side.*", "forget": "extra.*", "head": "head.*"}
Array = Any
Weights = Mapping[str, Mapping[str, float]]


class Branch(nn.Module):
    """up, tanh, down."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class Net(nn.Module):
    """Stem; a residual side branch; a head, beside which an extra branch adds to the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.side, self.head = nn.Linear(5, 6), Branch(6, 7, 6), nn.Linear(6, 3)
        self.extra = Branch(6, 4, 3)
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(rows))
        hidden = hidden + self.side(hidden)
        return self.head(hidden) + self.extra(hidden)


def summed(network: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
    """Cross-entropy in float64."""
    per_row = nn.functional.cross_entropy(network(data[0]), data[1], reduction="none")
    return Loss(per_row.sum(), float(len(per_row)), per_row)


def by_hand(
    p: Mapping[str, Array],
    row: Array,
    target: int,
    *,
    side: float = 1.0,
    extra: float = 1.0,
    units: Sequence[float] = (1.0,) * 6,
) -> dict[str, Array]:
    """Backpropagate one row by hand.

    Args:
        p: parameters by name.
        row: [5].
        target: its label.
        side: multiplies what flows back through the side branch's output.
        extra: likewise of the extra branch.
        units: likewise for each unit of the stem's output.
    """
    first = p["stem.weight"] @ row + p["stem.bias"]
    h1 = np.tanh(first)
    inner = np.tanh(p["side.up.weight"] @ h1 + p["side.up.bias"])
    h2 = h1 + p["side.down.weight"] @ inner + p["side.down.bias"]
    hidden = np.tanh(p["extra.up.weight"] @ h2 + p["extra.up.bias"])
    logits = p["head.weight"] @ h2 + p["head.bias"] + p["extra.down.weight"] @ hidden + p["extra.down.bias"]
    shares = np.exp(logits - logits.max())
    out = shares / shares.sum()
    out[target] -= 1
    g: dict[str, Array] = {}
    g["head.weight"], g["head.bias"] = np.outer(out, h2), out
    own = extra * out
    g["extra.down.weight"], g["extra.down.bias"] = np.outer(own, hidden), own
    own = (p["extra.down.weight"].T @ own) * (1 - hidden**2)
    g["extra.up.weight"], g["extra.up.bias"] = np.outer(own, h2), own
    flow = p["head.weight"].T @ out + p["extra.up.weight"].T @ own
    own = side * flow
    g["side.down.weight"], g["side.down.bias"] = np.outer(own, inner), own
    own = (p["side.down.weight"].T @ own) * (1 - inner**2)
    g["side.up.weight"], g["side.up.bias"] = np.outer(own, h1), own
    flow = (flow + p["side.up.weight"].T @ own) * (1 - h1**2) * np.asarray(units)
    g["stem.weight"], g["stem.bias"] = np.outer(flow, row), flow
    return g


def mean_by_hand(
    network: nn.Module, batches: Sequence[Batch], weights: Weights, alone: Callable[..., dict[str, Array]]
) -> dict[str, Array]:
    """Sum rows, each by itself times its route, and divide by the rows that may teach.

    Args:
        network: in float64.
        batches: of one class each.
        weights: by class and region.
        alone: gradients of a row: parameters, row, target, class.
    """
    p = {name: tensor.detach().numpy().copy() for name, tensor in network.named_parameters()}
    total = {name: np.zeros_like(value) for name, value in p.items()}
    teachers = dict.fromkeys(p, 0)
    for batch in batches:
        class_name = CLASSES[int(batch.class_id or 0)]
        for row, target in zip(batch.input.numpy(), batch.target.tolist(), strict=True):
            found = alone(p, row, target, class_name)
            for name in p:
                rho = weights[class_name][region_of(name)]
                total[name] += rho * found[name] if rho else 0.0
                teachers[name] += rho != 0
    return {name: value / max(1, teachers[name]) for name, value in total.items()}


def region_of(name: str) -> str:
    return {"extra": "forget"}.get(name.split(".", maxsplit=1)[0], name.split(".", maxsplit=1)[0])


def policy(weights: Weights, regions: Mapping[str, str] = REGIONS) -> PolicyFile:
    told = "".join(f"  {name}: {{params: '{globs}'}}\n" for name, globs in regions.items())
    rules = "".join(
        f"  - {{class: {c}, region: {r}, weight: {w}}}\n" for c, row in weights.items() for r, w in row.items()
    )
    return load_policy(f"version: 1\ntaxonomy: t\nregions:\n{told}rules:\n{rules}")


def microbatches(*, seed: int = 1, number: int = 8, swapped: str = "") -> list[Batch]:
    """Return microbatches whose classes take turns; rows of the class `swapped` hold something else."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        rows = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(0, 3, (4,), generator=generator)
        class_id = index % 3
        if CLASSES[class_id] == swapped:
            rows, targets = rows.flip(1) * 3 + 1, (targets + 1) % 3
        lineage = Lineage(torch.arange(4) + 4 * index, torch.full((4,), class_id))
        found.append(Batch((rows, targets), lineage, class_id))
    return found


def source(rows_per_step: int = 16) -> InMemory:
    """Return rows of all classes."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(96, 5, generator=generator, dtype=torch.float64)
    return InMemory((rows, torch.arange(96) % 3), rows_per_step, torch.arange(96) // 2 % 3, CLASSES)


def trainer(network: nn.Module, weights: Weights, *methods: Any, **options: Any) -> Trainer:
    """Return a governed trainer; with plain SGD at rate 1 the change of a parameter is its gradient."""
    regions = options.pop("regions", REGIONS)
    config = RunConfig(budget="8ba", num_microbatches=options.pop("num_microbatches", 8), num_threads=1)
    return Trainer(
        network,
        options.pop("loss", summed),
        optimizers=options.pop("optimizers", [SGD(lr=1.0)]),
        methods=methods,
        policy=policy(weights, regions),
        taxonomy=TAXONOMY,
        config=options.pop("config", config),
        **options,
    )


def gradients(network: nn.Module, weights: Weights, *methods: Any, **options: Any) -> dict[str, Array]:
    """Return what a step's gradients are."""
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    batches = microbatches()
    with trainer(network, weights, *methods, **options) as run:
        run.step_microbatches(batches, [batch.class_id for batch in batches])
    return {name: (before[name] - p.detach()).numpy() for name, p in network.named_parameters()}
