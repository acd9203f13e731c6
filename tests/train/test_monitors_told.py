"""`Monitors` tells its monitors when what is due, brings all that they measured to the host and publishes it once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati.core.clock import Budget, Clock, Time
from cosmati.train.observers.monitors import monitor
from cosmati.train.observers.monitors.monitor import Monitor, Monitors
from cosmati.train.outcome import StepOutcome
from tests.train.hand_made import outcome

BUDGET = Budget(Time.parse("20ba"))


class Written(Monitor):
    """Writes down each call; measures what it's given."""

    def __init__(self, told: list[Any], own: Mapping[str, float | Tensor] | None = None, label: str = "") -> None:
        self.told, self.own, self.label = told, own or {}, label
        self.state: dict[str, Any] = {}

    def open(self, run: Any) -> None:
        self.told.append((self.label, "open", run))

    def start(self, clock: Clock, budget: Budget) -> None:
        self.told.append((self.label, "start", clock, budget))

    def before(self, clock: Clock, number: int) -> None:
        self.told.append((self.label, "before", clock.step, number))

    def note(self, outcome: StepOutcome) -> None:
        self.told.append((self.label, "note", outcome.clock.step))

    def measure(self, outcome: StepOutcome) -> Mapping[str, float | Tensor]:
        self.told.append((self.label, "measure", outcome.clock.step, torch.is_grad_enabled()))
        return self.own

    def judge(self, found: Mapping[str, float | list[float]], outcome: StepOutcome) -> Mapping[str, float]:
        self.told.append((self.label, "judge", dict(found), outcome.clock.step))
        return super().judge(found, outcome)

    def end(self) -> None:
        self.told.append((self.label, "end"))

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.told.append((self.label, "load", dict(state)))


def opened(*monitors: Monitor, every: int = 1) -> tuple[Monitors, list[tuple[Clock, Mapping[str, float]]]]:
    published: list[tuple[Clock, Mapping[str, float]]] = []
    watch = Monitors(monitors, every=every)
    watch.on_open(SimpleNamespace(publish=lambda clock, values: published.append((clock, values))))  # type: ignore[arg-type]
    return watch, published


def kinds(told: Sequence[Any]) -> list[str]:
    return [one[1] for one in told]


def test_the_base_measures_nothing_keeps_nothing_and_publishes_all_but_lists() -> None:
    base, now = Monitor(), outcome(0)
    calls: list[object] = [
        base.open(SimpleNamespace()),  # type: ignore[func-returns-value, arg-type]
        base.start(Clock(), BUDGET),  # type: ignore[func-returns-value]
        base.before(Clock(), 1),  # type: ignore[func-returns-value]
        base.note(now),  # type: ignore[func-returns-value]
        base.end(),  # type: ignore[func-returns-value]
        base.load_state_dict({"a": 1}),  # type: ignore[func-returns-value]
    ]
    assert calls == [None] * 6
    assert base.measure(now) == {}
    assert base.state_dict() == {}
    assert base.judge({"one": 1.0, "many": [1.0, 2.0], "none": 0.0, "empty": []}, now) == {"one": 1.0, "none": 0.0}


def test_it_measures_every_ten_steps_unless_told() -> None:
    assert Monitors([]).interval == 10
    assert inspect.signature(Monitors).parameters["every"].kind is inspect.Parameter.KEYWORD_ONLY
    assert Monitors([], every=1).interval == 1
    assert Monitors([]).every == 1, "it's told of every step: some monitors note each"


@pytest.mark.parametrize("every", [0, -1, 2.0, "3"])
def test_an_interval_that_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=r"Monitors\(every=.*\): it is a number of steps, at least 1") as caught:
        Monitors([], every=every)
    assert repr(every) in str(caught.value)


def test_one_monitor_or_many_in_their_order() -> None:
    first, second = Monitor(), Monitor()
    assert Monitors(first).monitors == (first,)
    assert Monitors([second, first]).monitors == (second, first)


@pytest.mark.parametrize("monitors", [["norms"], [Monitor(), Monitor], [Monitor(), None]])
def test_any_that_is_no_monitor_is_refused_by_name(monitors: Any) -> None:
    with pytest.raises(ValueError, match="is no Monitor: give instances") as caught:
        Monitors(monitors)
    assert repr(monitors[-1]) in str(caught.value)
    assert "observers=[...]" in str(caught.value)


def test_each_is_shown_the_run_and_its_start_in_order() -> None:
    told: list[Any] = []
    watch = Monitors([Written(told, label="a"), Written(told, label="b")])
    run: Any = SimpleNamespace()
    watch.on_open(run)
    clock = Clock(step=4)
    watch.on_start(clock, BUDGET)
    assert told == [
        ("a", "open", run),
        ("b", "open", run),
        ("a", "start", clock, BUDGET),
        ("b", "start", clock, BUDGET),
    ]


