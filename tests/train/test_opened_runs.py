"""A run as it's opened: begun, or gone on from its checkpoint, with what the checkpoint says of it."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.clock import Clock
from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.data.in_memory import InMemory
from cosmati.errors import CheckpointError
from cosmati.optim import SGD
from cosmati.provenance.artifact import Artifact
from cosmati.train import opening
from cosmati.train.config import RunConfig
from cosmati.train.identity import Change
from cosmati.train.observers.observer import Observer
from cosmati.train.opening import Opened, open_run
from cosmati.train.run.checkpoints import list_checkpoints, read_checkpoint
from cosmati.train.run.result import RunResult
from cosmati.train.trainer import Trainer


class Seen(Observer):
    """Keeps where the run started, and what it kept before."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def on_start(self, clock: Clock, budget: object) -> None:
        self.started.append(clock.step)

    def state_dict(self) -> dict[str, Any]:
        return {"started": self.started}

    def load_state_dict(self, state: Any) -> None:
        self.started = [*state["started"], -1]


def trainer(folder: Path | None, *observers: Observer, budget: str = "2ba", **config: Any) -> Trainer:
    torch.manual_seed(0)
    rows = torch.arange(32.0).view(8, 4), torch.arange(8) % 3
    return Trainer(
        nn.Linear(4, 3),
        Classification(3),
        InMemory(rows, 4),
        optimizers=[SGD(lr=0.1, momentum=0.9)],
        observers=list(observers),
        config=RunConfig(budget=budget, num_microbatches=2, num_threads=1, run_folder=folder, **config),
    )


