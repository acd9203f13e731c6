"""A small governed run, and policies that are left in its folder after given steps: no clock has a part in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmati import InMemory, PolicyFile, RunConfig, Taxonomy, Trainer, load_policy
from cosmati.core.loss import Classification
from cosmati.optim import SGD
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from cosmati.train.policy_watch import FILE

ROWS = torch.randn(48, 4, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3
TAXONOMY = Taxonomy("three", "1", (("cold", ""), ("hot", ""), ("warm", "")))
POLICY = """
version: 1
taxonomy: three
regions: {body: {params: ["0.*"]}, head: {params: ["2.*"]}}
"""
BEFORE = """rules:
  - {class: "**", weight: 1}
  - {class: cold, region: body, weight: 0.5}
  - {class: warm, region: body, weight: 0}
"""
AFTER = """rules:
  - {class: "**", weight: 0.5}
  - {class: cold, decision: reject}
  - {class: warm, region: body, weight: 0}
"""
Event = Callable[[Trainer], object]


class Happening(Observer):
    """Lets things happen after given steps, on the first rank."""

    def __init__(self, events: Mapping[int, Event]) -> None:
        self._events = events
        self.trainer: Trainer | None = None

    def on_step(self, outcome: StepOutcome) -> None:
        assert self.trainer is not None
        if outcome.clock.step in self._events and self.trainer.assembly.ranks.rank == 0:
            self._events[outcome.clock.step](self.trainer)


def trainer(folder: Path, events: Mapping[int, Event] | None = None, *, text: str = BEFORE, **config: Any) -> Trainer:
    torch.manual_seed(1)
    seen = Happening(events or {})
    policy = config.pop("policy", None) or load_policy(POLICY + text)
    settings: dict[str, Any] = {"budget": "12ba", "num_threads": 1, "num_microbatches": 4, "checkpoint_every": "3ba"}
    seen.trainer = Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        Classification(3),
        InMemory(ROWS, 16, torch.arange(48) % 3, TAXONOMY.classes),
        optimizers=SGD(lr=0.05, momentum=0.9, weight_decay=0.01),
        policy=policy,
        taxonomy=TAXONOMY,
        observers=seen,
        config=RunConfig(**settings | {"run_folder": folder} | config),
    )
    return seen.trainer


def leave(what: PolicyFile | str | bytes | Mapping[str, Any]) -> Event:
    """Return what leaves a policy, or a file of any bytes, in the run's folder, and has the run read it."""

    def act(run: Trainer) -> None:
        assert run.assembly.config.run_folder is not None
        (run.assembly.config.run_folder / FILE).write_bytes(what if isinstance(what, bytes) else _told(what))
        assert run.policy_watch is not None
        run.policy_watch.look()

    return act


def _told(what: PolicyFile | str | Mapping[str, Any]) -> bytes:
    return json.dumps(what if isinstance(what, Mapping) else {"policy": _policy(what).to_mapping()}).encode()


def _policy(what: PolicyFile | str) -> PolicyFile:
    return what if isinstance(what, PolicyFile) else load_policy(POLICY + what)
