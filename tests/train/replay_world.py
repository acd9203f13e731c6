"""Small runs of several kinds, and how each is made once more for a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmati.core.loss import Classification, LanguageModel
from cosmati.data.in_memory import InMemory
from cosmati.ledger.details import decode_details
from cosmati.ledger.keys import load_key
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.reader import read_verifier_key
from cosmati.ledger.row_blinds import secrets_of_run
from cosmati.ledger.standing import StandingSteps
from cosmati.methods import EMA, SAM, MixUp
from cosmati.optim import SGD, AdamW
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.train.config import RunConfig
from cosmati.train.observers.observer import Observer
from cosmati.train.replay import MakeTrainer, ReplayFound, ReplayRequest, nearest_checkpoint, replay
from cosmati.train.trainer import Trainer
from tests.ledger.test_verify import Item, write_signed
from tests.train.packs import samples as packs

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(64, 4, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)
IMAGES = torch.randn(64, 1, 5, 5, generator=GENERATOR), ROWS[1]
CLASS_IDS = torch.arange(64) % 2
TAXONOMY = Taxonomy("two", "1", (("cold", "cold rows"), ("hot", "hot rows")))
POLICY = """
version: 1
taxonomy: two
regions: {{body: {{params: ["0.*"]}}, head: {{params: ["2.*"]}}}}
rules:
  - {{class: "**", weight: 1}}
  - {{class: cold, region: body, weight: {weight}}}
"""


def routed_policy(weight: float = 0.5) -> PolicyFile:
    return load_policy(POLICY.format(weight=weight))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def with_batch_norm() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(*layers)


def dense(**options: Any) -> Trainer:
    options = {"methods": [EMA(half_life="3ba"), MixUp()], "optimizers": [AdamW(lr=0.01)]} | options
    return Trainer(mlp(), Classification(3), InMemory(ROWS, 16), **options)


def batch_norm(**options: Any) -> Trainer:
    options = {"methods": [SAM(rho=0.05)], "optimizers": [SGD(lr=0.05, momentum=0.9)]} | options
    return Trainer(with_batch_norm(), Classification(3), InMemory(IMAGES, 16), **options)


def packed(**options: Any) -> Trainer:
    options = {"policy": packs.policy(), "taxonomy": packs.TAXONOMY, "optimizers": [SGD(lr=0.5)]} | options
    data = packs.source(packs.documents(40), rows_per_step=4)
    return Trainer(packs.model(), LanguageModel(packs.VOCABULARY), data, **options)


def routed(**options: Any) -> Trainer:
    rows = options.pop("rows", ROWS)
    options = {"policy": routed_policy(), "taxonomy": TAXONOMY, "optimizers": [AdamW(lr=0.01)]} | options
    return Trainer(mlp(), Classification(3), InMemory(rows, 16, CLASS_IDS, ("cold", "hot")), **options)


KINDS: dict[str, Callable[..., Trainer]] = {
    "dense": dense,
    "BatchNorm": batch_norm,
    "packed": packed,
    "routed": routed,
}
SETTINGS: dict[str, Any] = {"num_threads": 1, "num_microbatches": 4, "details_every": 2, "update_norm_every": 3}


def build(kind: str, folder: Path, *, observers: Sequence[Observer] = (), **options: Any) -> Trainer:
    """Return a trainer of a kind; settings of its `RunConfig` are among the options."""
    torch.manual_seed(1)
    own = {n: options.pop(n) for n in [*options] if n in ("optimizers", "methods", "policy", "taxonomy", "rows")}
    settings = {"budget": "12ba", "checkpoint_every": "4ba", "num_checkpoints": 99, "ledger": True}
    config = RunConfig(run_folder=folder, **SETTINGS | settings | options)
    return KINDS[kind](observers=observers, config=config, **own)


def again(kind: str, **options: Any) -> MakeTrainer:
    """Return what makes the trainers of a replay."""

    def make(asked: ReplayRequest) -> Trainer:
        policy = {} if asked.policy is None else {"policy": asked.policy}
        settings = {**options, **asked.settings, **policy}
        return build(kind, asked.run_folder, observers=asked.observers, **settings)

    return make


def opened(folder: Path) -> StandingSteps:
    return StandingSteps(VerifiedLedger(folder / "ledger"))


def replayed(
    folder: Path,
    first: int,
    end: int,
    make: MakeTrainer,
    *,
    with_salt: bool = True,
    with_checkpoints: bool = True,
    **options: Any,
) -> ReplayFound:
    """Replay steps of a run from its own folder."""
    run = opened(folder)
    start = nearest_checkpoint(run, first, folder / "checkpoints" if with_checkpoints else None)
    blinds = secrets_of_run(run, folder / "private") if with_salt else None
    return replay(run, range(first, end), make, ledger=folder / "ledger", start=start, blinds=blinds, **options)


def entries(folder: Path) -> list[Item]:
    """Return what a ledger holds, to be written otherwise."""
    ledger = VerifiedLedger(folder / "ledger")
    return [(one.entry, None if one.details is None else decode_details(one.details)) for one in ledger.entries()]


def sign_again(folder: Path, items: Sequence[Item]) -> None:
    """Write the ledger anew with the operator's own key: what a lying operator can do."""
    key = load_key(folder / "private/operator.key", name=read_verifier_key(folder / "ledger").name)
    for path in sorted((folder / "ledger").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    write_signed(folder / "ledger", list(items), key)
