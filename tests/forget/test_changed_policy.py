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
from cosmati.forget.replay import Wrap
from cosmati.optim import SGD
from tests.forget.samples import KEPT, differing, forgotten, tensors, trained, unwrapped, without
from tests.train.policy_world import AFTER, BEFORE, POLICY, TAXONOMY, Event, Happening, leave

NUM = 96
ROWS = torch.randn(NUM, 4, generator=torch.Generator().manual_seed(0)), torch.arange(NUM) % 3


def trainer(folder: Path, data: Source, events: Mapping[int, Event] | None = None) -> Trainer:
    torch.manual_seed(1)
    seen = Happening(events or {})
    seen.trainer = Trainer(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        Classification(3),
        data,
        optimizers=SGD(lr=0.05, momentum=0.9),
        policy=load_policy(POLICY + BEFORE),
        taxonomy=TAXONOMY,
        observers=seen,
        config=RunConfig(budget="12ba", num_threads=1, num_microbatches=4, run_folder=folder, **KEPT),  # type: ignore[arg-type]
    )
    return seen.trainer


@pytest.mark.parametrize(("step", "is_possible"), [(3, False), (6, True)])
def test_rows_are_forgotten_after_a_change_of_policy_and_not_before(
    tmp_path: Path, step: int, *, is_possible: bool
) -> None:
    """It acts from step 5 on: a replay from before it would go by the policy that the run was begun with."""
    data, events = InMemory(ROWS, 8, torch.arange(NUM) % 3, TAXONOMY.classes), {4: leave(AFTER)}
    order = data.order(seed=0, num_microbatches=4, route_pure=True)
    rows = frozenset(order.microbatch(step, 1).lineage.row_ids.tolist())

    def make(wrap: Wrap, folder: Path) -> Trainer:
        return trainer(folder, wrap(data))

    trainer(tmp_path / "run", data, events).fit()
    if not is_possible:
        with pytest.raises(ForgetError, match="which a replay from there doesn't do again: policy from step 5 on"):
            forgotten(tmp_path / "run", ToForget(rows=rows), make, tmp_path / "out")
        return
    done = forgotten(tmp_path / "run", ToForget(rows=rows), make, tmp_path / "out")
    trainer(tmp_path / "truth", without(rows=rows)(data), events).fit()
    assert not differing(tensors(done.out), tensors(tmp_path / "truth"))


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
