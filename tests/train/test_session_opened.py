"""What an open run makes of its folder and its copies before the first step, and what it tells whom of itself then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.plan import Promise
from cosmati.errors import CheckpointError, PlanError
from cosmati.records.attempts import read_attempts
from cosmati.train.config import RunConfig
from cosmati.train.identity import Change
from cosmati.train.observers.ledger import LedgerObserver
from cosmati.train.observers.observer import Observer, WatchedRun
from cosmati.train.ranks import Ranks
from cosmati.train.run import session
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, publish_checkpoint, write_checkpoint
from cosmati.train.run.result import RunResult
from cosmati.train.run.session import OpenRun
from tests.train.hand_made import SecondOfTwo, run_facts

BUDGET = Budget(Time.parse("20ba"))
FACTS = run_facts(has_ledger=False)
CHANGE = Change("seed", 1, 2)


def open_run(*observers: Observer, ranks: Ranks | None = None, has_ledger: bool = False, **config: Any) -> OpenRun:
    facts, model = run_facts(has_ledger=has_ledger), nn.Identity()
    return OpenRun(facts, RunConfig(**config), BUDGET, ranks or Ranks(), observers, lambda: b"R" * 32, model)


def closed(run: OpenRun, step: int = 0) -> None:
    run.close(RunResult("completed", Clock(step=step), {}, 0.0, {}, None), FACTS.plan)


def published(folder: Path, step: int, facts: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint in a folder of checkpoints, or of copies: one looks like the other."""
    made = Checkpoint(step, {"w": torch.full((2,), float(step))}, {}, facts or {})
    return publish_checkpoint(write_checkpoint(folder, made), keep=9)


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


class Opens(Observer):
    """Keeps what it is opened with, and the order of its starts and ends."""

    def __init__(self, *, fails: bool = False, every: int = 1) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fails, self.every = fails, every
        self.run: WatchedRun | None = None

    def on_open(self, run: WatchedRun) -> None:
        self.run = run

    def on_start(self, clock: Clock, budget: Budget) -> None:
        if self.fails:
            raise ZeroDivisionError
        self.told.append(("start", clock.step))

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        self.told.append(("values", clock.step, values))

    def on_end(self, clock: Clock, ended: str) -> None:
        self.told.append(("end", clock.step, ended))


