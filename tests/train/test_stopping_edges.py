"""What early stopping and thresholds say and keep at the edges: bounds of 0, checkpoints of before, other runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

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


def told(watch: EarlyStopping, *values: float) -> None:
    for step, value in enumerate(values, 1):
        watch.on_evaluation(Clock(step=step), {"other": 0.0, "loss": value}, 0.0)


def test_three_in_a_row_are_usual_and_any_gain_counts() -> None:
    watch = EarlyStopping("loss", higher_is_better=False)
    run = opened(watch)
    told(watch, 1.0, 1.0 - 1e-12, 2.0, 2.0)
    assert (watch.best, watch.best_step, watch.num_worse, run.why) == (1.0 - 1e-12, 2, 2, [])
    told(watch, 1.0 - 1e-12)
    assert run.why == ["loss was 1 after step 2, and none of 3 evaluations since is better"]


@pytest.mark.parametrize(("metrics", "named"), [({}, "nothing"), ({"a": 1.0, "b": 2.0}, "a, b")])
def test_a_metric_that_is_not_measured_is_refused_with_those_that_are(metrics: dict[str, float], named: str) -> None:
    watch = EarlyStopping("loss", higher_is_better=False)
    opened(watch)
    with pytest.raises(PlanError, match=f"^EarlyStopping watches 'loss', and the evaluation measures {named}\\. Name"):
        watch.on_evaluation(Clock(), metrics, 0.0)
    assert (watch.best, watch.num_worse) == (None, 0)


def test_its_state_says_of_what_it_is() -> None:
    for is_up in (True, False):
        watch = EarlyStopping("loss", higher_is_better=is_up, patience=2)
        told_before = {"best": None, "best_step": 0, "num_worse": 0, "metric": "loss", "higher_is_better": is_up}
        assert watch.state_dict() == told_before
        opened(watch)
        told(watch, 1.0, 1.0)
        assert watch.state_dict() == told_before | {"best": 1.0, "best_step": 1, "num_worse": 1}


@pytest.mark.parametrize("is_up", [True, False])
def test_a_state_that_does_not_say_of_what_it_is_goes_on(is_up: bool, caplog: pytest.LogCaptureFixture) -> None:
    watch = EarlyStopping("loss", higher_is_better=is_up)
    watch.load_state_dict({"best": 0.5, "best_step": 4, "num_worse": 2})
    assert (watch.best, watch.best_step, watch.num_worse) == (0.5, 4, 2)
    assert not caplog.text
    watch.load_state_dict({"best": 0.1, "best_step": 9, "num_worse": 1, "metric": "error"})
    assert (watch.best, watch.best_step, watch.num_worse) == (None, 0, 0)
    assert "EarlyStopping watched 'error' before, and begins anew with 'loss'." in caplog.text


def test_another_run_forgets_all_of_the_one_before() -> None:
    watch = EarlyStopping("loss", higher_is_better=False, patience=1)
    first = opened(watch)
    told(watch, 1.0, 2.0)
    assert len(first.why) == 1
    second = opened(watch)
    assert (watch.best, watch.best_step, watch.num_worse, second.why) == (None, 0, 0, [])
    told(watch, 3.0, 4.0)
    assert (len(first.why), len(second.why)) == (1, 1), "it asks the run that it watches now"
    assert len(opened(watch, step=1).why) == 1, "from step 1 on it's the same run"


@pytest.mark.parametrize(
    "given",
    [
        {"patience": 0, "min_delta": 0.5},
        {"patience": 2.0, "min_delta": 0.5},
        {"patience": 2, "min_delta": -1e-9},
        {"patience": 2, "min_delta": float("nan")},
        {"patience": 2, "min_delta": None},
    ],
)
def test_numbers_that_cannot_be_are_told(given: dict[str, Any]) -> None:
    EarlyStopping("loss", higher_is_better=True, patience=1, min_delta=0)
    with pytest.raises(PlanError) as caught:
        EarlyStopping("loss", higher_is_better=True, **given)
    shown = f"EarlyStopping(patience={given['patience']!r}, min_delta={given['min_delta']!r}): patience is"
    assert str(caught.value).startswith(shown)


@pytest.mark.parametrize(
    ("bounds", "value", "why"),
    [
        ({"above": 0.0}, 0.0, "x is 0, and 0 was enough"),
        ({"above": 0}, -1e-9, None),
        ({"below": 0.0}, 0.0, "x is 0, and 0 was enough"),
        ({"below": 0}, 1e-9, None),
        ({"below": -2.5}, -3.0, "x is -3, and -2.5 was enough"),
        ({"above": 1.5}, 2.0, "x is 2, and 1.5 was enough"),
    ],
)
def test_a_bound_may_be_0_and_a_run_stops_once_a_value(bounds: dict[str, float], value: float, why: str | None) -> None:
    watch = Threshold("x", **bounds)
    run = opened(watch)
    assert run.why == []
    watch.on_values(Clock(step=1), {"x": value})
    watch.on_values(Clock(step=2), {"y": value})
    assert run.why == ([] if why is None else [why])
    assert watch.state_dict() == {"last": value, "name": "x"}


@pytest.mark.parametrize("bound", [float("inf"), -float("inf"), float("nan"), "1", None])
@pytest.mark.parametrize("name", ["above", "below"])
def test_a_bound_is_a_finite_number(name: str, bound: Any) -> None:
    with pytest.raises(PlanError) as caught:
        Threshold("x", **{name: bound})
    shown = {"above": None, "below": None} | {name: bound}
    assert str(caught.value).startswith(f"Threshold('x', above={shown['above']!r}, below={shown['below']!r}): give one")
    with pytest.raises(PlanError):
        Threshold("x", above=1.0, below=2.0)


def test_a_threshold_takes_up_its_own_values_alone() -> None:
    watch = Threshold("x", above=1.0)
    watch.load_state_dict({"last": 2.0, "name": "x"})
    assert opened(watch, step=1).why == ["x is 2, and 1 was enough"]
    watch.load_state_dict({"last": 2.0, "name": "z"})
    assert (watch.last, opened(watch, step=1).why) == (None, [])
    watch.last = 5.0
    assert opened(watch).why == [], "at step 0 it's another run"
    assert watch.last is None


MAKERS: list[Callable[[], Any]] = [
    lambda: EarlyStopping("loss", higher_is_better=True),
    lambda: Threshold("loss", above=9.0),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_run_with_a_good_value_has_nothing_to_be_warned_of(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    watch = make()
    opened(watch)
    assert watch.ends_runs is True
    with caplog.at_level(logging.WARNING):
        watch.on_evaluation(Clock(step=1), {"loss": 0.5}, 0.0)
        watch.on_end(Clock(step=1), "completed")
        assert not caplog.text
        opened(watch)
        watch.on_end(Clock(), "completed")
    assert "watched 'loss', and nothing" in caplog.text
