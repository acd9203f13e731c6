"""What a checkpoint holds of a run, and the way back, without a trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Clock
from cosmati.core.loss import Regression
from cosmati.core.method import Method, Stage, State
from cosmati.core.pieces import Pieces
from cosmati.errors import CheckpointError
from cosmati.optim import SGD, AdamW
from cosmati.train.assembly import Assembly
from cosmati.train.config import RunConfig
from cosmati.train.feed import Feed
from cosmati.train.prepare import Ingredients, prepare
from cosmati.train.run.checkpoints import Checkpoint, publish_checkpoint, read_checkpoint, whole, write_checkpoint
from cosmati.train.snapshot import restore, snapshot

CLOCK = Clock(step=3, epoch=1, step_in_epoch=1, rows=12, tokens=24, seconds=1.5)


@dataclass(frozen=True, kw_only=True)
class Follows(Method):
    """Has a state of its own."""

    start: float
    stage: ClassVar[Stage] = Stage.AVERAGE

    def init(self, weights: Pieces) -> State:
        return {"mean": torch.full((2,), self.start), "count": torch.tensor(0)}


@dataclass(frozen=True, kw_only=True)
class Stateless(Method):
    """Has none."""

    stage: ClassVar[Stage] = Stage.AVERAGE


class Loader:
    """Knows its place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.place += 1
            yield torch.full((4, 3), float(self.place)), torch.zeros(4, 1)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def _prepared(seed: int, width: int = 2, start: float = 0.0, lr: float = 0.5) -> tuple[Assembly, Feed, Loader]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizers = [AdamW(lr=lr, parameters="0.*"), SGD(lr=0.25, momentum=0.9)]
    loader = Loader()
    methods = [Follows(start=start), Stateless(), Follows(start=start + 1)]
    ready = prepare(
        Ingredients(
            model, Regression(), loader, optimizers, methods, None, None, RunConfig(budget="9ba", num_threads=1)
        )
    )
    assert ready.feed is not None
    return ready.assembly, ready.feed, loader


def _train(assembly: Assembly, feed: Feed, steps: int) -> list[Tensor]:
    """Some steps by hand; the weights after each."""
    weights = []
    for _ in range(steps):
        data = feed.whole(Clock())
        assert data is not None
        assembly.model(data[0]).square().mean().backward()
        for one in assembly.optimizers:
            one.optimizer.step()
            one.optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten().clone() for p in assembly.model.parameters()]))
    return weights


def _states(*values: float) -> dict[int, State]:
    first, second = ({"mean": torch.full((2,), value), "count": torch.tensor(int(value))} for value in values)
    return {0: first, 1: {}, 2: second}


def test_what_goes_on_from_a_snapshot_takes_the_same_steps(tmp_path: Path) -> None:
    assembly, feed, _ = _prepared(0)
    _train(assembly, feed, 2)
    taken = whole(snapshot(assembly, _states(7.0, 8.0), CLOCK, assembly.plan, feed))
    checkpoint = read_checkpoint(publish_checkpoint(write_checkpoint(tmp_path, taken), keep=1))
    expected = _train(assembly, feed, 3)
    other, other_feed, loader = _prepared(1)
    restored = restore(checkpoint, other, other_feed)
    assert loader.place == 1  # From where the last batch is read again, and compared.
    assert all(torch.equal(a, b) for a, b in zip(_train(other, other_feed, 3), expected, strict=True))
    buffers = zip(other.model.buffers(), assembly.model.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in buffers)
    assert restored.clock == CLOCK
    assert restored.plan == assembly.plan
    assert {i: {n: v.tolist() for n, v in s.items()} for i, s in restored.states.items()} == {
        0: {"mean": [7.0, 7.0], "count": 7},
        1: {},
        2: {"mean": [8.0, 8.0], "count": 8},
    }


def test_a_snapshot_names_what_it_holds() -> None:
    assembly, feed, _ = _prepared(0)
    _train(assembly, feed, 1)
    plan = assembly.plan.withdraw("resume", "a reason")
    checkpoint = whole(snapshot(assembly, _states(7.0, 8.0), CLOCK, plan, feed))
    assert checkpoint.step == 3
    assert set(checkpoint.model) == set(assembly.model.state_dict())
    owned = {name.split("/")[1]: set[str]() for name in checkpoint.state if name.startswith("optimizer/")}
    for name in checkpoint.state:
        kind, index, *rest = name.split("/")
        if kind == "optimizer":
            owned[index].add(rest[0])
    # No name of the first one's is the second one's.
    assert owned == {"0": {"0.weight", "0.bias"}, "1": {"1.weight", "1.bias", "2.weight", "2.bias"}}
    methods = {name for name in checkpoint.state if name.startswith("method/")}
    assert methods == {"method/0/mean", "method/0/count", "method/2/mean", "method/2/count"}
    facts = json.loads(json.dumps(checkpoint.facts))
    assert facts["clock"] == [3, 1, 1, 12, 24, 1.5]
    feed_facts = {"passes": 0, "batches": 1, "from": 1, "loader": {"place": 1}, "generators": []}
    assert {name: facts["feed"][name] for name in feed_facts} == feed_facts
    assert facts["feed"]["first"] == facts["feed"]["last"]
    assert ["resume", "a reason"] in facts["withdrawn"]
    assert {name for name, _ in facts["withdrawn"]} == {g.name for g in plan.guarantees if not g.holds}
    assert [len(one["groups"]) for one in facts["optimizers"]] == [
        len(o.optimizer.param_groups) for o in assembly.optimizers
    ]


def test_a_snapshot_without_data_has_no_place() -> None:
    assembly, _, _ = _prepared(0)
    checkpoint = whole(snapshot(assembly, {}, CLOCK, assembly.plan, None))
    assert checkpoint.facts["feed"] == {}
    assert restore(checkpoint, assembly, None).clock == CLOCK


def test_promises_that_were_taken_back_stay_so() -> None:
    assembly, feed, _ = _prepared(0)
    assert assembly.plan.holds("resume")
    plan = assembly.plan.withdraw("resume", "a reason")
    restored = restore(whole(snapshot(assembly, {}, CLOCK, plan, feed)), assembly, feed)
    assert restored.plan == plan
    assert not restored.plan.holds("resume")


def test_another_model_is_refused() -> None:
    assembly, feed, _ = _prepared(0)
    checkpoint: Checkpoint = replace(whole(snapshot(assembly, {}, CLOCK, assembly.plan, feed)), step=3)
    other, other_feed, _ = _prepared(0, width=5)
    with pytest.raises(CheckpointError, match="don't fit the model"):
        restore(checkpoint, other, other_feed)
