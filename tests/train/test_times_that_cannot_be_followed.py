"""In a run whose epochs nobody can measure, what follows time within one is refused by name, and all else is let be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from cosmati import RunConfig
from cosmati.core.clock import Budget, Time
from cosmati.errors import PlanError
from cosmati.methods import EMA, LabelSmoothing
from cosmati.optim import Constant, Cosine, Linear, MultiStep
from cosmati.train.assembly import ScheduledOptimizer
from cosmati.train.epochs import _moves, refuse_times


def scheduled(schedule: Any) -> ScheduledOptimizer:
    optimizer = torch.optim.SGD([Parameter(torch.ones(1))], lr=0.1)
    return ScheduledOptimizer(optimizer, schedule, (0.1,), frozenset())


def check(
    span: str = "4ep",
    data: Any = (),
    steps: int | None = None,
    methods: Any = (),
    schedule: Any = None,
    **settings: Any,
) -> None:
    config, budget = RunConfig(budget=span, **settings), Budget(Time.parse(span), steps_per_epoch=steps)
    refuse_times(config, budget, data, methods, [scheduled(None), scheduled(schedule)])


def refused(*given: Any, **named: Any) -> str:
    with pytest.raises(PlanError) as caught:
        check(*given, **named)
    return str(caught.value)


@dataclass(frozen=True)
class Following:
    """A method that follows how far the run is, with a span of its own."""

    follows_elapsed = True
    span: str = "10ba"
    is_off: bool = False


@pytest.mark.parametrize("data", [(), None])
def test_where_an_epochs_length_is_known_everything_follows_it(data: Any) -> None:
    check("4ep", data, 10, [Following("1ep")], Cosine(warmup="1ep"), checkpoint_every="1ep")


def test_a_warm_up_of_the_whole_run_is_refused_whatever_is_known() -> None:
    assert refused("4ep", steps=10, schedule=Linear(warmup="4ep")) == (
        "Warm-up '4ep' takes the whole run of '4ep'. Shorten it."
    )


def test_what_would_stand_still_is_named() -> None:
    check(methods=[LabelSmoothing(smoothing=0.1)], schedule=Constant())
    check(schedule=MultiStep(milestones=("0.25dur",), factor=0.1))
    message = refused(schedule=Cosine(), methods=[LabelSmoothing(smoothing=0.1), Following()])
    assert message.startswith("SGD's Cosine(")
    assert ", Following(" in message.partition(" would follow how far the run is")[0]
    assert "LabelSmoothing" not in message
    assert "within an epoch: The tuple doesn't say how long one is. In a run of '4ep' it" in message
    assert "Following" not in refused(schedule=Cosine())
    assert "SGD" not in refused(methods=[Following()])


def test_a_loop_of_ones_own_is_refused_a_budget_in_epochs_but_for_the_default() -> None:
    check("1ep", None)
    assert refused("4ep", None).startswith("A budget of '4ep' never ends here: a loop of one's own has no epochs")
    message = refused("1ep", None, methods=[Following()])
    assert "within an epoch: A loop of one's own doesn't say how long one is" in message


@pytest.mark.parametrize(("span", "data"), [("400ba", ()), ("400ba", None), ("1ep", None)])
def test_spans_in_epochs_cannot_be_placed_where_a_run_is_not_measured_in_them(span: str, data: Any) -> None:
    check(span, data, methods=[EMA(half_life="10ba")], checkpoint_every="5ba", evaluate_every="0.5dur")
    message = refused(
        span, data, methods=[EMA(half_life="2ep"), Following("3ep"), Following("3ep", is_off=True)],
        schedule=Linear(warmup="1ep"), checkpoint_every="1ep", evaluate_every="2ep",
    )  # fmt: skip
    assert message.partition(" can't be placed")[0] == (
        "RunConfig(checkpoint_every='1ep'), RunConfig(evaluate_every='2ep'), EMA(half_life='2ep'), "
        "Following(span='3ep'), Linear(warmup='1ep')"
    )


def test_a_run_that_is_measured_in_epochs_may_have_spans_in_them() -> None:
    check("4ep", methods=[EMA(half_life="2ep")], checkpoint_every="1ep", evaluate_every="2ep")


def test_a_run_in_steps_lets_everything_follow_it() -> None:
    check("400ba", methods=[Following()], schedule=Cosine(warmup="10ba"))


@dataclass(frozen=True)
class MovingIn:
    """Moves within one epoch of a run of so many, and in no other."""

    epoch: int
    num: int
    parts: tuple[float, float] = (0.0, 1.0)

    def multiplier(self, elapsed: float, budget: Budget) -> float:
        place = elapsed * self.num - self.epoch
        return place if self.parts[0] < place < self.parts[1] else 0.0


def moves(schedule: Any, span: str, ratio: float = 1.0) -> bool:
    return _moves(schedule, Budget(Time.parse(span), ratio=ratio))


def test_each_epoch_is_looked_at_up_to_a_hundred() -> None:
    assert [moves(MovingIn(epoch, 4), "4ep") for epoch in range(-1, 5)] == [False, True, True, True, True, False]
    assert [moves(MovingIn(epoch, 6), "4ep", 1.5) for epoch in (4, 5, 6)] == [True, True, False]
    assert [moves(MovingIn(epoch, 400), "400ep") for epoch in (0, 99, 100)] == [True, True, False]
    assert moves(MovingIn(0, 1, (0.0, 0.2)), "1ep")
    assert moves(MovingIn(0, 1, (0.4, 0.6)), "1ep")
    assert moves(MovingIn(0, 1, (0.8, 1.0)), "1ep")


@dataclass(frozen=True)
class Asking:
    """Notes how far it is asked for."""

    asked: list[float]

    def multiplier(self, elapsed: float, budget: Budget) -> float:
        self.asked.append(elapsed)
        return 1.0


def test_no_schedule_is_asked_for_more_than_the_whole_run() -> None:
    one = Asking([])
    assert not moves(one, "2.5ep")
    assert one.asked == pytest.approx([0.04, 0.2, 0.36, 0.44, 0.6, 0.76, 0.84, 1.0, 1.0])
    assert max(one.asked) <= 1.0
