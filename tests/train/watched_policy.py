"""A governed run that isn't begun, with the watch over its policy: what is left in its folder, and what it tells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from cosmati import InMemory, PolicyFile, RunConfig, load_policy
from cosmati.core.clock import Clock
from cosmati.core.loss import Classification
from cosmati.errors import CosmatiError
from cosmati.optim.optimizers import SGD
from cosmati.train.identity import Change
from cosmati.train.ingredients import Ingredients
from cosmati.train.policy_watch import FILE, REFUSED_FILE, PolicyWatch, policy_watch_of
from cosmati.train.prepare import prepare
from tests.train.policy_world import AFTER, BEFORE, POLICY, ROWS, TAXONOMY

HALF = """rules:
  - {class: "**", weight: 0.5}
"""
MEASURED = """bands: {names: [low, high], measure: a score, thresholds: [0.5]}
measures: {trust: {grades: [low, high]}}
rules:
  - {class: "**", weight: 1}
"""


def policy(text: str = AFTER) -> PolicyFile:
    return load_policy(POLICY + text)


def signed(text: str = AFTER, **statement: Any) -> PolicyFile:
    vouched: Any = SimpleNamespace(
        statement=statement,
        facts={"number": 2},
        files={"ab": b"a voucher"},
        voucher=SimpleNamespace(target="main 2", root="R"),
        vouchers=(),
        number=2,
    )
    return policy(text).with_voucher(vouched)


class World:
    """A governed run that isn't begun, its watch, and what run and continuity are told."""

    def __init__(self, folder: Path, text: str = BEFORE, vouchers: Any = None) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        config = RunConfig(budget="12ba", num_microbatches=4, num_threads=1, run_folder=folder)
        data = InMemory(ROWS, 16, torch.arange(48) % 3, TAXONOMY.classes)
        given = Ingredients(model, Classification(3), data, [SGD(lr=0.1)], (), policy(text), TAXONOMY, config)
        self.prepared = replace(prepare(given), watch=vouchers)
        self.a = self.prepared.assembly
        found = policy_watch_of(self.prepared)
        assert found is not None
        self.watch: PolicyWatch = found
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.told: list[Any] = []
        self.file_stood: list[bool] = []
        self.run: Any = SimpleNamespace(amend=self.amend, restate=lambda **facts: self.told.append(("restate", facts)))
        self.continuity: Any = SimpleNamespace(
            policy_in_force=self.a.policy,
            anchor=None,
            close_span=lambda step, plan: self.told.append(("close", step, plan)) or b"\x01\x02",  # type: ignore[func-returns-value]
            go_by=lambda *given: self.told.append(("go by", *given)),
        )

    def amend(self, clock: Clock, changes: Sequence[Change], **facts: Any) -> None:
        self.file_stood.append((self.folder / FILE).exists())
        self.told.append(("amend", clock.step, list(changes), facts))

    def leave(self, what: bytes | PolicyFile) -> bytes:
        raw = json.dumps({"policy": what.to_mapping()}).encode() if isinstance(what, PolicyFile) else what
        (self.folder / FILE).write_bytes(raw)
        self.watch.look()
        return raw

    def before_step(self, step: int) -> Any:
        return self.watch.before_step(self.run, Clock(step=step), self.continuity, self.a.plan)

    def change(self, step: int, text: str = AFTER, **changed: Any) -> dict[str, Any]:
        return {
            "step": step, "text": policy(text).to_mapping(), "by": "me", "signed": None, "anchor": None,
        } | changed  # fmt: skip

    def refused(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.folder / REFUSED_FILE).read_text())
        return found

    def weights_at(self, step: int) -> list[tuple[float, ...]]:
        return [self.a.router.route_of(class_id, step).weights for class_id in range(3)]


class Source:
    """The next versions that an authority has signed."""

    def __init__(self, *found: PolicyFile | CosmatiError) -> None:
        self.policy_source = SimpleNamespace(found=SimpleQueue[Any]())
        for one in found:
            self.policy_source.found.put(one)
        self.told: list[Any] = []

    def rebase(self, compiled: Any, grace: object, vouched: object) -> Any:
        self.told.append((grace, vouched))
        return replace(compiled, policy_digest=b"rebased")