class Compares(LedgerObserver):
    """The ledger's observer of a replay, which takes all that it's told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_open(self, run: WatchedRun) -> None:
        self.told.append(("open",))

    def on_start(self, clock: Clock, budget: Budget) -> None:
        self.told.append(("start",))

    def on_end(self, clock: Clock, ended: str) -> None:
        self.told.append(("end", ended))


# ------------------------------------------------------------------------------------------------------------ copies


def test_the_place_of_copies_is_claimed_at_the_start_and_catches_up(tmp_path: Path) -> None:
    folder, place = tmp_path / "r", tmp_path / "copies" / "r"
    published(folder / "checkpoints", 2)
    run = open_run(run_folder=folder, checkpoint_to=str(tmp_path / "copies"))
    with run.opening():
        assert not (place / "writer.json").exists()
        run.start(Clock(step=2), state_digest=b"S" * 32)
    run.settle()
    closed(run, 2)
    assert names(place) == ["step-00000002"]
    assert (place / "writer.json").exists()


def test_what_begins_anew_has_nothing_to_catch_up_with(tmp_path: Path) -> None:
    run = open_run(run_folder=tmp_path / "r", checkpoint_to=str(tmp_path / "copies"))
    with run.opening():
        run.start(Clock())
    run.settle()
    closed(run)
    assert [path.name for path in (tmp_path / "copies" / "r").iterdir()] == ["writer.json"]


def test_a_copy_newer_than_what_is_here_is_gone_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    published(folder / "checkpoints", 2)
    published(tmp_path / "copies" / "r", 3)
    run = open_run(run_folder=folder, checkpoint_to=str(tmp_path / "copies"))
    with run.opening() as found:
        assert found is not None
        assert found.step == 3
    assert names(folder / "checkpoints") == ["step-00000003", "step-00000002"]
    second = open_run(run_folder=tmp_path / "o", ranks=SecondOfTwo(), checkpoint_to=str(tmp_path / "copies"))
    with second.opening() as found:
        assert found is None, "the first rank brings it"
    assert not (tmp_path / "copies" / "o").exists()


def test_copies_are_as_many_as_the_run_keeps(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    run = open_run(run_folder=folder, checkpoint_to=str(tmp_path / "copies"), num_checkpoints=2)
    with run.opening():
        run.start(Clock())
    for step in (1, 2, 3):
        run.save(Clock(step=step), lambda step=step: Checkpoint(step, {"w": torch.ones(1)}, {}, {}))
        run.settle()
    closed(run, 3)
    assert names(tmp_path / "copies" / "r") == names(folder / "checkpoints") == ["step-00000003", "step-00000002"]


@pytest.mark.parametrize("resume_from", ["newest", "whole"])
def test_a_damaged_copy_is_passed_over_where_that_was_asked_for(tmp_path: Path, resume_from: str) -> None:
    place = tmp_path / "copies" / "r"
    published(place, 2)
    (published(place, 3) / "state.json").write_text("{}")
    run = open_run(run_folder=tmp_path / "r", checkpoint_to=str(tmp_path / "copies"), resume_from=resume_from)
    if resume_from == "newest":
        with pytest.raises(CheckpointError, match="can't be had"), run.opening():
            pass
    else:
        with run.opening() as found:
            assert found is not None
            assert found.step == 2


def test_a_copy_of_a_run_with_a_ledger_needs_the_ledger_here(tmp_path: Path) -> None:
    published(tmp_path / "copies" / "r", 3, {"identity": {"settings.ledger": True}})
    run = open_run(run_folder=tmp_path / "r", checkpoint_to=str(tmp_path / "copies"))
    with pytest.raises(CheckpointError, match="the ledger isn't in"), run.opening():
        pass
    (tmp_path / "r" / "ledger").mkdir()
    (tmp_path / "r" / "ledger" / "checkpoint").touch()
    with open_run(run_folder=tmp_path / "r", checkpoint_to=str(tmp_path / "copies")).opening() as found:
        assert found is not None


@pytest.mark.parametrize("has_copies", [True, False])
def test_who_finds_its_newest_damaged_is_told_of_a_copy(tmp_path: Path, *, has_copies: bool) -> None:
    folder, place = tmp_path / "r", tmp_path / "copies" / "r"
    (published(folder / "checkpoints", 2) / "state.json").write_text("{}")
    config: dict[str, Any] = {"checkpoint_to": str(tmp_path / "copies")} if has_copies else {}
    if has_copies:
        published(place, 2)
        (folder / "copies.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="is damaged") as caught, open_run(run_folder=folder, **config).opening():
        pass
    assert ("has a copy of step-00000002" in str(caught.value)) is has_copies
    assert "brought" not in str(caught.value)
    assert isinstance(caught.value.__cause__, CheckpointError if has_copies else ValueError | type(None))


def test_what_was_fetched_is_given_back_by_a_run_that_can_not_go_on_from_it(tmp_path: Path) -> None:
    published(tmp_path / "copies" / "r", 3)
    run = open_run(run_folder=tmp_path / "r", checkpoint_to=str(tmp_path / "copies"))
    words = r"of another model It was brought from .*copies/r\."
    with pytest.raises(CheckpointError, match=words) as caught, run.opening():
        raise CheckpointError("of another model")
    assert str(caught.value.__cause__) == "of another model"
    assert names(tmp_path / "r" / "checkpoints") == []
    other = open_run(run_folder=tmp_path / "r", checkpoint_to=str(tmp_path / "copies"))
    with pytest.raises(PlanError, match=r"^another matter$"), other.opening():
        raise PlanError("another matter")
    assert names(tmp_path / "r" / "checkpoints") == ["step-00000003"]
    own = open_run(run_folder=tmp_path / "r", checkpoint_to=str(tmp_path / "copies"))
    with pytest.raises(CheckpointError, match=r"^of another model$") as caught, own.opening():
        raise CheckpointError("of another model")
    assert caught.value.__cause__ is None, "it's as it was raised"
    assert names(tmp_path / "r" / "checkpoints") == ["step-00000003"], "it was here"


@pytest.mark.parametrize("ranks", [Ranks(), SecondOfTwo()])
def test_the_first_rank_sets_damaged_checkpoints_aside(tmp_path: Path, ranks: Ranks) -> None:
    published(tmp_path / "checkpoints", 2)
    (published(tmp_path / "checkpoints", 3) / "state.json").write_text("{}")
    with open_run(run_folder=tmp_path, ranks=ranks, resume_from="whole").opening() as found:
        assert found is not None
        assert found.step == 2
    moved = (tmp_path / "checkpoints" / "damaged-1-step-00000003").exists()
    assert moved is (ranks.rank == 0)


# --------------------------------------------------------------------------------------------------------- the start


@pytest.mark.parametrize("spans", [{"evaluate_every": "5sec"}, {"checkpoint_every": "1ep"}])
def test_spans_without_a_step_are_refused_before_anything_is_written(tmp_path: Path, spans: dict[str, str]) -> None:
    run = open_run(run_folder=tmp_path, **spans)
    with pytest.raises(PlanError, match=next(iter(spans.values()))), run.opening():
        run.start(Clock())
    assert not (tmp_path / "run.json").exists()


def test_seconds_between_checkpoints_need_no_step(tmp_path: Path) -> None:
    run = open_run(run_folder=tmp_path, checkpoint_every="5sec")
    with run.opening():
        run.start(Clock())
    closed(run)


@pytest.mark.parametrize("is_broken", [True, False])
def test_the_record_says_that_it_runs_under_which_promises(tmp_path: Path, *, is_broken: bool) -> None:
    run = open_run(run_folder=tmp_path)
    assert FACTS.plan.holds(Promise.RESUME)
    plan = FACTS.plan.withdraw(Promise.RESUME, "the cat sat on it") if is_broken else None
    with run.opening():
        run.start(Clock(step=4), [CHANGE], plan)
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["outcome"], record["num_steps"], record["ended"]) == ("running", 4, None)
    assert ("the cat sat on it" in json.dumps(record["guarantees"])) is is_broken
    assert json.loads((tmp_path / "changes.jsonl").read_text()) == {"step": 4, "changes": [["seed", 1, 2]]}
    closed(run)


@pytest.mark.parametrize("ranks", [Ranks(), SecondOfTwo()])
def test_the_ledger_is_told_what_the_run_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    asked: list[tuple[Path, RunConfig]] = []
    monkeypatch.setattr(session, "asked_witnesses", lambda *given: asked.append(given) or "witnesses")
    monkeypatch.setattr(LedgerObserver, "on_start", lambda *_: None)
    monkeypatch.setattr(LedgerObserver, "on_end", lambda *_: None)
    run = open_run(run_folder=tmp_path, ranks=ranks, has_ledger=True)
    with run.opening():
        run.start(Clock(step=1), [CHANGE], None, b"S" * 32)
    ledger = next(one for one in run.observers if isinstance(one, LedgerObserver))
    assert (ledger._changed, ledger._state_digest, ledger._digest()) == ([CHANGE], b"S" * 32, b"R" * 32)
    assert (ledger._facts, ledger._ranks) == (run.facts, ranks)
    is_first = ranks.rank == 0
    assert asked == ([(tmp_path, run._config)] if is_first else [])
    assert ledger._witnesses == ("witnesses" if is_first else None)
    closed(run)


def test_a_replay_brings_its_own_observer_of_the_ledger(tmp_path: Path) -> None:
    own = Compares()
    run = open_run(own, run_folder=tmp_path, has_ledger=True)
    with run.opening():
        run.start(Clock())
    assert [one for one in run.observers if isinstance(one, LedgerObserver)] == [own]
    closed(run)
    assert own.told == [("open",), ("start",), ("end", "completed")]


def test_an_open_run_tells_observers_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, alone = Opens(), Opens(), Opens()
    run = open_run(first, run_folder=tmp_path)
    with run.opening():
        run.start(Clock())
    run.evaluated(Clock(step=4), {"loss": 1.0}, 1.0)
    closed(run, 4)
    resumed = open_run(again, run_folder=tmp_path)
    with resumed.opening():
        resumed.start(Clock(step=2))
    for one, attempt, superseded in ((first, 0, {}), (again, 1, {0: 2})):
        assert one.run is not None
        assert (one.run.attempt, one.run.superseded, one.run.folder) == (attempt, superseded, tmp_path)
        assert one.run.started == read_attempts(tmp_path)[attempt].started
    assert again.run is not None
    assert (again.run.facts, again.run.model, again.run.rank) == (resumed.facts, resumed._model, 0)
    again.run.publish(Clock(step=2), {"seen": 1})
    again.run.stop("it has seen enough")
    assert again.told == [("start", 2), ("values", 2, {"seen": 1.0})]
    assert resumed.stop_reason == "it has seen enough"
    closed(resumed, 2)
    monkeypatch.setattr(session, "time", lambda: 123.5)
    bare = open_run(alone, ranks=SecondOfTwo())
    bare.start(Clock())
    assert alone.run is not None
    assert (alone.run.attempt, alone.run.superseded, alone.run.folder) == (0, {}, None)
    assert (alone.run.started, alone.run.rank) == (123.5, 1)


def test_who_has_started_is_told_where_another_fails_to(tmp_path: Path) -> None:
    before, fails, after = Opens(), Opens(fails=True), Opens()
    run = open_run(before, fails, after, run_folder=tmp_path)
    with pytest.raises(ZeroDivisionError), run.opening():
        run.start(Clock(step=3))
    assert before.told == [("start", 3), ("end", 3, "failed")]
    assert fails.told == after.told == []
    assert after.run is not None, "all are opened before one starts"
    attempt = read_attempts(tmp_path)[0]
    assert (attempt.number, attempt.first_step, attempt.last_step) == (0, 3, 3)
    assert (attempt.outcome, attempt.reason) == ("failed", "")


def test_an_interval_that_an_observer_takes_as_it_opens_is_looked_at() -> None:
    class Odd(Opens):
        def on_open(self, run: WatchedRun) -> None:
            self.every = 0

    with pytest.raises(PlanError, match=r"Odd\.every is 0"):
        open_run(Odd()).start(Clock())