def opened(one: Trainer, *observers: Observer, watch: Any = None) -> Opened:
    made = open_run(one.prepared, list(observers), one.prepared.assembly.plan, Clock(), watch)
    result = RunResult("stopped", made.clock, {}, 0.0, {}, None)
    made.run.close(result, made.plan)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run of two steps that is over."""
    trainer(tmp_path / "run", Seen()).fit()
    return tmp_path / "run"


def test_a_run_that_begins_has_no_states_and_the_plan_that_it_was_given() -> None:
    one, seen = trainer(None), Seen()
    made = opened(one, seen)
    assert (made.clock, made.states, made.cuts.made, seen.started) == (Clock(), None, [], [0])
    assert made.plan == one.prepared.assembly.plan
    assert made.plan.holds(Promise.RESUME)
    assert (made.run.facts.seed, made.run.facts.sensitive) == (one.prepared.assembly.config.seed, ())


def test_a_run_goes_on_where_its_checkpoint_stands(folder: Path) -> None:
    seen, one = Seen(), trainer(folder, budget="4ba", change="budget")
    last = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    made = opened(one, seen)
    assert (made.clock.step, made.clock.rows) == (2, 8)
    assert made.states is not None
    assert made.plan.holds(Promise.RESUME)
    assert seen.started == [0, -1, 2]
    weights = dict(one.prepared.assembly.model.state_dict())
    assert all(torch.equal(weights[name], value) for name, value in last.model.items())
    assert [change.name for change in made.continuity.changed] != []


def test_what_a_checkpoint_keeps_of_an_observer_that_is_gone_is_told(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"^The checkpoint of step 2 keeps the state of Seen, and the run goes on"):
        opened(trainer(folder))


def test_what_was_broken_once_stays_broken(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run")
    optimizer = one.prepared.assembly.optimizers[0].optimizer
    optimizer.param_groups[0]["initial_lr"] = 0.1
    one.fit()
    again = trainer(tmp_path / "run")
    assert "initial_lr" not in again.prepared.assembly.optimizers[0].optimizer.param_groups[0]
    made = opened(again)
    broken = {one.promise: one.because for one in made.plan.guarantees if not one.holds}
    assert "has a torch scheduler" in broken[Promise.RESUME]


def test_cuts_that_the_checkpoint_has_are_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(opening.Cuts, "found", lambda *given: found.append(given) or opening.Cuts())
    opened(trainer(folder), Seen())
    assert found == [(folder, [], 2)]


def test_a_run_whose_weights_were_not_loaded_does_not_begin() -> None:
    one = trainer(None)
    prepared = dataclasses.replace(one.prepared, identity={**one.prepared.identity, "parent.asked": True})
    with pytest.raises(CheckpointError, match=r"wasn't loaded, because the run had begun .* Make the Trainer anew\.$"):
        open_run(prepared, [], prepared.assembly.plan, Clock(), None)


def test_who_looks_for_a_change_of_the_policy_is_asked_before_the_plan_is_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(opening.Continuity, "policy_in_force", "in force")
    monkeypatch.setattr(opening, "without_admitted", lambda plan, *given: asked.append(given) or plan)
    one = trainer(folder)
    watch = SimpleNamespace(resume=lambda run, continuity, checkpoint, policy: asked.append((checkpoint.step, policy)))
    opened(one, Seen(), watch=watch)
    assert asked == [(2, None), (one.prepared.assembly.model, "in force", one.prepared.class_map, 2)]
    begun = trainer(None)
    watch.resume = lambda run, continuity, checkpoint, policy: asked.append(checkpoint)
    opened(begun, watch=watch)
    assert asked[2:] == [None]


def test_base_weights_of_the_beginning_stay_among_a_run_s_artifacts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    base = Artifact("base weights", "ab")
    monkeypatch.setattr(
        opening, "with_base", lambda artifacts, identity: given.append((artifacts, identity)) or (base,)
    )
    made = opened(trainer(folder), Seen())
    last = read_checkpoint(list_checkpoints(folder / "checkpoints")[0])
    assert given == [((), last.facts["identity"])]
    assert made.run.facts.artifacts == (base,)


def test_the_ledger_is_told_the_digest_that_it_has_signed(tmp_path: Path) -> None:
    trainer(tmp_path / "run", ledger=True).fit()
    last = read_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = opened(trainer(tmp_path / "run", ledger=True))
    ledger: Any = next(one for one in made.run.observers if type(one).__name__ == "LedgerObserver")
    assert ledger._state_digest == last.signed_digest


def test_a_run_s_facts_are_those_that_were_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def ends(*given: Any, **changed: Any) -> Any:
        seen.append(given or changed)
        raise ZeroDivisionError("no need to go on")

    one = trainer(None).prepared
    told: dict[str, Any] = {"data_digest": "d", "identity": {"i": 1}, "vouched": "v", "data_text": "t"}
    prepared = dataclasses.replace(one, given=SimpleNamespace(policy="p"), artifacts=("a",), **told)  # type: ignore[arg-type]
    for name in ("facts_of", "sensitive_of"):
        monkeypatch.setattr(opening, name, ends)
        with pytest.raises(ZeroDivisionError, match="no need"):
            open_run(prepared, [], one.assembly.plan, Clock(), None)
        monkeypatch.setattr(opening, name, lambda *_: "made")
    a = one.assembly
    assert seen == [(a, "d", {"i": 1}, "p", "v", "t", ("a",)), (prepared.given, a.policy, "v")]


def test_news_of_what_is_vouched_for_are_among_the_facts_and_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(opening, "recorded_in", lambda folder: ("recorded", folder))
    one, change = trainer(None), Change("vouched", None, "now")
    news = SimpleNamespace(facts=lambda facts: {"seed": facts.seed + 5}, changes=[change])
    watch = SimpleNamespace(resume=lambda *given: asked.append(given) or (news if len(asked) == 1 else None))
    prepared: Any = dataclasses.replace(one.prepared, watch=watch)  # type: ignore[arg-type]
    seed = one.prepared.assembly.config.seed
    for expected in (seed + 5, seed):
        made = open_run(prepared, [], prepared.assembly.plan, Clock(), None)
        assert (made.run.facts.seed, change in made.continuity.changed) == (expected, expected != seed)
    assert asked == [(("recorded", None), Clock())] * 2
