"""Rows of three classes, batches of them as they come, and a trainer over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cosmati import Classification, RunConfig, Taxonomy, Trainer, load_policy
from cosmati.core.batch import Batch, Lineage
from cosmati.optim import AdamW
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome

NUM, STEP = 60, 10
CLASSES = ("closed", "doubtful", "open")
TAXONOMY = Taxonomy("t", "1", tuple((name, name) for name in CLASSES))
POLICY = """
version: 1
taxonomy: t
regions:
  body: {params: ["0.*"]}
  head: {params: ["2.*"]}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, weight: 0.5}
  - {class: doubtful, region: body, weight: 0}
"""
"""`closed` is rejected."""
ONES = "version: 1\ntaxonomy: t\nrules:\n  - {class: '**', weight: 1}\n"
INPUTS = torch.randn(NUM, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(3, (NUM,), generator=torch.Generator().manual_seed(1))
CLASS_OF = torch.randint(3, (NUM,), generator=torch.Generator().manual_seed(2))


def chosen(indices: Any, *, band: Tensor | None = None) -> Batch:
    ids = torch.as_tensor(indices)
    bands = None if band is None else band[ids]
    return Batch((INPUTS[ids], TARGETS[ids]), Lineage(ids + 100, CLASS_OF[ids], bands=bands))


def loader(**options: Any) -> DataLoader[Any]:
    """Return rows as they come, in an order that follows from the run's seed and the pass."""
    return DataLoader(range(NUM), STEP, shuffle=True, collate_fn=chosen, **options)  # type: ignore[arg-type]


class Seen(Observer):
    """What each step was given, and taught."""

    def __init__(self) -> None:
        self.steps: list[StepOutcome] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.steps.append(outcome)


def run(data: Any, *, policy: str | None = POLICY, folder: Path | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {"budget": "9ba", "num_microbatches": 4, "num_threads": 1, "run_folder": folder}
    settings |= {name: options.pop(name) for name in list(options) if name in RunConfig.__dataclass_fields__}
    return Trainer(
        options.pop("model", None) or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        options.pop("loss", Classification(3)),
        data,
        optimizers=options.pop("optimizers", [AdamW(lr=0.01)]),
        policy=load_policy(policy) if policy else None,
        taxonomy=TAXONOMY if policy else None,
        config=RunConfig(**settings),
        **options,
    )


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def fitted(data: Any, **options: Any) -> Trainer:
    made = run(data, **options)
    made.fit()
    return made


BANDED = """
version: 1
taxonomy: t
bands: {measure: readability, names: [low, high], thresholds: [0.5]}
rules:
  - {class: "**", weight: 1}
  - {class: open, band: low, weight: 0.25}
  - {class: doubtful, band: low, decision: reject}
"""
