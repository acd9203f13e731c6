"""What an open run tells whom while it's under way: of steps, values, checkpoints and changes, until its end."""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.state import parameter_root
from cosmati.errors import RunError
from cosmati.records.attempts import read_attempts
from cosmati.train.config import RunConfig
from cosmati.train.cutting import Cuts
from cosmati.train.facts import RunFacts
from cosmati.train.identity import Change
from cosmati.train.observers.ledger import LedgerObserver
from cosmati.train.observers.observer import Observer, WatchedRun
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks
from cosmati.train.run import session
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints
from cosmati.train.run.result import RunResult
from cosmati.train.run.session import OpenRun
from tests.train.hand_made import POLICY, SecondOfTwo, Ticks, outcome, run_facts

BUDGET = Budget(Time.parse("20ba"))
FACTS = run_facts(has_ledger=False)
CHANGE = Change("num_microbatches", 2, 4)
GOVERNED: dict[str, Any] = {"policy": POLICY, "sensitive": ("bound",)}


def open_run(*observers: Observer, ranks: Ranks | None = None, facts: RunFacts = FACTS, **config: Any) -> OpenRun:
    return OpenRun(facts, RunConfig(**config), BUDGET, ranks or Ranks(), observers, lambda: b"R" * 32, nn.Identity())


def started(*observers: Observer, clock: Clock | None = None, **given: Any) -> OpenRun:
    run = open_run(*observers, **given)
    with run.opening():
        run.start(clock or Clock())
    return run


def closed(run: OpenRun, **changed: Any) -> None:
    given: dict[str, Any] = {"outcome": "completed", "clock": Clock(), "metrics": {}, "seconds": 0.0}
    run.close(RunResult(**given | {"seconds_by_part": {}, "run_folder": None} | changed), FACTS.plan)


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.ones(2)}, {"m": torch.ones(3)}, {"budget_was_read": True})


class Agreeing(SecondOfTwo):
    """The second of two ranks, which is told what the first one says."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.is_parallel, self.first, self.said = True, first, list[bool]()

    def agree(self, flag: bool) -> bool:
        self.said.append(flag)
        return self.first or flag


class Notes(Observer):
    """Writes down what it's told, in a list that others may share."""

    def __init__(self, told: list[Any], name: str = "", every: int = 1) -> None:
        self.told, self.name, self.every = told, name, every
        self.run: WatchedRun | None = None

    def on_open(self, run: WatchedRun) -> None:
        self.run = run

    def on_step_begin(self, clock: Clock) -> None:
        self.told.append((self.name, "begin", clock.step))

    def on_step(self, outcome: StepOutcome) -> None:
        self.told.append((self.name, "step", outcome))
        if self.run is not None:
            self.run.publish(outcome.clock, {"gradient_norm/body": 2.0, "spare": torch.tensor(3)})  # type: ignore[dict-item]

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        self.told.append((self.name, "values", clock.step, dict(values)))
        if isinstance(values, dict):
            values.clear()

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        self.told.append((self.name, "evaluation", clock.step, dict(metrics), seconds))
        if isinstance(metrics, dict):
            metrics.clear()

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        self.told.append((self.name, "checkpoint", clock.step, state_digest, parameter_root))

    def on_end(self, clock: Clock, ended: str) -> None:
        self.told.append((self.name, "end", clock.step, ended))


