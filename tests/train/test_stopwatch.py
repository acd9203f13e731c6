"""Time of training: evaluation and checkpoints are left out, and a run that goes on counts on."""

from __future__ import annotations

import time

import pytest

from cosmati.train import timing
from cosmati.train.timing import EARLIER, Stopwatch
from tests.train.hand_made import Ticks


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr(timing, "perf_counter", ticks)
    return ticks


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr(timing, "process_time", ticks)
    return ticks


def test_laps_are_charged_to_their_parts(ticks: Ticks) -> None:
    watch = Stopwatch()
    ticks.pass_by(32)  # set up: nobody's
    watch.start()
    for seconds, part in ((1, "data"), (2, "forward"), (4, "data"), (8, "backward")):
        ticks.pass_by(seconds)
        watch.lap(part)
    assert watch.seconds == {"data": 5, "forward": 2, "backward": 8}
    assert watch.training_seconds() == 15


def test_before_the_start_and_after_the_stop_no_training_passes(ticks: Ticks) -> None:
    watch = Stopwatch()
    ticks.pass_by(1)
    assert watch.training_seconds() == 0
    watch.start()
    ticks.pass_by(2)
    watch.stop()
    ticks.pass_by(4)
    assert watch.training_seconds() == 2
    watch.start()
    ticks.pass_by(8)
    assert watch.training_seconds() == 10


def test_a_pause_is_charged_to_its_part_and_is_not_training(ticks: Ticks) -> None:
    watch = Stopwatch()
    watch.start()
    ticks.pass_by(1)
    with watch.paused("evaluation"):
        ticks.pass_by(2)
        assert watch.training_seconds() == 1
        ticks.pass_by(4)
    ticks.pass_by(8)
    watch.lap("forward")
    assert watch.training_seconds() == 9
    # What passed before the pause without a lap is charged to nobody, least of all to the evaluation.
    assert watch.seconds == {"evaluation": 6, "forward": 8}


def test_a_pause_that_fails_ends_all_the_same(ticks: Ticks) -> None:
    watch = Stopwatch()
    watch.start()

    def fails_after(seconds: float) -> None:
        ticks.pass_by(seconds)
        raise KeyError

    with pytest.raises(KeyError), watch.paused("checkpoint"):
        fails_after(2)
    ticks.pass_by(1)
    assert (watch.seconds, watch.training_seconds()) == ({"checkpoint": 2}, 1)


def test_before_the_start_parts_are_charged_since_the_watch_was_made(ticks: Ticks) -> None:
    watch = Stopwatch()
    ticks.pass_by(3)
    watch.lap("data")
    assert (watch.seconds, watch.training_seconds()) == ({"data": 3}, 0)


def test_a_resumed_clock_goes_on(ticks: Ticks) -> None:
    watch = Stopwatch()
    watch.start(training_seconds=50)
    ticks.pass_by(4)
    assert watch.training_seconds() == 54
    # An earlier run's seconds take the place of what this process has counted, also where they are none.
    watch.start(training_seconds=0)
    ticks.pass_by(1)
    assert watch.training_seconds() == 1


def test_a_first_start_charges_what_was_trained_before_to_earlier_attempts() -> None:
    watch = Stopwatch()
    watch.start(training_seconds=50)
    assert watch.seconds == {EARLIER: 50}
    watch.start(training_seconds=70)
    assert watch.seconds == {EARLIER: 50}, "this process knows the parts of what it has added"
    for nothing in (None, 0.0):
        watch = Stopwatch()
        watch.start(nothing)
        assert watch.seconds == {}


@pytest.mark.parametrize("first", [None, 0.0])
def test_a_run_that_is_opened_again_has_had_no_earlier_attempt(ticks: Ticks, first: float | None) -> None:
    watch = Stopwatch()
    watch.start(first)
    ticks.pass_by(3)
    watch.lap("forward")
    watch.stop()
    watch.start(watch.training_seconds())
    assert watch.seconds == {"forward": 3}
    ticks.pass_by(1)
    assert watch.training_seconds() == 4


def test_each_lap_is_told_of_after_it_was_charged(ticks: Ticks) -> None:
    watch, told = Stopwatch(), list[tuple[str, float]]()
    watch.lap("untold")
    watch.on_lap = lambda part: told.append((part, watch.seconds[part]))
    watch.start()
    ticks.pass_by(2)
    watch.lap("data")
    with watch.paused("checkpoint"):
        ticks.pass_by(1)
    assert told == [("data", 2), ("checkpoint", 1)]


def test_processor_time_is_that_of_training(cpu: Ticks) -> None:
    watch = Stopwatch()
    cpu.pass_by(32)  # set up
    watch.start(0.0)
    cpu.pass_by(1)
    assert watch.cpu_seconds() == 1
    with watch.paused("evaluation"):
        cpu.pass_by(2)
        assert watch.cpu_seconds() == 1
    cpu.pass_by(4)
    watch.stop()
    cpu.pass_by(8)
    assert watch.cpu_seconds() == 5


def test_processor_time_that_an_earlier_process_spent_is_not_made_up(cpu: Ticks) -> None:
    watch = Stopwatch()
    watch.start(training_seconds=50)
    cpu.pass_by(4)
    with watch.paused("evaluation"):
        cpu.pass_by(1)
    assert watch.cpu_seconds() == 0
    watch.start(training_seconds=0)
    cpu.pass_by(2)
    assert watch.cpu_seconds() == 2


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_processor_time_is_worked_and_not_slept() -> None:
    watch = Stopwatch()
    watch.start()
    time.sleep(0.05)
    slept, began = watch.cpu_seconds(), time.thread_time()
    while time.thread_time() < began + 0.05:
        pass
    assert slept < 0.04
    assert 0.05 <= watch.cpu_seconds() - slept < 1.0
