"""An open run, without a trainer: what is due when, who is told in which order, and what its end leaves behind."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.state import parameter_root
from cosmati.errors import CheckpointError, PlanError, RunError
from cosmati.records.run import RunRecord
from cosmati.storage.lock import FileLock, is_locked
from cosmati.train.config import RunConfig
from cosmati.train.observers.ledger import LedgerObserver
from cosmati.train.observers.metrics import MetricsFile
from cosmati.train.observers.observer import Observer
from cosmati.train.observers.progress import ProgressBar
from cosmati.train.outcome import StepOutcome
from cosmati.train.ranks import Ranks
from cosmati.train.run import session
from cosmati.train.run.checkpoints import Checkpoint, list_checkpoints, publish_checkpoint, write_checkpoint
from cosmati.train.run.copy_place import CopyPlace
from cosmati.train.run.folder import RunFolder, _locked
from cosmati.train.run.result import RunResult
from cosmati.train.run.session import OpenRun
from tests.train.hand_made import SecondOfTwo, Ticks, outcome, run_facts

BUDGET = Budget(Time.parse("20ba"), steps_per_epoch=5, rows_per_step=4, tokens_per_row=8)
RESULT = RunResult("completed", Clock(step=4), {}, 2.0, {}, None)
FACTS = run_facts(has_ledger=False)


def _open_run(
    *observers: Observer, ranks: Ranks | None = None, budget: Budget = BUDGET, has_ledger: bool = False, **config: Any
) -> OpenRun:
    facts = run_facts(has_ledger=has_ledger)
    return OpenRun(facts, RunConfig(**config), budget, ranks or Ranks(), observers, lambda: b"R" * 32, nn.Identity())


def _checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.full((2,), float(step))}, {"m": torch.ones(1)}, {"about": step})


class Told(Observer):
    """Writes down what it's told, under its name, in a list that it shares."""

    def __init__(self, told: list[tuple[Any, ...]], name: str = "", every: int = 1) -> None:
        self.told, self.name, self.every = told, name, every

    def on_start(self, clock: Clock, budget: Budget) -> None:
        self.told.append((self.name, "start", clock, budget))

    def on_step(self, outcome: StepOutcome) -> None:
        self.told.append((self.name, "step", outcome.clock.step))

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        self.told.append((self.name, "evaluation", clock, metrics, seconds))

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        self.told.append((self.name, "checkpoint", clock, state_digest, parameter_root))

    def on_end(self, clock: Clock, ended: str) -> None:
        self.told.append((self.name, "end", clock, ended))


class FailsAtItsEnd(Told):
    def on_end(self, clock: Clock, ended: str) -> None:
        super().on_end(clock, ended)
        raise ZeroDivisionError(self.name)


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)
    assert after == before


# ------------------------------------------------------------------------------------------------- what is due when

CADENCES = {
    "1ba": range(1, 21),
    "3ba": (3, 6, 9, 12, 15, 18),
    "7ba": (7, 14),
    "20ba": (20,),
    "21ba": (),
    "0.2ba": range(1, 21),  # not less than a step
    "2.6ba": (3, 6, 9, 12, 15, 18),
    "1ep": (5, 10, 15, 20),
    "0.8ep": (4, 8, 12, 16, 20),
    "12sp": (3, 6, 9, 12, 15, 18),
    "1sp": range(1, 21),
    "192tok": (6, 12, 18),
    "0.25dur": (5, 10, 15, 20),
    None: (),
}


@pytest.mark.parametrize("every", CADENCES)
def test_checkpoints_and_evaluations_are_due_at_their_steps(every: str | None) -> None:
    expected = set(CADENCES[every])
    config = {"checkpoint_every": every}, {"evaluate_every": every}
    checkpoints, evaluations = (_open_run(**one) for one in config)
    clocks = [Clock(step=step) for step in range(1, 21)]
    assert {clock.step for clock in clocks if checkpoints.checkpoint_is_due(clock)} == expected
    # The end of the run evaluates by itself.
    assert {clock.step for clock in clocks if evaluations.evaluation_is_due(clock)} == expected - {20}
    assert not any(checkpoints.evaluation_is_due(clock) or evaluations.checkpoint_is_due(clock) for clock in clocks)


def test_a_dilated_run_dilates_its_spans_but_not_its_steps() -> None:
    longer = Budget(Time.parse("4ep"), steps_per_epoch=5, ratio=2.0)
    run = _open_run(budget=longer, checkpoint_every="1ep", evaluate_every="3ba")
    assert longer.num_steps == 40
    assert [step for step in range(1, 41) if run.checkpoint_is_due(Clock(step=step))] == [10, 20, 30, 40]
    assert [step for step in range(1, 10) if run.evaluation_is_due(Clock(step=step))] == [3, 6, 9]


def test_seconds_have_no_step_to_be_due_at() -> None:
    run = _open_run(evaluate_every="5sec")
    with pytest.raises(PlanError, match="5sec"):
        run.evaluation_is_due(Clock(step=1))


