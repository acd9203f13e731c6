"""Runs that ask witnesses: under `self` nothing depends on them, under `attested` all does."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import Evaluation, InMemory, RunConfig, Trainer
from cosmati.core.loss import Classification
from cosmati.core.state import parameter_root
from cosmati.errors import LedgerError, PlanError
from cosmati.ledger.cosigned import WitnessRefusedError, cosigned_heads
from cosmati.ledger.evidence import TrustedEvidence
from cosmati.ledger.keys import create_key
from cosmati.ledger.query import VerifiedLedger
from cosmati.ledger.verify import LedgerReport, verify_ledger
from cosmati.ledger.witness import Answer, Witness, create_witness
from cosmati.ledger.witness_http import WitnessServer
from cosmati.methods import EMA
from cosmati.optim import SGD
from cosmati.records.ledger import EvaluationEntry, TimeEntry
from cosmati.train.evaluation import accuracy
from cosmati.train.observers import witnessing
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome
from tests.ledger.plain_answers import check_answers

pytestmark = pytest.mark.long

ROWS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3


class MayFail(Witness):
    """A witness that can be down."""

    is_down = False

    def answer(self, request: bytes) -> Answer:
        if self.is_down:
            raise LedgerError("down")
        return super().answer(request)


class World:
    """A run folder, and witnesses that listen."""

    def __init__(self, folder: Path, num: int) -> None:
        self.run = folder / "run"
        self.witnesses = []
        self.servers = []
        for index in range(num):
            create_witness(folder / f"w{index}", f"w{index}.example")
            witness = MayFail(folder / f"w{index}")
            self.witnesses.append(witness)
            self.servers.append(WitnessServer(witness))
            threading.Thread(target=lambda s=self.servers[-1]: s.serve_forever(0.01), daemon=True).start()

    @property
    def addresses(self) -> tuple[str, ...]:
        pairs = zip(self.witnesses, self.servers, strict=True)
        return tuple(f"{witness.key.text} {server.url}" for witness, server in pairs)

    def know(self) -> None:
        """Let the witnesses know the run's key, which it makes when it starts."""
        (self.run / "private").mkdir(parents=True)
        key = create_key(self.run / "private" / "operator.key", name="cosmati/run")
        for witness in self.witnesses:
            witness.trust(key.verifier)

    def trainer(
        self, *observers: Observer, steps: int = 4, methods: Any = (), evaluation: Any = None, **config: Any
    ) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        config = {"budget": f"{steps}ba", "run_folder": self.run, "witnesses": self.addresses} | config
        return Trainer(
            model,
            Classification(num_classes=3),
            InMemory(ROWS, rows_per_step=8),
            optimizers=SGD(lr=0.1),
            methods=methods,
            evaluation=evaluation,
            observers=observers,
            config=RunConfig(**config),
        )

    def report(self, quorum: int = 0) -> LedgerReport:
        trusted = TrustedEvidence(tuple(one.key for one in self.witnesses), quorum)
        return verify_ledger(self.run / "ledger", witnesses=trusted)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path, 2)
    found.know()
    yield found
    for server in found.servers:
        server.shutdown()
        server.server_close()


def test_an_attested_run_is_witnessed_from_entry_0_to_its_end(world: World) -> None:
    result = world.trainer(ledger_profile="attested").fit()
    report = world.report()
    assert (result.outcome, report.evidence_level[:3], report.lapses) == ("completed", "L1:", ())
    assert str(report.profile).startswith("attested: 2 of 2 witnesses (w0.example, w1.example)")
    first, *_, last = cosigned_heads(world.run / "ledger", [world.witnesses[0].key])
    assert (first.head.size, last.head.size) == (2, report.size), "entry 0 and its time, and the whole"
    details = VerifiedLedger(world.run / "ledger").details["witnessing"]
    assert details == {"profile": "attested", "witnesses": [w.key.text for w in world.witnesses], "quorum": 2}


