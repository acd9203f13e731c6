"""Runs over signed data are replayed by what the ledger says was withdrawn: nobody is asked today."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `authority` isn't installed")

import torch
from torch import nn

from cosmati import Trainer, load_policy
from cosmati.ledger.verify import verify_ledger
from cosmati.optim.optimizers import SGD
from cosmati.train.config import RunConfig
from cosmati.train.policy_watch import FILE
from cosmati.train.replay import ReplayRequest
from tests.provenance.authority.people import PII, TAXONOMY
from tests.train.replay_world import replayed
from tests.train.vouched_world import POLICY, World, loss, revoke

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    World.made_in(root)
    return root


@pytest.fixture
def world(made: Path, tmp_path: Path) -> World:
    return World.found_in(Path(shutil.copytree(made, tmp_path / "world")))


def again(world: World, *, ask: bool) -> Callable[[ReplayRequest], Trainer]:
    """Return what makes the trainers of a replay, over the shards as they lie there or as they're signed today."""
    other = World.found_in(world.people.root)
    other.ask = ask

    def make(asked: ReplayRequest) -> Trainer:
        config: dict[str, Any] = {"num_microbatches": 4, "run_folder": asked.run_folder} | dict(asked.settings)
        own = {
            "policy": asked.policy,
            "taxonomy": TAXONOMY,
            "observers": asked.observers,
            "config": RunConfig(**config),
        }
        return Trainer(nn.Linear(1, 1), loss, other.sources(), optimizers=SGD(lr=1e-3, momentum=0.9), **own)

    def seeded(asked: ReplayRequest) -> Trainer:

        torch.manual_seed(0)
        return make(asked)

    return seeded


def check(folder: Path, make: Callable[[ReplayRequest], Trainer], *segments: tuple[int, int]) -> None:
    for first, end in segments:
        found = replayed(folder, first, end, make)
        assert (found.outcome, list(map(str, found.differences))) == ("equal", [])


@pytest.mark.parametrize("ask", [True, False])
def test_signed_data_are_replayed(world: World, tmp_path: Path, ask: bool) -> None:
    world.trainer(tmp_path / "run", {}, num_checkpoints=99).fit()
    check(tmp_path / "run", again(world, ask=ask), (4, 8), (0, 24))


def test_what_was_rejected_from_a_step_on_is_rejected_again(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    world.trainer(run, {9: revoke(PII)}, grace="{revocation: reject}", num_checkpoints=99).fit()
    assert verify_ledger(run / "ledger").withdrawn
    # The source isn't vouched for any more, so its rows are read as they lie there.
    check(run, again(world, ask=False), (10, 16), (14, 20), (0, 24))


def test_a_rejected_class_and_another_policy(world: World, tmp_path: Path) -> None:
    run, half = tmp_path / "run", load_policy(POLICY.replace("weight: 1", "weight: 0.5"))

    def leave(_: World) -> None:
        (run / FILE).write_text(json.dumps({"policy": half.to_mapping()}))
        assert trainer.policy_watch is not None
        trainer.policy_watch.look()

    events = {9: revoke(PII), 16: leave}
    trainer = world.trainer(run, events, grace="{revocation: reject}", num_checkpoints=99)
    trainer.fit()
    assert len(verify_ledger(run / "ledger").policies) == 2
    check(run, again(world, ask=False), (10, 16), (18, 22), (0, 24))