class NotesAsLedger(Notes, LedgerObserver):
    """Takes what the ledger's observer is told."""

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Open nothing."""

    def on_open(self, run: WatchedRun) -> None:
        """Publish nothing."""

    def amend(self, clock: Clock, changes: Sequence[Change], facts: RunFacts) -> None:
        self.told.append((self.name, "amend", clock.step, list(changes), facts))

    def evaluated(self, clock: Clock, metrics: Mapping[str, float], root: bytes, of: str) -> None:
        self.told.append((self.name, "evaluated", clock.step, dict(metrics), root, of))


# ------------------------------------------------------------------------------------------------------------- steps


def test_who_asks_is_told_of_the_steps_that_begin_of_which_it_is_told_afterwards() -> None:
    told: list[Any] = []
    run = started(Notes(told, "all"), Notes(told, "third", every=3), Observer())
    assert [getattr(one, "name", "") for one in run._beginning] == ["all", "third"]
    for step in range(7):
        run.step_begins(Clock(step=step))
    assert [event for event in told if event[0] == "all"] == [("all", "begin", step) for step in range(7)]
    assert [event for event in told if event[0] == "third"] == [("third", "begin", 2), ("third", "begin", 5)]


def test_only_the_ledger_is_told_what_a_sensitive_class_alone_did() -> None:
    watched: list[Any] = []
    signed: list[Any] = []
    run = started(Notes(watched), NotesAsLedger(signed), facts=run_facts(**GOVERNED))
    made = outcome(0)._replace(gradient_norm=lambda: 5.0)
    run.report(made)
    seen = next(event[2] for event in watched if event[1] == "step")
    assert math.isnan(seen.gradient_norm())
    assert seen.withheld == ("norms",)
    assert next(event[2] for event in signed if event[1] == "step") is made
    # What a monitor has measured in the step is withheld likewise; out of it, nothing is.
    assert [event[3] for event in watched if event[1] == "values"] == [{"spare": 3.0}]
    run.publish(Clock(step=1), {"gradient_norm/body": 2.0})
    assert watched[-1] == ("", "values", 1, {"gradient_norm/body": 2.0})


def test_what_is_sensitive_may_be_said_later() -> None:
    told: list[Any] = []
    run = started(Notes(told))
    made = outcome(0)
    run.report(made)
    assert told[0][2] is made
    run.restate(**GOVERNED)
    assert (run.facts.policy, run.facts.sensitive) == (POLICY, ("bound",))
    run.report(made)
    assert [event[2].withheld for event in told if event[1] == "step"] == [(), ("norms",)]


def test_each_observer_is_told_of_values_and_metrics_in_a_dictionary_of_its_own() -> None:
    told: list[Any] = []
    run, values, metrics = open_run(Notes(told, "a"), Notes(told, "b")), {"x": 1.0}, {"loss": 2.0}
    run.publish(Clock(step=3), values)
    run.evaluated(Clock(step=4), metrics, 1.5)
    assert told == [
        ("a", "values", 3, {"x": 1.0}),
        ("b", "values", 3, {"x": 1.0}),
        ("a", "evaluation", 4, {"loss": 2.0}, 1.5),
        ("b", "evaluation", 4, {"loss": 2.0}, 1.5),
    ]
    assert (values, metrics) == ({"x": 1.0}, {"loss": 2.0})


@pytest.mark.parametrize("measured", [None, (b"", "trained"), (b"R" * 32, "averaged")])
def test_the_ledger_is_told_what_was_measured_where_it_has_a_root(measured: tuple[bytes, str] | None) -> None:
    told: list[Any] = []
    run = open_run(Notes(told), NotesAsLedger(told, "ledger"))
    run.evaluated(Clock(step=4), {"loss": 2.0}, 1.5, *([] if measured is None else [measured]))
    assert [event[:2] for event in told[:2]] == [("", "evaluation"), ("ledger", "evaluation")]
    expected = [("ledger", "evaluated", 4, {"loss": 2.0}, *measured)] if measured and measured[0] else []
    assert told[2:] == expected


@pytest.mark.parametrize(("has_folder", "has_ledger"), [(True, True), (True, False), (False, True)])
def test_weights_are_hashed_for_the_ledger_alone(tmp_path: Path, *, has_folder: bool, has_ledger: bool) -> None:
    config: dict[str, Any] = {"run_folder": tmp_path} if has_folder else {}
    run = open_run(facts=run_facts(has_ledger=has_ledger), **config)
    root = b"R" * 32 if has_folder and has_ledger else b""
    assert run.to_measure(None) == (root, "trained")
    assert run.to_measure(object()) == (root, "averaged")


# ------------------------------------------------------------------------------------------------------- checkpoints


def test_the_ledger_signs_more_of_a_checkpoint_than_observers_are_told(tmp_path: Path) -> None:
    told: list[Any] = []
    run, made = started(Notes(told), NotesAsLedger(told, "ledger"), run_folder=tmp_path), checkpoint(3)
    run.save(Clock(step=3), lambda: made)
    root = parameter_root(made.model)
    assert told == [
        ("", "checkpoint", 3, made.state_digest, root),
        ("ledger", "checkpoint", 3, made.signed_digest, root),
    ]
    assert made.state_digest != made.signed_digest
    closed(run)


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_is_there_once_one_rank_sees_it(tmp_path: Path, *, first: bool) -> None:
    ranks, made = Agreeing(first=first), list[int]()
    run = open_run(ranks=ranks, run_folder=tmp_path)
    run._saver._ranks = Ranks.alone()
    run.save(Clock(step=1), lambda: made.append(1) or checkpoint(1))
    assert ranks.said == [False]
    assert made == ([] if first else [1])


def test_beside_the_loop_the_first_checkpoint_is_waited_for_and_no_other(tmp_path: Path) -> None:
    run = started(run_folder=tmp_path, checkpoint_async=True, num_checkpoints=3)
    published = []
    for step in (0, 1):
        run.save(Clock(step=step), lambda step=step: checkpoint(step))
        published.append(len(list_checkpoints(tmp_path / "checkpoints")))
    assert published == [1, 1]
    run.settle()
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 2
    run.save(Clock(step=2), lambda: checkpoint(2))
    assert run._saver._flight is not None
    run._saver._flight.join(60)
    assert not run.checkpoint_is_due(Clock(step=2))
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 3, "it's looked at after each step"
    for step in (3, 4):
        run.save(Clock(step=step), lambda step=step: checkpoint(step))
    assert (tmp_path / "checkpoints" / "step-00000003").exists(), "one at a time"
    closed(run)


def test_the_loop_does_not_wait_for_a_checkpoint_to_land(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    landed: list[bool] = []
    run = open_run(run_folder=tmp_path, checkpoint_async=True)
    monkeypatch.setattr(run._saver, "land", lambda *, wait: landed.append(wait))
    assert run.checkpoint_is_due(Clock(step=1)) is False
    assert landed == [False]
    # Without a folder, nothing is written.
    assert open_run(checkpoint_async=True).checkpoint_is_due(Clock(step=1)) is False
    other = open_run(run_folder=tmp_path)
    other.checkpoint_is_due(Clock(step=1))
    assert "_saver" not in vars(other)


def test_a_stale_process_saves_nothing(tmp_path: Path) -> None:
    run = started(run_folder=tmp_path)
    (tmp_path / "epoch").write_text("7 another")
    with pytest.raises(RunError, match="is stale"):
        run.save(Clock(step=1), lambda: checkpoint(1))
    assert list_checkpoints(tmp_path / "checkpoints") == []
    with pytest.raises(RunError, match="is stale"):
        closed(run)
    assert [one.outcome for one in read_attempts(tmp_path)] == [""], "who is stale has ended nothing"


def test_a_draft_has_the_number_of_its_writer(tmp_path: Path) -> None:
    for number in (1, 2):
        run = started(run_folder=tmp_path)
        assert run._saver._epoch == number
        closed(run)
    second = open_run(ranks=SecondOfTwo(), run_folder=tmp_path)
    assert second._saver._epoch is None


def test_seconds_are_over_on_the_moment_and_once_one_rank_finds_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()
    monkeypatch.setattr(session, "monotonic", clock)
    ranks = Agreeing(first=False)
    run, told = open_run(checkpoint_every="5sec", ranks=ranks), open_run(checkpoint_every="5sec", ranks=Agreeing(True))
    clock.pass_by(4.75)
    assert (run.checkpoint_is_due(Clock(step=1)), told.checkpoint_is_due(Clock(step=1))) == (False, True)
    clock.pass_by(0.25)
    assert run.checkpoint_is_due(Clock(step=2)) is True
    assert ranks.said == [False, True]


def test_what_is_saved_begins_the_seconds_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()
    monkeypatch.setattr(session, "monotonic", clock)
    run = started(run_folder=tmp_path, checkpoint_every="5sec")
    clock.pass_by(6.0)
    assert run.checkpoint_is_due(Clock(step=1))
    run.save(Clock(step=1), lambda: checkpoint(1))
    assert not run.checkpoint_is_due(Clock(step=2))
    closed(run)


# ----------------------------------------------------------------------------------------------------------- changes


def test_a_cut_is_kept_and_put_on_record(tmp_path: Path) -> None:
    told: list[Any] = []
    run, cuts = started(Notes(told), NotesAsLedger(told, "ledger"), run_folder=tmp_path), Cuts()
    cuts.halve(3)
    run.cut(Clock(step=3), cuts, CHANGE)
    assert json.loads((tmp_path / "cuts.json").read_text()) == [[3, 2]]
    assert run.facts.num_microbatches == 4
    told_of = json.loads((tmp_path / "changes.jsonl").read_text())
    assert told_of == {"step": 3, "changes": [["num_microbatches", 2, 4]]}
    assert told == [("ledger", "amend", 3, [CHANGE], run.facts)]
    closed(run)
    alone = open_run()
    alone.cut(Clock(step=3), cuts, CHANGE)
    assert alone.facts.num_microbatches == 4


def test_what_governs_the_run_stands_in_its_record(tmp_path: Path) -> None:
    run = started(run_folder=tmp_path)
    run.restate(policy=POLICY)
    closed(run)
    assert json.loads((tmp_path / "run.json").read_text())["digests"]["policy"] == POLICY.policy_digest.hex()


def test_a_checkpoint_from_before_a_change_is_published_before_it(tmp_path: Path) -> None:
    told: list[Any] = []
    run = started(NotesAsLedger(told), run_folder=tmp_path, checkpoint_async=True)
    run.save(Clock(step=1), lambda: checkpoint(1))
    run.amend(Clock(step=1), [CHANGE])
    assert [event[1] for event in told] == ["checkpoint", "amend"]
    closed(run)


# ----------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("given", "reason", "from_rows"),
    [
        ((), "", ""),
        (("enough",), "enough", "enough"),
        ((None,), "", ""),
        ((7,), "7", "7"),
    ],
)
def test_the_first_who_asks_for_the_end_says_why(given: tuple[Any, ...], reason: str, from_rows: str) -> None:
    run = open_run()
    assert (run.stop_reason, run.stop_from_rows, run.stop_is_asked()) == ("", "", False)
    run.ask_to_stop(*given)
    run.ask_to_stop("too late")
    assert (run.stop_reason, run.stop_from_rows, run.stop_is_asked()) == (reason, from_rows, True)


def test_a_reason_may_follow_from_no_row() -> None:
    run = open_run()
    run.ask_to_stop("revoked", follows_from_rows=False)
    assert (run.stop_reason, run.stop_from_rows) == ("revoked", "")


def test_ranks_stop_together() -> None:
    ranks = Agreeing(first=True)
    assert open_run(ranks=ranks).stop_is_asked() is True
    assert ranks.said == [False]
    lonely = Agreeing(first=True)
    lonely.is_parallel = False
    assert open_run(ranks=lonely).stop_is_asked() is False
    assert lonely.said == [], "a step of 100 us notices each call"


@pytest.mark.parametrize("ended", ["completed", "stopped", "failed"])
@pytest.mark.parametrize("ranks", [Ranks(), SecondOfTwo()])
def test_what_was_never_offered_is_told_at_the_end(ended: str, ranks: Ranks) -> None:
    run = open_run(ranks=ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        closed(run, outcome=ended, never_offered={"late": 3, "later": 1})
        closed(run, outcome=ended)
    found = [str(one.message) for one in caught]
    assert len(found) == int(ended != "failed" and ranks.rank == 0)
    assert all("deferred: 3 rows of late, 1 rows of later. " in text for text in found)
    assert all(one.filename == __file__ for one in caught)


def test_the_end_comes_after_the_last_checkpoint_and_stands_in_the_attempt(tmp_path: Path) -> None:
    told: list[Any] = []
    run = started(Notes(told, "a"), Notes(told, "b"), run_folder=tmp_path, checkpoint_async=True)
    run.save(Clock(step=1), lambda: checkpoint(1))
    threads = threading.active_count()
    closed(run, outcome="stopped", reason="enough", clock=Clock(step=2))
    assert [event[:2] for event in told] == [("a", "checkpoint"), ("b", "checkpoint"), ("a", "end"), ("b", "end")]
    assert told[-1] == ("b", "end", 2, "stopped")
    attempt = read_attempts(tmp_path)[0]
    assert (attempt.outcome, attempt.reason, attempt.last_step) == ("stopped", "enough", 2)
    assert threading.active_count() <= threads
