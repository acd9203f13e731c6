"""A recipe in which one class teaches a region of its own alone, as a user's own file has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmati.core.loss import Loss
from cosmati.core.source import Source
from cosmati.data.in_memory import InMemory
from cosmati.forget.ablation import Wrap
from cosmati.forget.replay import Make
from cosmati.optim import AdamW
from cosmati.recipes.recipe import Recipe
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer
from cosmati.train.trainer import Trainer
from tests.train.isolated.samples import CLASSES, TAXONOMY

POLICY = load_policy(
    "version: 1\ntaxonomy: t\nregions: {rest: {params: 'rest.*'}, own: {params: 'own.*'}}\nrules:\n"
    "  - {class: '**', weight: 1}\n  - {class: '**', region: own, weight: 0}\n"
    "  - {class: personal, region: rest, weight: 0}\n  - {class: personal, region: own, weight: 1}\n"
)


class Sum(nn.Module):
    """Two layers beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.rest, self.own = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.rest(rows) + self.own(rows)


def squared(model: nn.Module, data: tuple[Tensor, Tensor]) -> Loss:
    """Return the sum over rows of squared errors."""
    each = (model(data[0]) - data[1]).square().mean(1)
    return Loss(each.sum(), torch.tensor(float(len(each))), each)


def rows() -> Source:
    """Return 48 rows, of three classes by turns."""
    draw = torch.Generator().manual_seed(5)
    data = torch.randn(48, 3, generator=draw), torch.randn(48, 2, generator=draw)
    return InMemory(data, 12, torch.arange(48) % 3, CLASSES)


def recipe() -> Recipe:
    """Return it."""
    return Recipe(
        name="routed",
        model=Sum,
        loss=squared,
        data=rows,
        optimizers=(AdamW(lr=0.05),),
        config=RunConfig(budget="6ba", num_microbatches=4, num_threads=1, checkpoint_every="2ba", num_checkpoints=9),
        policy=POLICY,
        taxonomy=TAXONOMY,
    )


def maker(*observers: Observer) -> Make:
    """Return what makes its trainer over wrapped data."""

    def make(wrap: Wrap, folder: Path | None, /, **config: Any) -> Trainer:
        own = replace(recipe().config, run_folder=folder, **config)
        return replace(recipe(), data=lambda: wrap(rows()), config=own).trainer(observers=observers)

    return make