def test_an_attested_run_does_not_begin_without_its_quorum(world: World) -> None:
    world.witnesses[1].is_down = True
    with pytest.raises(WitnessRefusedError, match=r"Training doesn't begin: 1 of 2 .* w1\.example .*\(500\)"):
        world.trainer(ledger_profile="attested").fit()
    assert verify_ledger(world.run / "ledger").num_steps == 0
    result = world.trainer(ledger_profile="attested", witness_quorum=1).fit()
    assert result.outcome == "completed"
    assert world.report(quorum=1).evidence_level.startswith("L1: ")
    assert world.report().evidence_level.startswith("L0: ")


class Breaks(Observer):
    """Takes the witnesses down after a step, and lets an hour go by."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch) -> None:
        self.world, self.patch = world, patch

    def on_step(self, outcome: StepOutcome) -> None:
        if outcome.clock.step == 2:
            for witness in self.world.witnesses:
                witness.is_down = True
            self.patch.setattr(witnessing, "HOUR_SECONDS", -10_000)


def test_an_attested_run_stops_with_a_checkpoint_and_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="The end of the run isn't witnessed: 0 of 2"):
        result = world.trainer(Breaks(world, patch), ledger_profile="attested").fit()
    assert (result.outcome, result.clock.step) == ("stopped", 2)
    assert "couldn't be witnessed for an hour" in result.reason
    assert (world.run / "checkpoints" / "step-00000002").is_dir()
    for witness in world.witnesses:
        witness.is_down = False
    assert world.trainer(ledger_profile="attested").fit().outcome == "completed"
    assert world.report().evidence_level.startswith("L1: ")


def test_an_attested_run_that_was_rolled_back_stops_though_others_cosign_it(world: World) -> None:
    asked = {"ledger_profile": "attested", "witness_quorum": 1, "change": "budget"}
    world.trainer(steps=2, **asked).fit()
    kept = shutil.copytree(world.run, world.run.with_name("kept"))
    world.witnesses[1].is_down = True
    world.trainer(**asked).fit()
    world.witnesses[1].is_down = False
    shutil.rmtree(world.run)
    kept.rename(world.run)
    result = world.trainer(**asked).fit()
    assert (result.outcome, result.clock.step) == ("stopped", 3)  # It is asked after each step.
    assert "Rolled back: w0.example has cosigned" in result.reason


def test_the_end_of_an_attested_run_has_to_be_witnessed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class GoDown(Observer):
        def on_step(self, outcome: StepOutcome) -> None:
            world.witnesses[0].is_down = True

    with pytest.raises(WitnessRefusedError, match="The end of the run isn't witnessed: 1 of 2"):
        world.trainer(GoDown(), ledger_profile="attested").fit()
    assert json.loads((world.run / "run.json").read_text())["outcome"] == "completed"
    (lapse,) = world.report(quorum=1).lapses
    assert lapse.startswith("the end isn't witnessed")
    world.witnesses[0].is_down = False
    world.trainer(ledger_profile="attested").fit()
    assert world.report().lapses == ()


@pytest.mark.parametrize("profile", ["self", "attested"])
def test_a_run_that_fails_asks_no_more(world: World, profile: str) -> None:
    """Its own error is what is raised, and nobody is waited for."""

    class Fails(Observer):
        def on_step(self, outcome: StepOutcome) -> None:
            if outcome.clock.step == 2:
                for witness in world.witnesses:
                    witness.is_down = True
                raise ZeroDivisionError

    before = {*threading.enumerate()}
    with pytest.raises(ZeroDivisionError):
        world.trainer(Fails(), ledger_profile=profile).fit()
    assert "cosmati-witnesses" not in {one.name for one in {*threading.enumerate()} - before}
    for witness in world.witnesses:
        witness.is_down = False
    assert world.trainer(ledger_profile=profile).fit().outcome == "completed"


def test_under_self_nothing_depends_on_a_witness(world: World) -> None:
    for witness in world.witnesses:
        witness.is_down = True
    with pytest.warns(UserWarning, match="The end of the run isn't witnessed: 0 of 2"):
        result = world.trainer().fit()
    assert result.outcome == "completed"
    report = world.report()
    assert (report.evidence_level[:3], report.lapses) == ("L0:", ())
    assert str(report.profile) == "self: operator-asserted; w0.example, w1.example are asked to cosign"


def test_who_cosigns_changes_no_bit_and_no_identity(world: World) -> None:
    trainer = world.trainer(ledger=True)
    trainer.fit()
    bare = world.trainer(run_folder=world.run.with_name("bare"), witnesses=(), ledger=True)
    bare.fit()
    assert parameter_root(trainer.model.state_dict()) == parameter_root(bare.model.state_dict())
    assert trainer.plan.digest == bare.plan.digest


def test_other_witnesses_at_a_resume_are_put_on_record(world: World) -> None:
    world.trainer(ledger_profile="attested").fit()
    world.trainer(steps=6, change="budget", witnesses=world.addresses[:1]).fit()
    report = world.report(quorum=1)
    assert str(report.profile) == "self: operator-asserted; w0.example are asked to cosign"
    assert "witnessing" in [name for one in report.amendments for name, _, _ in one.changes]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ledger_profile": "attested", "witnesses": ()}, "takes witnesses"),
        ({"ledger_profile": "notarised"}, "is not known"),
        ({"witness_quorum": 3}, "there are 2 witnesses"),
        ({"witness_quorum": -1}, "there are 2 witnesses"),
        ({"run_folder": None}, "Give a run_folder"),
        ({"ledger": False}, "leave ledger=False out"),
        ({"witnesses": "nobody"}, "names no witness"),
    ],
)
def test_settings_that_cannot_be_are_refused(world: World, given: dict[str, Any], words: str) -> None:
    with pytest.raises((PlanError, LedgerError), match=words):
        world.trainer(**given)


# --------------------------------------------------------------------------------------- times and evaluations


def _entries(run: Path, kind: type) -> list[Any]:
    return [item for item in VerifiedLedger(run / "ledger").entries() if isinstance(item.entry, kind)]


def test_each_checkpoint_has_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1_700_000_000, 1_800_000_000, 10))
    monkeypatch.setattr("cosmati.train.observers.ledger.time", lambda: float(next(times)))
    world.trainer(witnesses=(), ledger=True, checkpoint_every="2ba").fit()
    found = [item.entry for item in _entries(world.run, TimeEntry)]
    # At the start, with the checkpoints after 0, 2 and 4 steps, and at the end; no minute went by between.
    assert [entry.step for entry in found] == [0, 0, 2, 4, 4]
    report = verify_ledger(world.run / "ledger")
    assert report.clock == (found[0].seconds, found[-1].seconds)
    assert not report.clock_went_back
    check_answers(world.run / "ledger")


def test_a_minute_without_a_checkpoint_has_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1_700_000_000, 1_800_000_000, 40))
    monkeypatch.setattr("cosmati.train.observers.ledger.time", lambda: float(next(times)))
    world.trainer(witnesses=(), ledger=True).fit()
    assert [item.entry.step for item in _entries(world.run, TimeEntry)] == [0, 0, 2, 4, 4, 4]


def test_a_clock_that_goes_back_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1_700_000_000, 0, -10))
    monkeypatch.setattr("cosmati.train.observers.ledger.time", lambda: float(next(times)))
    world.trainer(witnesses=(), ledger=True).fit()
    assert verify_ledger(world.run / "ledger").clock_went_back


@pytest.mark.parametrize("methods", [(), (EMA(half_life="2ba"),)])
def test_an_evaluation_says_of_which_weights(world: World, methods: Any) -> None:
    measured = {"accuracy": accuracy, "nothing": lambda *_: math.nan}
    evaluation = Evaluation([ROWS], measured)
    settings = {"witnesses": (), "ledger": True, "evaluate_every": "2ba"}
    trainer = world.trainer(methods=methods, evaluation=evaluation, **settings)
    result = trainer.fit()
    half, end = _entries(world.run, EvaluationEntry)
    check_answers(world.run / "ledger")
    assert (half.entry.step, end.entry.step) == (2, 4)
    told = json.loads(end.details)
    metrics = {"accuracy": result.metrics["accuracy"], "nothing": None}
    assert told == {"step": 4, "metrics": metrics, "weights": "averaged" if methods else "trained"}
    with trainer.averaged() as model:
        assert end.entry.parameter_root == parameter_root(model.state_dict())
    assert (parameter_root(trainer.model.state_dict()) == end.entry.parameter_root) == (not methods)
