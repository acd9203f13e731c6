"""When early stopping and thresholds end a run: against the rule written out over a whole list of evaluations."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import PlanError
from cosmati.train.observers.stopping import EarlyStopping, Threshold

BUDGET = Budget(Time.parse("100ba"))


class Run:
    rank = 0

    def __init__(self) -> None:
        self.why: list[str] = []

    def stop(self, why: str) -> None:
        self.why.append(why)


def opened(watch: Any, step: int = 0) -> Run:
    run = Run()
    watch.on_open(run)
    watch.on_start(Clock(step=step), BUDGET)
    return run


VALUES = st.lists(st.sampled_from([0.0, 0.5, 0.75, 1.0, 1.25, math.nan, math.inf, -math.inf]), max_size=8)


@given(values=VALUES, up=st.booleans(), patience=st.integers(1, 3), delta=st.sampled_from([0.0, 0.25, 0.3]))
def test_it_stops_after_so_many_that_are_not_better(values: list[float], up: bool, patience: int, delta: float) -> None:
    watch = EarlyStopping("loss", higher_is_better=up, patience=patience, min_delta=delta)
    run = opened(watch)
    best, best_step, worse, num_due = None, 0, 0, 0
    for number, value in enumerate(values, 1):
        watch.on_evaluation(Clock(step=10 * number), {"loss": value}, 0.0)
        gain = math.inf if best is None else value - best if up else best - value
        if math.isfinite(value) and gain > delta:
            best, best_step, worse = value, 10 * number, 0
        else:
            worse += 1
        assert (watch.best, watch.best_step, watch.num_worse) == (best, best_step, worse)
        if worse >= patience:
            num_due += 1
            told = "was never finite" if best is None else f"was {best:g} after step {best_step}"
            by = f" by more than {delta:g}" if delta else ""
            assert run.why[-1] == f"loss {told}, and none of {worse} evaluations since is better{by}"
    assert len(run.why) == num_due


def test_what_it_knows_goes_on_and_is_forgotten_for_another_metric(caplog: pytest.LogCaptureFixture) -> None:
    watch = EarlyStopping("loss", higher_is_better=False, patience=2)
    run = opened(watch)
    for step, value in ((1, 1.0), (2, 2.0)):
        watch.on_evaluation(Clock(step=step), {"loss": value}, 0.0)
    assert run.why == []
    state = dict(watch.state_dict())
    again = EarlyStopping("loss", higher_is_better=False, patience=1)
    again.load_state_dict(state)
    assert opened(again, step=2).why == ["loss was 1 after step 1, and none of 1 evaluations since is better"]
    patient = EarlyStopping("loss", higher_is_better=False, patience=2)
    patient.load_state_dict(state)
    assert opened(patient, step=2).why == []
    assert patient.num_worse == 1
    for other in (EarlyStopping("accuracy", higher_is_better=False), EarlyStopping("loss", higher_is_better=True)):
        other.load_state_dict(state)
        assert (other.best, other.num_worse) == (None, 0)
        assert "begins anew" in caplog.text
        caplog.clear()
    opened(patient)
    assert (patient.best, patient.num_worse) == (None, 0), "at step 0 it's another run"


@pytest.mark.parametrize(
    "given", [{"patience": 0}, {"patience": 1.5}, {"min_delta": -0.1}, {"min_delta": math.inf}, {"min_delta": "x"}]
)
def test_numbers_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="patience is a number of evaluations"):
        EarlyStopping("loss", higher_is_better=True, **given)
    with pytest.raises(PlanError, match="watches 'loss', and the evaluation measures accuracy"):
        EarlyStopping("loss", higher_is_better=True).on_evaluation(Clock(), {"accuracy": 1.0}, 0.0)


@pytest.mark.parametrize("value", [0.25, 0.5, 0.75, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["above", "below"])
def test_a_threshold_is_reached_at_its_bound(name: str, value: float) -> None:
    bounds: dict[str, float] = {name: 0.5}
    watch = Threshold("x", **bounds)
    run = opened(watch)
    watch.on_values(Clock(), {"y": value})
    assert watch.last is None
    watch.on_evaluation(Clock(step=3), {"x": value}, 0.0)
    is_due = value >= 0.5 if name == "above" else value <= 0.5
    assert run.why == ([f"x is {value:g}, and 0.5 was enough"] if is_due else [])
    again = Threshold("x", **bounds)
    again.load_state_dict(watch.state_dict())
    assert len(opened(again, step=3).why) == is_due
    assert opened(again).why == [], "at step 0 it's another run"
    other = Threshold("z", **bounds)
    other.load_state_dict(watch.state_dict())
    assert other.last is None


@pytest.mark.parametrize("given", [{}, {"above": 1.0, "below": 0.0}, {"above": math.nan}, {"below": "x"}])
def test_a_threshold_has_one_bound(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="give one of both bounds"):
        Threshold("x", **given)


@pytest.mark.parametrize("make", [lambda: EarlyStopping("x", higher_is_better=True), lambda: Threshold("x", above=1.0)])
@pytest.mark.parametrize(
    ("ended", "rank", "says"), [("completed", 0, True), ("completed", 1, False), ("stopped", 0, False)]
)
def test_it_says_where_nothing_was_compared(
    make: Any, ended: str, rank: int, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = make()
    opened(watch).rank = rank
    with caplog.at_level(logging.WARNING):
        watch.on_end(Clock(), ended)
        assert ("watched 'x', and nothing" in caplog.text) is says
        caplog.clear()
        watch.on_evaluation(Clock(), {"x": math.nan}, 0.0)
        watch.on_end(Clock(), ended)
        assert not caplog.text
