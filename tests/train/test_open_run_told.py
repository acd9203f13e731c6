"""An open run says why it stops, and tells values, steps and checkpoints as each observer is to hear them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.plan import Plan
from cosmati.errors import PlanError
from cosmati.ledger.reader import Scan, read_head, read_verifier_key
from cosmati.records.attempts import read_attempts
from cosmati.records.ledger import AmendEntry, CheckpointEntry, EvaluationEntry
from cosmati.train.config import RunConfig
from cosmati.train.cutting import Cuts
from cosmati.train.identity import Change
from cosmati.train.observers.observer import Observer, WatchedRun
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks
from cosmati.train.run import session
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints
from cosmati.train.run.result import RunResult
from cosmati.train.run.session import OpenRun
from tests.train.hand_made import POLICY, SecondOfTwo, Ticks, outcome, run_facts

BUDGET = Budget(Time.parse("20ba"), steps_per_epoch=5, rows_per_step=4)
ROOT = b"R" * 32


class Told(Observer):
    """Writes down what it's told."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.told: list[Any] = []
        self.run: WatchedRun | None = None

    def on_open(self, run: WatchedRun) -> None:
        self.run = run

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        self.told.append((clock.step, dict(values)))
        values.clear()  # type: ignore[attr-defined]

    def on_step(self, outcome: StepOutcome) -> None:
        self.told.append(outcome)

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        self.told.append((clock.step, dict(metrics), seconds))
        metrics.clear()  # type: ignore[attr-defined]

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        self.told.append((clock.step, state_digest, parameter_root))

    def on_end(self, clock: Clock, ended: str) -> None:
        self.told.append(ended)


class Begins(Told):
    def on_step_begin(self, clock: Clock) -> None:
        self.told.append(clock.step)


class Fails(Told):
    def on_start(self, clock: Clock, budget: Budget) -> None:
        raise ZeroDivisionError


def open_run(
    *observers: Observer, ranks: Ranks | None = None, facts: dict[str, Any] | None = None, **config: Any
) -> OpenRun:
    given = {"has_ledger": False} | (facts or {})
    model = nn.Identity()
    return OpenRun(run_facts(**given), RunConfig(**config), BUDGET, ranks or Ranks(), observers, lambda: ROOT, model)


def started(*observers: Observer, **given: Any) -> OpenRun:
    run = open_run(*observers, **given)
    with run.opening():
        run.start(Clock())
    return run


def closed(run: OpenRun, outcome: str = "stopped", step: int = 0, **given: Any) -> None:
    run.close(RunResult(outcome, Clock(step=step), {}, 1.0, {}, None, **given), run.facts.plan)


def entries(folder: Path) -> list[Any]:
    ledger = folder / "ledger"
    return [item.entry for item in Scan(ledger, read_head(ledger, read_verifier_key(ledger)))]


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.ones(2)}, {}, {})


# ---------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    ("asked", "reason", "from_rows"),
    [
        ([("first", {}), ("second", {})], "first", "first"),
        ([("first", {"follows_from_rows": False}), ("second", {})], "first", ""),
        ([("", {}), ("second", {})], "", ""),
        ([(None, {})], "", ""),
        ([(7, {})], "7", "7"),
    ],
)
def test_the_first_reason_to_stop_is_told(asked: list[Any], reason: str, from_rows: str) -> None:
    run = open_run()
    assert (run.stop_is_asked(), run.stop_reason, run.stop_from_rows) == (False, "", "")
    for why, how in asked:
        run.ask_to_stop(why, **how)
    assert (run.stop_is_asked(), run.stop_reason, run.stop_from_rows) == (True, reason, from_rows)


def test_all_ranks_stop_where_one_was_asked() -> None:
    class Together(SecondOfTwo):
        is_asked = False

        def agree(self, is_so: bool) -> bool:
            return is_so or self.is_asked

    ranks = Together()
    run = open_run(ranks=ranks)
    for is_parallel, expected in ((True, True), (False, False)):
        ranks.is_parallel, ranks.is_asked = is_parallel, True
        assert run.stop_is_asked() == expected


# ------------------------------------------------------------------------------------------------------ what is told


def test_observers_are_told_of_the_run_that_they_watch(tmp_path: Path) -> None:
    told = Told()
    run = open_run(told, run_folder=tmp_path)
    with run.opening():
        run.start(Clock())
    seen = told.run
    assert seen is not None
    assert (seen.facts, seen.folder, seen.rank, seen.attempt, dict(seen.superseded)) == (run.facts, tmp_path, 0, 0, {})
    assert isinstance(seen.model, nn.Identity)
    seen.publish(Clock(step=2), {"a": 1})
    seen.stop("enough")
    assert (told.told, run.stop_reason) == ([(2, {"a": 1.0})], "enough")
    closed(run)


