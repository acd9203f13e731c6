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
from cosmati.forget.asked import ToForget
from cosmati.forget.past_run import Gone, PastRun
from cosmati.forget.replay import Wrap
from cosmati.ledger.verify import verify_ledger
from cosmati.optim import SGD
from cosmati.train.replay import MakeTrainer, ReplayRequest
from tests.forget.samples import KEPT, differing, forgotten, tensors, trained, unwrapped, without
from tests.train.policy_world import AFTER, BEFORE, POLICY, TAXONOMY, Event, Happening, leave
from tests.train.replay_world import replayed

pytestmark = pytest.mark.long

NUM = 96
ROWS = torch.randn(NUM, 4, generator=torch.Generator().manual_seed(0)), torch.arange(NUM) % 3


DATA = InMemory(ROWS, 8, torch.arange(NUM) % 3, TAXONOMY.classes)


def trainer(
    folder: Path, data: Source, events: Mapping[int, Event] | None = None, text: str = BEFORE, **config: Any
) -> Trainer:
    policy = config.pop("policy", None) or load_policy(POLICY + text)
    if then := config.pop("then", None):
        policy = then.policy_for(policy)
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


MOST = AFTER.replace("0.5", "0.25")
"""Rules that let all teach less."""


@pytest.mark.parametrize(
    ("live", "stop", "step"),
    [
        (4, 8, 1),
        (8, 4, 1),
        pytest.param(4, 8, 6, marks=pytest.mark.slow),
        pytest.param(8, 4, 3, marks=pytest.mark.slow),
    ],
)
def test_policies_changed_live_and_at_a_stop_change_again(tmp_path: Path, live: int, stop: int, step: int) -> None:
    """One acts from the step after `live` on, the other after the stop, with a longer budget, in either order."""
    texts, event = ((BEFORE, MOST), AFTER) if live < stop else ((BEFORE, AFTER), MOST)
    later = {"text": texts[1], "budget": "12ba", "change": ("policy", "budget")}

    def ran(folder: Path, data: Source) -> Path:
        trainer(folder, data, {live: leave(event)}, texts[0], budget=f"{stop}ba").fit()
        trainer(folder, data, {live: leave(event)}, **later).fit()
        return folder

    def now(wrap: Wrap, folder: Path | None, **config: Any) -> Trainer:
        return make(wrap, folder, **{"text": texts[1], "budget": "12ba"} | config)

    rows = rows_at(step)
    run = ran(tmp_path / "run", DATA)
    done = forgotten(run, ToForget(rows=rows), now, tmp_path / "out")
    truth = ran(tmp_path / "truth", without(rows=rows)(DATA))
    assert not differing(tensors(done.out), tensors(truth))
    assert policies_of(done.out) == policies_of(truth)
    assert replayed(done.out, 0, 12, again(done.out)).differences == ()


def policies_of(folder: Path) -> list[str]:
    """Return the policy of each step that stands."""
    ledger = PastRun(folder).ledger
    steps = {
        entry.step: entry.policy_digest.hex() for item, entry, _ in ledger.steps() if item.index in ledger.standing
    }
    return [steps[step] for step in sorted(steps)]


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
