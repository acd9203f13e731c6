"""What is looked at while a run is opened: whether ranks are alike, schedulers, states of observers, the first file."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.plan import Facts, Guarantee, Plan, Promise
from cosmati.errors import PlanError
from cosmati.train import opening
from cosmati.train.observers.observer import Observer
from cosmati.train.opening import (
    _compare_ranks,
    _digest,
    _restore_observers,
    read_back,
    warn_of_idle_schedulers,
    without_ends,
    without_schedulers,
)
from cosmati.train.run.checkpoints import Checkpoint, publish_checkpoint, write_checkpoint

FACTS = Facts(num_microbatches=1, rows_per_microbatch=1, positional_data=True)


# ---------------------------------------------------------------------------------------- observers' states


class Keeps(Observer):
    """Keeps what it's given back."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def kept(**observers: Any) -> Checkpoint:
    return Checkpoint(7, {}, {}, {"observers": observers} if observers else {})


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_says_whose_state_nobody_takes(rank: int) -> None:
    one = Keeps()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _restore_observers([one], kept(Keeps={"a": 1}), rank)
        _restore_observers([one], kept(), rank)
        assert not caught
        _restore_observers([one], kept(Keeps={"a": 2}, Other={"a": 3}, Another={}), rank)
    assert one.state == {"a": 2}
    told = [str(found.message) for found in caught]
    assert len(told) == int(rank == 0)
    assert all(
        text.startswith("The checkpoint of step 7 keeps the state of Another, Other, and the run goes on without")
        for text in told
    )


# ---------------------------------------------------------------------------------------- ranks alike


class Asked:
    """Ranks, of which another holds what it holds."""

    def __init__(self, identity: Mapping[str, Any], weights: bytes) -> None:
        self.identity, self.weights, self.compared = identity, weights, list[bytes]()

    def all_equal(self, own: bytes) -> bool:
        self.compared.append(own)
        known = {name: one for name, one in self.identity.items() if not name.startswith("model.contents.")}
        return own in (_digest(known), self.weights)

    def unlike_names(self, own: Mapping[str, bytes]) -> list[str]:
        return sorted(name for name in {**own, **self.identity} if own.get(name) != _digest(self.identity.get(name)))


def prepared(identity: Mapping[str, Any], ranks: Asked, weights: bytes = b"w") -> Any:
    layout = SimpleNamespace(digest=lambda: weights)
    return SimpleNamespace(identity=identity, assembly=SimpleNamespace(ranks=ranks, layout=layout))


def test_ranks_with_one_run_and_one_model_may_have_drawn_tensors_of_their_own() -> None:
    ranks = Asked({"seed": 1, "model.contents.rope": "theirs"}, b"w")
    _compare_ranks(prepared({"seed": 1, "model.contents.rope": "ours"}, ranks))
    assert ranks.compared == [_digest({"seed": 1}), b"w"]


def test_ranks_that_were_given_different_runs_are_told_the_first_names() -> None:
    ours = dict.fromkeys("abcdefg", 1)
    with pytest.raises(
        PlanError, match=r"^The ranks have been given different runs: b, c, d, e, f differ\. Every rank"
    ):
        _compare_ranks(prepared(ours, Asked({**dict.fromkeys("bcdefg", 2), "a": 1}, b"w")))


def test_ranks_with_different_weights_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^The ranks hold different weights at the start\. Every rank has to build"):
        _compare_ranks(prepared({"seed": 1}, Asked({"seed": 1}, b"other")))


def test_a_digest_does_not_rest_on_the_order_of_names() -> None:
    told = {"b": [1, 2], "a": None}
    assert _digest(told) == hashlib.sha256(json.dumps({"a": None, "b": [1, 2]}).encode()).digest()


# ---------------------------------------------------------------------------------------- read back