def test_checkpoints_may_be_due_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()
    monkeypatch.setattr(session, "monotonic", clock)
    run = _open_run(checkpoint_every="5sec")
    found = []
    for step in range(1, 9):
        clock.pass_by(2.0)
        if run.checkpoint_is_due(Clock(step=step)):
            found.append(step)
            run.save(Clock(step=step), lambda: _checkpoint(0))
    assert found == [3, 4, 5, 6, 7, 8], "without a folder nothing is saved, and it stays due"


# ----------------------------------------------------------------------------------------------------- who is told


def test_observers_are_told_in_order_of_everything(tmp_path: Path) -> None:
    told: list[tuple[Any, ...]] = []
    run = _open_run(Told(told, "a"), Told(told, "b"), run_folder=tmp_path)
    clock, checkpoint = Clock(step=3, rows=12), _checkpoint(3)
    with run.opening():
        run.start(clock)
    run.report(outcome(3))
    run.evaluated(clock, {"loss": 0.5}, 1.5)
    run.save(clock, lambda: checkpoint)
    run.close(RESULT, FACTS.plan)
    roots = (checkpoint.state_digest, parameter_root(checkpoint.model))
    events: list[tuple[Any, ...]] = [
        ("start", clock, BUDGET),
        ("step", 4),
        ("evaluation", clock, {"loss": 0.5}, 1.5),
        ("checkpoint", clock, *roots),
        ("end", RESULT.clock, "completed"),
    ]
    assert roots[0] != roots[1]
    assert told == [(name, *event) for event in events for name in ("a", "b")]


def test_each_observer_is_told_of_steps_as_often_as_it_asks() -> None:
    told: list[tuple[Any, ...]] = []
    run = _open_run(Told(told, "all"), Told(told, "third", every=3))
    for step in range(7):
        run.report(outcome(step))
    assert [event[2] for event in told if event[0] == "all"] == [1, 2, 3, 4, 5, 6, 7]
    assert [event[2] for event in told if event[0] == "third"] == [3, 6]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"has_ledger": True}, []),  # no folder to keep it in
        ({"run_folder": "."}, [MetricsFile]),
        ({"run_folder": ".", "has_ledger": True}, [MetricsFile, LedgerObserver]),
        ({"progress": True}, [ProgressBar]),
        ({"run_folder": ".", "has_ledger": True, "progress": True}, [MetricsFile, LedgerObserver, ProgressBar]),
        ({"run_folder": ".", "has_ledger": True, "progress": True, "ranks": SecondOfTwo()}, [LedgerObserver]),
    ],
)
def test_a_run_brings_the_observers_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: list[type[Observer]]
) -> None:
    monkeypatch.setattr(LedgerObserver, "on_start", lambda self, clock, budget: None)
    monkeypatch.setattr(LedgerObserver, "on_end", lambda self, clock, ended: None)
    monkeypatch.setattr(ProgressBar, "on_start", lambda self, clock, budget: None)
    if "run_folder" in options:
        options = options | {"run_folder": tmp_path}
    mine, users = Told([]), []
    users.append(mine)
    run = _open_run(*users, **options)
    with run.opening():
        run.start(Clock())
    assert [type(observer) for observer in run.observers] == [Told, *expected]
    assert users == [mine], "the user's own list"
    run.close(RESULT, FACTS.plan)


# ------------------------------------------------------------------------------------------------ opening and saving


def test_a_run_without_a_folder_keeps_nothing() -> None:
    run, made = _open_run(), []
    with run.opening() as found:
        run.start(Clock())
    run.save(Clock(step=1), lambda: made.append(1) or _checkpoint(1))
    run.close(RESULT, FACTS.plan)
    assert (found, made) == (None, [])


def test_opening_gives_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10):
        publish_checkpoint(write_checkpoint(tmp_path / "checkpoints", _checkpoint(step)), keep=5)
    run = _open_run(run_folder=tmp_path)
    with run.opening() as found:
        assert found is not None
        assert (found.step, found.facts) == (10, {"about": 10})
        assert torch.equal(found.model["w"], torch.full((2,), 10.0))
        assert is_locked(tmp_path / "lock")
    run.close(RESULT, FACTS.plan)