def test_what_one_observer_does_to_values_is_its_own_affair() -> None:
    first, second = Told(), Told()
    run = started(first, second)
    run.publish(Clock(step=3), {"a": torch.tensor(0.5)})  # type: ignore[dict-item]
    metrics = {"b": 1.0}
    run.evaluated(Clock(step=4), metrics, 2.5)
    assert first.told == second.told == [(3, {"a": 0.5}), (4, {"b": 1.0}, 2.5)]
    assert metrics == {"b": 1.0}
    with pytest.raises(PlanError, match=r"publish\(\) is given 'c'"):
        run.publish(Clock(), {"c": "text"})  # type: ignore[dict-item]


def test_those_who_ask_are_told_that_a_step_begins_of_which_they_will_hear() -> None:
    asks, third, silent = Begins(), Begins(every=3), Told()
    run = started(asks, third, silent)
    for step in range(6):
        run.step_begins(Clock(step=step))
    assert (asks.told, third.told, silent.told) == ([0, 1, 2, 3, 4, 5], [2, 5], [])


def test_an_interval_that_is_none_is_refused(tmp_path: Path) -> None:
    run = open_run(Told(every=0), run_folder=tmp_path)
    with pytest.raises(PlanError), run.opening():
        run.start(Clock())
    assert [one.outcome for one in read_attempts(tmp_path)] == ["failed"]


def test_who_was_started_is_told_that_another_could_not_be(tmp_path: Path) -> None:
    first, last = Told(), Told()
    run = open_run(first, Fails(), last, run_folder=tmp_path)
    with pytest.raises(ZeroDivisionError), run.opening():
        run.start(Clock(step=2))
    assert (first.told, last.told) == (["failed"], [])
    assert [(one.number, one.outcome, one.reason) for one in read_attempts(tmp_path)] == [(0, "failed", "")]


def test_each_start_in_a_folder_is_an_attempt_with_its_end(tmp_path: Path) -> None:
    for number, reason in enumerate(("first", "second")):
        told = Told()
        run = started(told, run_folder=tmp_path)
        assert told.run is not None
        assert told.run.attempt == number
        closed(run, reason=reason)
    found = [(one.number, one.outcome, one.reason) for one in read_attempts(tmp_path)]
    assert found == [(0, "stopped", "first"), (1, "stopped", "second")]


def test_a_step_of_a_sensitive_class_alone_is_the_ledger_s(tmp_path: Path) -> None:
    told = Told()
    run = started(told, facts={"policy": POLICY, "sensitive": ("free", "bound", "late"), "has_ledger": True},
                  run_folder=tmp_path)  # fmt: skip
    given = outcome(0, loss=0.25)
    run.report(given)
    (seen,) = told.told
    assert seen is not given
    assert "loss" in seen.withheld
    open_facts = started(told)
    open_facts.report(given)
    assert told.told[-1] is given
    closed(run, step=1)


# --------------------------------------------------------------------------------------------------- what is recorded


@pytest.mark.parametrize(("has_folder", "has_ledger"), [(True, True), (True, False), (False, True)])
def test_what_is_measured_has_a_root_where_a_ledger_is_kept(has_folder: bool, has_ledger: bool, tmp_path: Path) -> None:
    run = started(facts={"has_ledger": has_ledger}, run_folder=tmp_path if has_folder else None)
    root = ROOT if has_folder and has_ledger else b""
    assert run.to_measure(None) == (root, "trained")
    assert run.to_measure({}) == (root, "averaged")
    run.evaluated(Clock(), {"a": 1.0}, 0.0)
    run.evaluated(Clock(), {"a": 1.0}, 0.0, run.to_measure({}))
    closed(run)
    found = [one for one in entries(tmp_path) if isinstance(one, EvaluationEntry)] if root else []
    assert [one.parameter_root if hasattr(one, "parameter_root") else ROOT for one in found] == [ROOT] * bool(root)


