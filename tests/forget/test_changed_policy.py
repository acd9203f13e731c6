"""Deletions from runs whose policy was changed in mid-run, and of classes whose joint name is written another way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import InMemory, RunConfig, Trainer, load_policy
from cosmati.core.loss import Classification
from cosmati.core.source import Source
from cosmati.errors import ForgetError
from cosmati.forget.asked import ToForget
from cosmati.forget.past_run import Gone
from cosmati.forget.replay import Wrap
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import SGD
from cosmati.train.replay import MakeTrainer, ReplayRequest
from tests.forget.samples import KEPT, differing, forgotten, tensors, trained, unwrapped, without
from tests.train.policy_world import AFTER, BEFORE, POLICY, TAXONOMY, Event, Happening, leave
from tests.train.replay_world import replayed

NUM = 96
ROWS = torch.randn(NUM, 4, generator=torch.Generator().manual_seed(0)), torch.arange(NUM) % 3


DATA = InMemory(ROWS, 8, torch.arange(NUM) % 3, TAXONOMY.classes)


def trainer(
    folder: Path, data: Source, events: Mapping[int, Event] | None = None, text: str = BEFORE, **config: Any
) -> Trainer:
    policy = config.pop("policy", None) or load_policy(POLICY + text)
    torch.manual_seed(1)
    seen = Happening(events or {})
    seen.trainer = Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        Classification(3),
        data,
        optimizers=SGD(lr=0.05, momentum=0.9),
        policy=policy,
        taxonomy=TAXONOMY,
        observers=config.pop("observers", None) or seen,
        config=RunConfig(
            **{"budget": "12ba", "run_folder": folder, "num_threads": 1, "num_microbatches": 4} | KEPT | config
        ),
    )
    return seen.trainer


def rows_at(step: int) -> frozenset[int]:
    order = DATA.order(seed=0, num_microbatches=4, route_pure=True)
    return frozenset(order.microbatch(step, 1).lineage.row_ids.tolist())


def make(wrap: Wrap, folder: Path | None, **config: Any) -> Trainer:
    assert folder is not None
    return trainer(folder, wrap(DATA), **config)


def again(out: Path) -> MakeTrainer:
    """Return what makes the trainers of a replay of a run that was forgotten from."""

    def made(asked: ReplayRequest) -> Trainer:
        gone = Gone.after(out, asked.forgotten) if asked.forgotten else Gone()
        data = gone.of(DATA, (out / "private" / "rows.salt").read_bytes())
        return trainer(asked.run_folder, data, policy=asked.policy, observers=asked.observers, **asked.settings)

    return made


@pytest.mark.parametrize("step", [0, 3, 6])
def test_rows_are_forgotten_before_and_after_a_change_of_policy(tmp_path: Path, step: int) -> None:
    """It acts from step 5 on, and again: the ledger has it."""
    rows, events = rows_at(step), {4: leave(AFTER)}
    trainer(tmp_path / "run", DATA, events).fit()
    done = forgotten(tmp_path / "run", ToForget(rows=rows), make, tmp_path / "out")
    trainer(tmp_path / "truth", without(rows=rows)(DATA), events).fit()
    assert not differing(tensors(done.out), tensors(tmp_path / "truth"))
    trainer(tmp_path / "unchanged", without(rows=rows)(DATA)).fit()
    assert differing(tensors(done.out), tensors(tmp_path / "unchanged"))
    policies = [one.step for one in verify_ledger(done.out / "ledger").policies]
    assert policies[-1] == 5
    assert replayed(done.out, 0, 12, again(done.out)).differences == ()


def test_a_policy_that_was_changed_at_a_stop_is_not_done_again(tmp_path: Path) -> None:
    """The recipe has the new one alone: from before the stop another would be in force."""
    trainer(tmp_path / "run", DATA, budget="8ba").fit()
    later = {"text": AFTER, "budget": "12ba", "change": ("policy", "budget")}
    trainer(tmp_path / "run", DATA, **later).fit()

    def now(wrap: Wrap, folder: Path | None, **config: Any) -> Trainer:
        return make(wrap, folder, text=AFTER, **config)

    with pytest.raises(ForgetError, match=r"which a replay from there doesn't do again: .*policy from step 8 on"):
        forgotten(tmp_path / "run", ToForget(rows=rows_at(3)), now, tmp_path / "out")


def test_a_joint_class_is_forgotten_however_its_members_are_ordered(tmp_path: Path) -> None:
    """The ledger names members in alphabetical order, and data may have another."""
    data = InMemory(ROWS, 8, torch.arange(NUM) % 3, ("cold", "hot", "warm&cold"))

    def make(wrap: Wrap, folder: Path) -> Any:
        return trainer(folder, wrap(data))

    run = trained(make, tmp_path / "run", unwrapped)
    done = forgotten(run, ToForget(classes=("warm",)), make, tmp_path / "out")
    truth = trained(make, tmp_path / "truth", without(classes=["warm&cold"]))
    assert not differing(tensors(done.out), tensors(truth))
    assert differing(tensors(done.out), tensors(run))
