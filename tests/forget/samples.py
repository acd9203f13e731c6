"""Runs over in-memory rows, and what to compare of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmati.core.source import Source
from cosmati.data.tombstoned import Tombstoned
from cosmati.forget.asked import Asked
from cosmati.forget.past_run import PastRun
from cosmati.forget.replay import Make, Wrap, replay
from cosmati.methods import EMA, IsolatedAdapters
from cosmati.optim import AdamW, Muon
from cosmati.routing.policy_file import load_policy
from cosmati.train.trainer import Trainer
from tests.train.isolated.samples import CASES, Case, source, trainer

PLAIN = load_policy("version: 1\ntaxonomy: t\nregions: {all: {params: '*'}}\nrules: [{class: '**', weight: 1}]\n")


def bare(name: str) -> Case:
    """Return a case in which no class has anything of its own."""
    case = CASES[name]
    return Case(case.build, case.rows, IsolatedAdapters(), case.loss)


def maker(
    case: Case, data: Source, *, policy: Any = PLAIN, methods: Sequence[Any] | None = None, **options: Any
) -> Make:
    """Return what makes a run's trainer over its data, wrapped."""

    def make(wrap: Wrap, folder: Path) -> Trainer:
        config = {"run_folder": folder, "checkpoint_every": "2ba", "num_checkpoints": 9, **options.get("config", {})}
        own = [EMA(half_life="2ba")] if methods is None else methods
        rest = {name: value for name, value in options.items() if name != "config"}
        return trainer(case, wrap(data), [Muon(lr=0.02), AdamW(lr=0.01)], own, chosen=policy, config=config, **rest)

    return make


def unwrapped(source: object) -> Source:
    """Return a source as it is."""
    assert isinstance(source, Source)
    return source


def without(**gone: Any) -> Wrap:
    """Return what puts tombstones into a source, without any of the code that's tested."""
    return lambda source: Tombstoned(source, **gone)  # type: ignore[arg-type]


def whole(run: Trainer) -> dict[str, Tensor]:
    """Return every tensor of a run: weights, buffers, states of optimizers and methods, and averages as evaluated."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    found = {name: value.clone() for name, value in run.model.state_dict().items()}
    for number, scheduled in enumerate(run.assembly.optimizers):
        for parameter, state in scheduled.optimizer.state.items():
            own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            found |= {f"{number}/{names[id(parameter)]}/{key}": value.clone() for key, value in own.items()}
    for index, state in run.states.items():
        found |= {f"method {index}/{name}": value.clone() for name, value in state.items()}
    with run.averaged() as model:
        found |= {f"averaged {name}": value.clone() for name, value in model.state_dict().items()}
    return found


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """Return names of what isn't equal in every bit."""
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]