def test_the_ledger_signs_more_of_a_checkpoint_than_observers_hear(tmp_path: Path) -> None:
    told = Told()
    run = started(told, facts={"has_ledger": True}, run_folder=tmp_path)
    kept = checkpoint(1)
    run.report(outcome(0))
    run.save(Clock(step=1), lambda: kept)
    closed(run, step=1)
    [signed] = [one for one in entries(tmp_path) if isinstance(one, CheckpointEntry)]
    [(step, digest, root)] = [one for one in told.told if isinstance(one, tuple) and len(one) == 3]
    assert (step, digest) == (1, kept.state_digest)
    assert (signed.step, signed.parameter_root) == (1, root)
    assert signed.state_digest != digest


def test_cuts_are_kept_in_the_folder_and_on_record(tmp_path: Path) -> None:
    run = started(facts={"has_ledger": True}, run_folder=tmp_path)
    cuts = Cuts()
    cuts.halve(0)
    run.cut(Clock(), cuts, Change("microbatches", 2, 4))
    assert run.facts.num_microbatches == 4
    assert (tmp_path / "cuts.json").read_text() == "[[0, 2]]"
    closed(run)
    assert [type(one) for one in entries(tmp_path)].count(AmendEntry) == 1
    alone = started()
    alone.cut(Clock(), cuts, Change("microbatches", 2, 4))
    assert alone.facts.num_microbatches == 4


@pytest.mark.parametrize("outcome_", ["completed", "stopped", "failed"])
@pytest.mark.parametrize("ranks", [Ranks, SecondOfTwo])
def test_rows_that_were_never_offered_are_told_once(
    outcome_: str, ranks: type[Ranks], recwarn: pytest.WarningsRecorder
) -> None:
    run = open_run(ranks=ranks())
    run.start(Clock())
    closed(run, outcome_, never_offered={"late": 3, "bound": 1})
    told = [str(one.message) for one in recwarn]
    is_told = outcome_ != "failed" and ranks is Ranks
    assert [text.split(". ")[0] for text in told] == [
        "Never offered, being deferred: 3 rows of late, 1 rows of bound"
    ] * is_told


def test_the_first_checkpoint_is_there_at_once_and_others_in_their_time(tmp_path: Path) -> None:
    run = started(run_folder=tmp_path, checkpoint_async=True)
    run.save(Clock(), lambda: checkpoint(0))
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000000"]
    run.save(Clock(step=2), lambda: checkpoint(2))
    run.settle()
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 2
    closed(run, step=2)


def test_the_time_of_a_checkpoint_counts_from_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Ticks()
    monkeypatch.setattr(session, "monotonic", clock)
    run = started(run_folder=tmp_path, checkpoint_every="5sec")
    due = []
    for step, seconds in enumerate((4.9, 0.1, 4.0, 1.0), 1):
        clock.pass_by(seconds)
        due.append(run.checkpoint_is_due(Clock(step=step)))
        if due[-1]:
            run.save(Clock(step=step), partial(checkpoint, step))
    assert due == [False, True, False, True]
    closed(run, step=4)


def test_a_plan_that_was_broken_is_recorded_at_the_start(tmp_path: Path) -> None:
    run = open_run(run_folder=tmp_path)
    plan: Plan = run.facts.plan.withdraw("resume", "it was broken before")  # type: ignore[arg-type]
    with run.opening():
        run.start(Clock(), plan=plan)
    assert "it was broken before" in (tmp_path / "run.json").read_text()
    closed(run)


def test_facts_that_are_others_before_the_start_change_what_is_withheld() -> None:
    told = Told()
    run = started(told, facts={"policy": POLICY, "sensitive": POLICY.classes})
    given = outcome(0)
    run.report(given)
    run.restate(sensitive=())
    run.report(given)
    assert [one is given for one in told.told] == [False, True]


def test_what_is_on_its_way_is_published_before_the_facts_are_others(tmp_path: Path) -> None:
    run = started(run_folder=tmp_path, checkpoint_async=True)
    run.save(Clock(step=1), lambda: checkpoint(1))
    run.amend(Clock(step=1), [])
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000001"]
    closed(run, step=1)


def test_a_run_that_goes_on_copies_what_lacks_a_copy(tmp_path: Path) -> None:
    run = started(run_folder=tmp_path / "run")
    run.save(Clock(step=1), lambda: checkpoint(1))
    closed(run, step=1)
    again = open_run(run_folder=tmp_path / "run", checkpoint_to=str(tmp_path / "copies"))
    with again.opening():
        again.start(Clock(step=1), state_digest=checkpoint(1).state_digest)
    again.settle()
    closed(again, step=1)
    assert any("step-00000001" in path.as_posix() for path in (tmp_path / "copies").rglob("*"))