class Layout:
    """A model of so many bytes, and what was loaded into it."""

    def __init__(self, *sizes: int) -> None:
        self.tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.loaded: list[list[float]] = []

    def save(self) -> list[tuple[str, Tensor]]:
        return [(str(number), one) for number, one in enumerate(self.tensors)]

    def load(self, model: Mapping[str, Tensor]) -> None:
        self.loaded.append(model["w"].tolist())


@pytest.mark.parametrize(("most", "is_read"), [(5, True), (4, False)])
def test_the_newest_checkpoint_is_read_back_unless_the_model_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, *, is_read: bool
) -> None:
    monkeypatch.setattr(opening, "_READ_BACK_BYTES", most)
    layout = Layout(2, 3)
    for folder in (None, tmp_path):
        made: Any = SimpleNamespace(config=SimpleNamespace(run_folder=folder), layout=layout)
        read_back(made)
    assert layout.loaded == [], "there is none"
    for step in (1, 2):
        one = Checkpoint(step, {"w": torch.tensor([float(step)])}, {}, {})
        publish_checkpoint(write_checkpoint(tmp_path / "checkpoints", one), keep=9)
    read_back(made)
    assert layout.loaded == ([[2.0]] if is_read else [])


def test_a_gigabyte_is_read_back() -> None:
    assert opening._READ_BACK_BYTES == 1024**3


# ---------------------------------------------------------------------------------------- schedulers


def assembled(*optimizers: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(optimizers=[SimpleNamespace(optimizer=one) for one in optimizers])


def sgd(*, is_scheduled: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([{"params": nn.Linear(1, 1).parameters()}, {"params": [torch.zeros(1)]}], lr=0.1)
    if is_scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return optimizer


def promised(*broken: Promise) -> Plan:
    kinds = (Promise.PARITY, Promise.RESUME, Promise.REPLAYABLE)
    return Plan((), tuple(Guarantee(one, one not in broken, "as it was") for one in kinds), FACTS)


def test_without_a_scheduler_of_torch_s_nothing_is_taken_back() -> None:
    assert without_schedulers(promised(), assembled(sgd(is_scheduled=False))) == promised()


def test_what_a_scheduler_of_torch_s_breaks_is_taken_back() -> None:
    found = without_schedulers(promised(), assembled(sgd(is_scheduled=False), sgd(is_scheduled=True)))
    assert [(one.promise, one.holds) for one in found.guarantees] == [
        (Promise.PARITY, True),
        (Promise.RESUME, False),
        (Promise.REPLAYABLE, False),
    ]
    assert all(one.because.startswith("SGD has a torch scheduler, whose count no") for one in found.guarantees[1:])
    one_group = sgd(is_scheduled=False)
    one_group.param_groups[1]["initial_lr"] = 0.1
    assert not without_schedulers(promised(), assembled(one_group)).holds(Promise.RESUME)


def test_what_was_broken_before_keeps_its_reason() -> None:
    found = without_schedulers(promised(Promise.RESUME), assembled(sgd(is_scheduled=True)))
    assert [one.because[:9] for one in found.guarantees] == ["as it was", "as it was", "SGD has a"]


class Steps(Observer):
    """An observer of the user's own."""


def test_a_scheduler_that_nobody_would_step_is_warned_of() -> None:
    scheduled = assembled(sgd(is_scheduled=False), sgd(is_scheduled=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_schedulers(assembled(sgd(is_scheduled=False)), [])
        warn_of_idle_schedulers(scheduled, [Observer(), Steps()])
    for observers in ([], [Observer()]):
        with pytest.warns(
            UserWarning, match=r"^A torch scheduler is bound to the SGD, and fit\(\) doesn't step it"
        ) as w:
            warn_of_idle_schedulers(scheduled, observers)
        assert len(w) == 1


# ---------------------------------------------------------------------------------------- ends


def test_where_nobody_ends_the_run_the_plan_is_the_same_one() -> None:
    plan = promised()
    assert without_ends(plan, []) is plan
    assert without_ends(plan, [Steps()]) is plan
