"""Observers as other people write them: odd intervals and numbers, hands in what they're given, starts that fail."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cosmati import Observer, StepOutcome, Trainer
from cosmati.core.clock import Budget, Clock
from cosmati.errors import CheckpointError, PlanError
from cosmati.records.attempts import read_attempts, read_lines
from cosmati.train.observers import EarlyStopping, History, Threshold, WatchedRun
from cosmati.train.observers.monitors import LossHealth
from tests.train.test_watching import Publisher, Recorder, make, squared_error

CUT = {"evaluate_every": "2ba", "checkpoint_every": "2ba"}


@pytest.mark.parametrize("every", [0, -1, 2.5, "1ep", None])
def test_an_interval_that_cannot_be_counted_is_refused_before_the_run(every: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Recorder\.every is .*a number of steps, at least 1"):
        make(tmp_path, Recorder(every=every))


def test_also_one_that_is_set_as_the_run_opens(tmp_path: Path) -> None:
    class Late(Recorder):
        def on_open(self, run: WatchedRun) -> None:
            self.every = 0

    with pytest.raises(PlanError, match=r"Late\.every is 0"):
        make(tmp_path, Late()).fit()


class Duck:
    every = 1

    def on_step(self, outcome: StepOutcome) -> None: ...


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (EarlyStopping, r"It's a class: give EarlyStopping\(\.\.\.\)"),
        (LossHealth(), r"It's a monitor: give Monitors\(\[LossHealth"),
        (Duck(), r"Derive yours from cosmati\.Observer"),
        ("wandb", r"'wandb', which is no Observer"),
    ],
)
def test_what_is_no_observer_is_named(odd: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make(None, odd)


def test_one_observer_needs_no_list() -> None:
    history, model = History(), nn.Linear(3, 1)
    trainer = Trainer(model, squared_error, optimizers=[torch.optim.SGD(model.parameters())], observers=history)
    assert trainer.observers == [history]


class Publishes(Recorder):
    def __init__(self, values: Any) -> None:
        super().__init__(every=6)
        self.values = values

    def on_step(self, outcome: StepOutcome) -> None:
        self.run.publish(outcome.clock, self.values)


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.tensor([2.0]), np.float32(2), np.int64(2), 2, 2.0])
def test_numbers_of_all_kinds_are_published(value: Any, tmp_path: Path) -> None:
    make(tmp_path, Publishes({"own": value})).fit()
    assert [line["own"] for line in read_lines(tmp_path / "monitors.jsonl")] == [2.0, 2.0]


@pytest.mark.parametrize(
    "values", [{"x": None}, {"x": "2"}, {"x": 1j}, {"x": torch.ones(2)}, {"x": 10**400}, {3: 1.0}, {"step": 1.0}]
)
def test_what_is_no_number_or_takes_the_clocks_name_is_refused(values: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"publish\(\) is given .*names, but for those of the clock \(step, "):
        make(tmp_path, Publishes(values)).fit()


class Meddler(Observer):
    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        metrics["error"] = -1.0  # type: ignore[index]

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        values.clear()  # type: ignore[attr-defined]


def test_an_observer_that_changes_what_it_is_given_changes_no_record(tmp_path: Path) -> None:
    history = History()
    result = make(tmp_path, Meddler(), Publisher(every=6), history, evaluate_every="4ba").fit()
    assert result.metrics["error"] > 0
    assert all(metrics["error"] > 0 for _, _, metrics in history.evaluations)
    assert all(line["error"] > 0 for line in read_lines(tmp_path / "evaluations.jsonl"))
    assert [line["double"] for line in read_lines(tmp_path / "monitors.jsonl")] == [12.0, 24.0]


@pytest.mark.parametrize("why", [None, 3.5, torch.tensor(1.0), b"bytes"])
def test_a_reason_of_any_kind_is_told(why: Any, tmp_path: Path) -> None:
    class Stops(Recorder):
        def on_step(self, outcome: StepOutcome) -> None:
            self.run.stop(why)

    result = make(tmp_path, Stops()).fit()
    assert result.reason == ("" if why is None else str(why))
    assert read_attempts(tmp_path)[0].reason == result.reason


class Ended(Observer):
    def __init__(self) -> None:
        self.ends: list[str] = []

    def on_end(self, clock: Clock, ended: str) -> None:
        self.ends.append(ended)


@pytest.mark.parametrize("call", ["on_open", "on_start"])
def test_a_start_that_fails_ends_for_those_that_have_started(call: str, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError

    first, odd, last = Ended(), Ended(), Ended()
    setattr(odd, call, fail)
    with pytest.raises(OSError):  # noqa: PT011  (its own)
        make(tmp_path, first, odd, last).fit()
    assert (first.ends, odd.ends, last.ends) == (["failed"] if call == "on_start" else [], [], [])
    assert [one.outcome for one in read_attempts(tmp_path)] == ["failed"]
    assert make(tmp_path, first).fit().outcome == "completed"


def never(metric: str = "error", *, higher: bool = False, patience: int = 2) -> EarlyStopping:
    """None is ever better, but for the first."""
    return EarlyStopping(metric, higher_is_better=higher, patience=patience, min_delta=1e9)


def test_a_threshold_that_was_reached_stops_at_once_again(tmp_path: Path) -> None:
    first = make(tmp_path, Threshold("error", above=0.0), **CUT).fit()
    again = make(tmp_path, Threshold("error", above=0.0), **CUT).fit()
    assert (first.outcome, first.clock.step) == (again.outcome, again.clock.step) == ("stopped", 2)
    assert first.reason == again.reason
    assert make(tmp_path, Threshold("error", above=1e6), **CUT).fit().outcome == "completed"


def test_what_was_known_of_another_name_isnt_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, Threshold("error", above=0.0), never(), Recorder(stop_at=2), **CUT).fit()
    threshold, stopping = Threshold("loss", above=0.0), never("loss", higher=True)
    with caplog.at_level(logging.WARNING, "cosmati"), pytest.raises(PlanError, match="the evaluation measures error"):
        make(tmp_path, threshold, stopping, Recorder(), **CUT).fit()
    assert (threshold.last, stopping.best, stopping.num_worse) == (None, None, 0)
    assert "watched 'error' before, and begins anew with 'loss'" in caplog.text
    turned = never(higher=True, patience=9)
    make(tmp_path, Threshold("error", above=1e6), turned, Recorder(), **CUT).fit()
    assert turned.best_step == 4, "the other way round is another thing to watch"


def test_one_that_has_watched_another_run_begins_anew() -> None:
    stopping, threshold = never(), Threshold("error", above=1e6)
    steps = [make(None, stopping, threshold, **CUT).fit().clock.step for _ in range(2)]
    assert steps == [6, 6]
    threshold.last = 1e9
    assert make(None, threshold, **CUT).fit().outcome == "completed"


@pytest.mark.parametrize(("patience", "cut"), [(1, 3), (3, 5), (3, 8)])
def test_patience_goes_on_where_it_was_cut(patience: int, cut: int, tmp_path: Path) -> None:
    class Cut(Observer):
        def on_step(self, outcome: StepOutcome) -> None:
            if outcome.clock.step == cut:
                raise InterruptedError

    whole, resumed = never(patience=patience), never(patience=patience)
    one = make(tmp_path / "whole", whole, **CUT).fit()
    with pytest.raises(InterruptedError):
        make(tmp_path / "cut", never(patience=patience), Cut(), **CUT).fit()
    other = make(tmp_path / "cut", resumed, **CUT).fit()
    assert (one.outcome, one.clock.step, one.reason) == (other.outcome, other.clock.step, other.reason)
    assert one.clock.step == 2 + 2 * patience
    assert whole.state_dict() == resumed.state_dict()
    name = f"checkpoints/step-{one.clock.step:08d}/model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_better_is_by_more_than_the_least_difference() -> None:
    stopping = EarlyStopping("error", higher_is_better=True, patience=9, min_delta=0.5)
    for step, value in enumerate([1.0, 1.5, 1.75, math.inf, math.nan, 2.25], 1):
        stopping.on_evaluation(Clock(step=step), {"error": value}, 0.0)
    assert (stopping.best, stopping.best_step, stopping.num_worse) == (1.75, 3, 3)


@pytest.mark.parametrize(("bound", "reached"), [({"above": 2.0}, [2.0, 3.0]), ({"below": 2.0}, [2.0, 1.0])])
def test_a_bound_itself_is_enough(bound: dict[str, float], reached: list[float]) -> None:
    class Asked:
        rank = 0

        def __init__(self) -> None:
            self.reasons: list[str] = []

        def stop(self, why: str) -> None:
            self.reasons.append(why)

    for value in (1.0, 2.0, 3.0, math.nan):
        threshold, run = Threshold("x", **bound), Asked()
        threshold.on_open(run)  # type: ignore[arg-type]
        threshold.on_values(Clock(step=1), {"x": value})
        assert bool(run.reasons) == (value in reached)


def test_what_was_never_measured_is_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cosmati"):
        make(None, Threshold("eror", above=1.0), never()).fit()
    assert "Threshold watched 'eror', and nothing of that name" in caplog.text
    assert "nothing was evaluated: set RunConfig.evaluate_every" in caplog.text


@pytest.mark.parametrize("wrong", [{"patience": 2.5}, {"patience": "3"}, {"min_delta": math.nan}, {"min_delta": "1"}])
def test_a_patience_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="patience is a number of evaluations, at least 1"):
        EarlyStopping("error", higher_is_better=True, **wrong)


@pytest.mark.parametrize("bound", [math.nan, math.inf, "3"])
def test_a_bound_that_cannot_be(bound: Any) -> None:
    with pytest.raises(PlanError, match="give one of both bounds, a finite number"):
        Threshold("error", above=bound)


def test_an_observer_may_stop_before_the_first_step(tmp_path: Path) -> None:
    class Never(Recorder):
        def on_start(self, clock: Clock, budget: Budget) -> None:
            self.run.stop("not today")

    result = make(tmp_path, Never()).fit()
    assert (result.outcome, result.clock.step, result.reason) == ("stopped", 0, "not today")
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "stopped"


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_outcome_that_is_kept_tells_its_own_step(num_microbatches: int) -> None:
    class Keeps(Observer):
        def __init__(self) -> None:
            self.kept: list[tuple[StepOutcome, float, float]] = []

        def on_step(self, outcome: StepOutcome) -> None:
            self.kept.append((outcome, outcome.gradient_norm(), float(outcome.loss)))

    keeps = Keeps()
    make(None, keeps, num_microbatches=num_microbatches).fit()
    assert len({norm for _, norm, _ in keeps.kept}) == 12
    assert [(one.gradient_norm(), float(one.loss)) for one, _, _ in keeps.kept] == [own[1:] for own in keeps.kept]


@pytest.mark.parametrize("odd", [None, 3, [("a", 1)]])
def test_a_state_that_is_no_dictionary_is_named(odd: Any, tmp_path: Path) -> None:
    class Odd(Observer):
        def state_dict(self) -> Any:
            return odd

    with pytest.raises(CheckpointError, match=r"state_dict\(\) of .*Odd returned .* Return a dictionary"):
        make(tmp_path, Odd()).fit()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_an_observers_stop_costs_no_checkpoint(number: int, tmp_path: Path) -> None:
    class Both(Recorder):
        def on_step(self, outcome: StepOutcome) -> None:
            if outcome.clock.step == 5:
                self.run.stop("it was enough")
                signal.raise_signal(number)

    result = make(tmp_path, Both()).fit()
    assert (result.outcome, result.clock.step, result.reason) == ("stopped", 5, "it was enough")
    assert (tmp_path / "checkpoints/step-00000005").is_dir()