def test_an_opening_that_fails_lets_the_folder_go(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="fails"), _open_run(run_folder=tmp_path).opening():
        pytest.fail("fails" if is_locked(tmp_path / "lock") else "isn't locked")
    assert not is_locked(tmp_path / "lock")
    target = publish_checkpoint(write_checkpoint(tmp_path / "checkpoints", _checkpoint(2)), keep=5)
    (target / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"), _open_run(run_folder=tmp_path).opening():
        pass
    assert not is_locked(tmp_path / "lock")


def test_the_second_rank_neither_locks_nor_writes(tmp_path: Path) -> None:
    holder, made, told = RunFolder.open(tmp_path, FACTS), [], []
    holder.write("running", FACTS.plan, Clock(), None)
    before = (tmp_path / "run.json").read_bytes()
    run = _open_run(Told(told), ranks=SecondOfTwo(), run_folder=tmp_path)
    with run.opening() as found:
        run.start(Clock())
    assert found is None
    run.save(Clock(step=3), lambda: made.append(3) or _checkpoint(3))
    run.close(RESULT, FACTS.plan)
    assert made == [3], "gathering a checkpoint takes every rank"
    assert [event[1] for event in told] == ["start", "end"]
    assert list_checkpoints(tmp_path / "checkpoints") == []
    assert (tmp_path / "run.json").read_bytes() == before
    assert is_locked(tmp_path / "lock"), "the first rank's"
    holder.unlock()


def test_a_checkpoint_is_published_after_observers_know_of_it(tmp_path: Path) -> None:
    published: list[list[str]] = []

    class Looks(Observer):
        def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
            published.append([path.name for path in list_checkpoints(tmp_path / "checkpoints")])

    run, made = _open_run(Looks(), run_folder=tmp_path, num_checkpoints=2), []
    with run.opening():
        run.start(Clock())
    for step in (1, 2, 2, 3):
        run.save(Clock(step=step), lambda step=step: made.append(step) or _checkpoint(step))
    run.close(RESULT, FACTS.plan)
    names = [f"step-{step:08d}" for step in range(4)]
    assert made == [1, 2, 3], "one that is there isn't made again"
    assert published == [[], [names[1]], [names[2], names[1]]]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [names[3], names[2]]


@pytest.mark.parametrize("is_async", [True, False])
def test_settling_publishes_and_waits_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    def fails(*_: object) -> None:
        raise OSError("the network is down")

    folder = tmp_path / "run"
    run = _open_run(run_folder=folder, checkpoint_to=str(tmp_path / "copies"), checkpoint_async=is_async)
    with run.opening():
        run.start(Clock())
    monkeypatch.setattr(CopyPlace, "put", fails)
    run.save(Clock(step=1), lambda: _checkpoint(1))
    with pytest.raises(CheckpointError, match=r"step-00000001 couldn't be copied to .*the network is down"):
        run.settle()
    run.settle()  # It has been told.
    run.close(RESULT, FACTS.plan)
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-00000001"]


def test_what_has_no_folder_has_nothing_to_settle() -> None:
    run = _open_run()
    run.settle()
    assert "_saver" not in vars(run)


# ------------------------------------------------------------------------------------------------------------ the end


def test_a_stop_is_asked_for_once_and_the_second_ctrl_c_interrupts() -> None:
    run = _open_run()
    run.start(Clock())
    with run.listening():
        assert not run.stop_is_asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.stop_is_asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    run.close(RESULT, FACTS.plan)


def test_the_end_is_told_to_all_and_recorded_where_an_observer_fails(tmp_path: Path) -> None:
    told: list[tuple[Any, ...]] = []
    result = dataclasses.replace(RESULT, clock=Clock(step=1))
    run = _open_run(FailsAtItsEnd(told, "a"), Told(told, "b"), run_folder=tmp_path, has_ledger=True)
    with run.opening():
        run.start(Clock())
    run.report(outcome(0))
    with pytest.raises(ZeroDivisionError, match="a"):
        run.close(result, FACTS.plan)
    assert [event[0] for event in told if event[1] == "end"] == ["a", "b"]
    record = RunRecord.from_json((tmp_path / "run.json").read_text())
    assert (record.outcome, record.num_steps) == ("completed", 1)
    assert not is_locked(tmp_path / "lock")
    # The ledger was closed too: another process, or this one, may go on with it.
    again = _open_run(run_folder=tmp_path, has_ledger=True)
    with again.opening():
        again.start(Clock(step=1))
    again.close(result, FACTS.plan)


def test_the_folder_is_recorded_after_the_last_observer(tmp_path: Path) -> None:
    seen: list[str] = []

    class Reads(Observer):
        def on_end(self, clock: Clock, ended: str) -> None:
            seen.append(json.loads((tmp_path / "run.json").read_text())["outcome"])

    run = _open_run(Reads(), run_folder=tmp_path)
    with run.opening():
        run.start(Clock())
    run.close(RESULT, FACTS.plan)
    seen.append(json.loads((tmp_path / "run.json").read_text())["outcome"])
    assert seen == ["running", "completed"]


def test_a_folder_of_another_process_is_not_let_go(tmp_path: Path) -> None:
    holder = RunFolder.open(tmp_path, FACTS)
    with pytest.raises(RunError, match="Another Trainer of this process"), _open_run(run_folder=tmp_path).opening():
        pass
    assert is_locked(tmp_path / "lock")
    holder.unlock()


def test_who_looks_for_a_lock_that_nobody_holds_any_more_leaves_nothing_behind(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock"):
        before = list(gc.callbacks)
        with pytest.raises(BlockingIOError):
            _locked(tmp_path / "lock")
        assert gc.callbacks == before
