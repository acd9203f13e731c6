"""Only an observer that says so may end a run: who says nothing leaves each class as isolated as it was."""

from __future__ import annotations

import pytest

from cosmati.core.clock import Clock
from cosmati.core.plan import Facts, Guarantee, Plan, Promise
from cosmati.errors import PlanError
from cosmati.train.observers import EarlyStopping, History, Observer
from cosmati.train.observers.observer import checked_observers, refuse_odd_interval
from cosmati.train.opening import without_ends

FACTS = Facts(num_microbatches=1, rows_per_microbatch=1, positional_data=True)
PAIRS = (("a", "low"), ("b", "high"))


class Silent(Observer):
    """Says nothing of itself."""


class Ending(Observer):
    """May end the run."""

    ends_runs = True


def planned() -> Plan:
    isolated = (Guarantee(Promise.ISOLATED, holds=True, because="alone", pair=pair) for pair in PAIRS)
    broken = Guarantee(Promise.ISOLATED, holds=False, because="it leaks", pair=("c", "low"))
    unwritten = Guarantee(Promise.NO_DIRECT_WRITE, holds=True, because="absent", pair=PAIRS[0])
    return Plan((), (Guarantee(Promise.PARITY, holds=True, because="plain"), *isolated, broken, unwritten), FACTS)


def test_an_observer_looks_at_each_step_and_ends_nothing() -> None:
    for kind in (Observer, Silent, History):
        assert (kind.every, kind.ends_runs) == (1, False)
    assert EarlyStopping.ends_runs


def test_an_observer_that_says_nothing_does_nothing() -> None:
    silent = Silent()
    clock = Clock()
    assert silent.state_dict() == {}
    silent.on_step_begin(clock)
    silent.on_values(clock, {"a": 1.0})
    silent.on_end(clock, "completed")
    assert vars(silent) == {}


@pytest.mark.parametrize("observers", [[], [Silent()], [Observer(), History(), Silent()]])
def test_observers_that_end_nothing_take_nothing_back(observers: list[Observer]) -> None:
    plan = planned()
    assert without_ends(plan, observers) == plan


@pytest.mark.parametrize(
    ("observers", "reason", "words"),
    [
        ([Ending()], "", "Ending may end the run, which may follow from any row; give a budget in steps instead"),
        ([Silent(), Ending(), Ending()], "", "Ending, Ending may end the run, which"),
        ([Silent()], "it's late", "the run was stopped: it's late, which may follow from any row"),
        ([Ending()], "it's late", "the run was stopped: it's late, which"),
    ],
)
def test_an_end_takes_back_that_classes_are_isolated_and_nothing_else(
    observers: list[Observer], reason: str, words: str
) -> None:
    before = planned().guarantees
    after = without_ends(planned(), observers, reason).guarantees
    assert len(after) == len(before)
    for was, now in zip(before, after, strict=True):
        if was.promise is Promise.ISOLATED and was.holds:
            assert (now.promise, now.pair, now.holds) == (was.promise, was.pair, False)
            assert now.because.startswith(words)
        else:
            assert now == was


@pytest.mark.parametrize("every", [0, -1, 1.0, "10ba", None])
def test_an_interval_is_a_number_of_steps(every: object) -> None:
    odd = Silent()
    odd.every = every  # type: ignore[assignment]
    for look in (refuse_odd_interval, checked_observers):
        with pytest.raises(PlanError, match=rf"Silent\.every is {every!r}, and it is a number of steps, at least 1"):
            look(odd)
    odd.every = 1
    assert checked_observers(odd) == [odd]
    assert checked_observers((odd, silent := Silent())) == [odd, silent]


class Measuring:
    """A monitor, to the eye."""

    def measure(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("odd", "hint"),
    [
        (Silent, r"which is no Observer\. It's a class: give Silent\(\.\.\.\)\. Derive"),
        (Measuring(), r"which is no Observer\. It's a monitor: give Monitors\(\[Measuring\(\.\.\.\)\]\)\. Derive"),
        (int, r"which is no Observer\. Derive"),
        (7, r"observers has 7, which is no Observer\. Derive yours from cosmati\.Observer"),
    ],
)
def test_what_is_no_observer_is_told_what_it_is(odd: object, hint: str) -> None:
    with pytest.raises(PlanError, match=hint):
        checked_observers([Silent(), odd])  # type: ignore[list-item]
