"""What of a run's past another budget would have changed: rates step by step, and the policy's phases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmati.core.clock import Budget, Clock, Time
from cosmati.train.budget_change import _is_taken_alike, _other_phase, _other_rate

WAS, NOW = Budget(Time.parse("10ba")), Budget(Time.parse("20ba"))


class Scheduled:
    """A rate that is another from some step on, where the budget is the longer one."""

    def __init__(self, first: int | None, schedule: object = "one") -> None:
        self.schedule, self.first = schedule, first
        self.asked: list[Clock] = []

    def rates(self, clock: Clock, budget: Budget) -> list[float]:
        self.asked += [clock] if budget is WAS else []
        is_other = budget is NOW and self.first is not None and clock.step >= self.first
        return [0.1, 0.2 if is_other else 0.3]


def assembly(*optimizers: Scheduled, phases: Any = None, methods: Any = ()) -> Any:
    policy = None if phases is None else SimpleNamespace(phases=[SimpleNamespace(**one) for one in phases])
    return SimpleNamespace(optimizers=optimizers, budget=NOW, policy=policy, plan=SimpleNamespace(methods=methods))


@pytest.mark.parametrize(
    ("firsts", "found"), [((None,), None), ((0,), 0), ((3,), 3), ((5,), None), ((4,), 4), ((None, 2), 2)]
)
def test_the_first_past_step_of_another_rate_is_found(firsts: tuple[int | None, ...], found: int | None) -> None:
    clock = Clock(step=5, epoch=2, step_in_epoch=1, rows=50, tokens=500, seconds=10.0)
    assert _other_rate(assembly(*map(Scheduled, firsts)), WAS, clock) == found
    assert _other_rate(assembly(Scheduled(0, schedule=None)), WAS, clock) is None


def test_a_past_step_had_seen_its_share() -> None:
    own = Scheduled(None)
    clock = Clock(step=4, epoch=2, step_in_epoch=1, rows=40, tokens=400, seconds=8.0)
    assert _other_rate(assembly(own), WAS, clock) is None
    assert own.asked == [Clock(step, int(step / 4 * 2), 0, 10 * step, 100 * step, 2.0 * step) for step in range(4)]
    assert _other_rate(assembly(Scheduled(0)), WAS, Clock()) is None


def phase(name: str, start: int, end: int) -> dict[str, object]:
    return {"name": name, "start_step": start, "end_step": end}


FIRST = [phase("warm", 0, 4), phase("main", 4, 20)]


@pytest.mark.parametrize(
    ("was", "done", "is_other"),
    [
        ([("warm", 0, 4), ("main", 4, 10)], 6, False),
        ([("warm", 0, 4), ("main", 4, 10)], 10, False),
        ([("warm", 0, 4), ("main", 4, 10)], 11, True),
        ([("warm", 0, 2), ("main", 2, 10)], 6, True),
        ([("warm", 0, 2), ("main", 2, 10)], 2, False),
        ([("warm", 0, 2), ("main", 2, 10)], 3, True),
        ([("warm", 0, 5), ("main", 5, 10)], 4, False),
        ([("other", 0, 4), ("main", 4, 10)], 1, True),
        ([("other", 0, 4), ("main", 4, 10)], 0, False),
    ],
)
def test_phases_that_are_past_stay_where_they_were(was: Any, done: int, is_other: bool) -> None:
    assert _other_phase(was, assembly(phases=FIRST), done) is is_other
    assert not _other_phase(was, assembly(), done)


def test_methods_say_what_they_take() -> None:
    same = SimpleNamespace(taken_from=lambda _budget: 3)
    other = SimpleNamespace(taken_from=lambda budget: budget.span)
    assert _is_taken_alike(assembly(methods=(same,)), WAS)
    assert _is_taken_alike(assembly(), WAS)
    assert not _is_taken_alike(assembly(methods=(same, other)), WAS)
