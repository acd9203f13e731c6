"""Three signed sources, one of whose classes has something of its own in the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmati import Loss, RunConfig, Trainer, load_policy
from cosmati.data.tombstoned import Tombstoned
from cosmati.methods import EMA, IsolatedAdapters
from cosmati.optim import AdamW
from tests.provenance.authority.people import PII, TAXONOMY
from tests.train.vouched_world import Events, Happening, World

PAIR = (PII, "own")
POLICY = f"""
version: 1
taxonomy: firm
regions: {{trunk: {{params: '*', exclude: '*.isolated.*'}}, own: {{tag: isolated/{PII}}}}}
rules:
  - {{class: "**", weight: 1}}
  - {{class: "**", region: own, weight: 0}}
  - {{class: {PII}, region: trunk, weight: 0}}
  - {{class: {PII}, region: own, weight: 1}}
"""


def loss(model: nn.Module, rows: Tensor) -> Loss:
    values = (model(rows.float()[:, None] / 24) - 1).square().mean(1)
    return Loss(values.sum(), float(len(values)), per_row=values)


def error(model: nn.Module, rows: Tensor) -> Tensor:
    output: Tensor = model(rows.float()[:, None] / 24)
    return (output - 1).square().mean()


def trainer(world: World, folder: Path | None, events: Events, grace: str = "", **more: Any) -> Trainer:
    """Return a run with adapters of one class; `gone` has tombstones in the place of its rows."""
    torch.manual_seed(0)
    gone, evaluation = more.pop("gone", False), more.pop("evaluation", None)
    own = {name: more.pop(name) for name in ("run",) if name in more}
    source = world.sources(**own)
    settings: dict[str, Any] = {"budget": "20ba", "num_threads": 1, "num_microbatches": 4, "run_folder": folder}
    settings |= {} if folder is None else {"checkpoint_every": "3ba"}
    seen = Happening(world, events)
    seen.trainer = Trainer(
        nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 2)),
        loss,
        Tombstoned(source, [PII]) if gone else source,
        optimizers=[AdamW(lr=0.01, weight_decay=0.1)],
        methods=[IsolatedAdapters(classes=PII, rank=2), EMA()],
        policy=load_policy(POLICY + (grace and f"grace: {grace}\n")),
        taxonomy=TAXONOMY,
        observers=seen,
        evaluation=evaluation,
        config=RunConfig(**settings | more),
    )
    return seen.trainer


def tensors(run: Trainer) -> dict[str, Tensor]:
    """Return copies of weights, averages and what optimizers keep, by names that say whose they are."""
    found = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    pieces = {id(parameter): name for name, parameter in run.model.named_parameters()}
    for scheduled in run.assembly.optimizers:
        for parameter, state in scheduled.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found[f"optimizer.{pieces[id(parameter)]}.{key}"] = value
    for index, state in run.states.items():
        found |= {f"method.{index}.{name}": value for name, value in _flat(state)}
    return {name: value.detach().clone() for name, value in found.items()}


def shared(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what isn't a class's own."""
    return {name: value for name, value in values.items() if "isolated" not in name}


def _flat(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        return [(name, state)]
    if isinstance(state, Mapping):
        return [pair for key, value in state.items() for pair in _flat(value, f"{name}.{key}")]
    return []