def test_each_gets_ready_before_the_steps_that_are_measured_and_they_are_numbered() -> None:
    told: list[Any] = []
    watch, _ = opened(Written(told, label="a"), Written(told, label="b"), every=3)
    del told[:]
    for step in range(7):
        watch.on_step_begin(Clock(step=step))
    assert told == [("a", "before", 2, 1), ("b", "before", 2, 1), ("a", "before", 5, 2), ("b", "before", 5, 2)]


def test_a_measured_step_is_noted_measured_let_go_judged_and_published_once() -> None:
    told: list[Any] = []
    first = Written(told, {"x": 1.0, "both": 1.0}, "a")
    second = Written(told, {"y": torch.tensor(2.0), "both": 2.0}, "b")
    watch, published = opened(first, second)
    watch.on_step_begin(Clock())
    del told[:]
    now = outcome(0)
    watch.on_step(now)
    assert told == [
        ("a", "note", 1),
        ("b", "note", 1),
        ("a", "measure", 1, False),
        ("b", "measure", 1, False),
        ("a", "end"),
        ("b", "end"),
        ("a", "judge", {"x": 1.0, "both": 1.0}, 1),
        ("b", "judge", {"y": 2.0, "both": 2.0}, 1),
    ]
    assert published == [(now.clock, {"x": 1.0, "both": 2.0, "y": 2.0})], "of a name that two have, the later's counts"
    assert torch.is_grad_enabled()


def test_every_step_is_noted_and_only_those_that_are_due_are_measured() -> None:
    told: list[Any] = []
    watch, published = opened(Written(told, {"x": 1.0}), every=2)
    for step in range(5):
        watch.on_step_begin(Clock(step=step))
        watch.on_step(outcome(step))
    assert [one[2] for one in told if one[1] == "note"] == [1, 2, 3, 4, 5]
    assert [one[2] for one in told if one[1] == "measure"] == [2, 4]
    assert [clock.step for clock, _ in published] == [2, 4]


def test_a_step_whose_begin_was_not_seen_is_not_measured() -> None:
    """As the first one after a resume in the middle of it, and the second of two whose begin was told once."""
    told: list[Any] = []
    watch, published = opened(Written(told, {"x": 1.0}))
    watch.on_step(outcome(0))
    assert kinds(told) == ["open", "note", "end"]
    watch.on_step_begin(Clock(step=1))
    watch.on_step(outcome(1))
    watch.on_step(outcome(2))
    assert kinds(told).count("measure") == 1
    assert [clock.step for clock, _ in published] == [2]


def test_the_end_lets_go_so_that_nothing_is_measured_until_the_next_begin() -> None:
    told: list[Any] = []
    watch, published = opened(Written(told, {"x": 1.0}))
    watch.on_step_begin(Clock())
    watch.on_end(Clock(), "failed")
    assert kinds(told) == ["open", "before", "end"]
    watch.on_step(outcome(0))
    assert published == []


def test_where_nothing_is_found_nothing_is_published() -> None:
    watch, published = opened(Monitor(), Written([], {"many": torch.ones(2)}))
    watch.on_step_begin(Clock())
    watch.on_step(outcome(0))
    assert published == []


def test_states_go_by_class_and_number_and_empty_ones_are_left_out() -> None:
    told: list[Any] = []
    monitors = [Written(told, label=label) for label in "abc"]
    monitors[0].state, monitors[2].state = {"n": 1}, {"n": 3}
    watch = Monitors([Monitor(), *monitors])
    assert watch.state_dict() == {"Written": {"n": 1}, "Written 3": {"n": 3}}
    watch.load_state_dict({"Written 3": {"n": 3}, "Written": {"n": 1}, "Other": {"n": 9}})
    assert told == [("a", "load", {"n": 1}), ("c", "load", {"n": 3})]


def test_what_was_measured_comes_to_the_host_in_its_places() -> None:
    measured = [
        {"scalar": torch.tensor(1.5), "plain": 7.0, "three": torch.tensor([2.0, 3.0, 4.0])},
        {},
        {"one": torch.tensor([5.0]), "none": torch.tensor([]), "whole": torch.tensor(6), "flag": torch.tensor(True)},
    ]
    assert monitor._read(measured) == [
        {"scalar": 1.5, "plain": 7.0, "three": [2.0, 3.0, 4.0]},
        {},
        {"one": [5.0], "none": [], "whole": 6.0, "flag": 1.0},
    ]
    assert monitor._read([{"plain": 1.0}, {"other": 2}]) == [{"plain": 1.0}, {"other": 2}]
    assert monitor._read([]) == []


def test_scalars_that_stand_first_and_last_are_each_their_own() -> None:
    found = monitor._read(
        [{"a": torch.tensor(1.0)}, {"b": torch.tensor(2.0)}, {"c": torch.tensor(3.0, dtype=torch.float64)}]
    )
    assert found == [{"a": 1.0}, {"b": 2.0}, {"c": 3.0}]


def test_the_host_is_told_in_single_precision() -> None:
    exact = torch.tensor(0.1, dtype=torch.float64)
    assert monitor._read([{"a": exact}]) == [{"a": float(exact.float())}]
