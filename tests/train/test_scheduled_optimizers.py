"""Optimizers under their schedules, progress as lines, and averages: parts that the loop only calls."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Regression
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.pieces import Pieces
from cosmati.core.rng import position_key
from cosmati.data.in_memory import InMemory
from cosmati.optim import SGD, ScheduleFreeAdamW
from cosmati.train.assembly import ScheduledOptimizer, Turn
from cosmati.train.averaging import averaged, averaged_weights
from cosmati.train.config import RunConfig
from cosmati.train.observers import History
from cosmati.train.observers.progress import ProgressBar
from cosmati.train.prepare import Ingredients, Prepared, prepare
from cosmati.train.recalibration import recalibration_passes
from tests.train.hand_made import outcome

BUDGET = Budget(Time.parse("8ba"))


class Falling:
    """From 1 to 0 over the run."""

    def multiplier(self, fraction_elapsed: float, budget: Budget) -> float:
        assert budget is BUDGET
        return 1 - fraction_elapsed


@dataclass(frozen=True, kw_only=True)
class Halves(Method):
    """Gives half of what is scheduled at the run's start, and adds where it stands."""

    stage: ClassVar[Stage] = Stage.AVERAGE

    def learning_rate(self, scheduled: Callable[[float], float], elapsed: float, budget: Budget) -> float:
        return scheduled(0.0) / 2 + elapsed


def _optimizer(schedule: Any, method: Method | None = None) -> tuple[ScheduledOptimizer, list[nn.Parameter]]:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 3.0}]
    return ScheduledOptimizer(
        torch.optim.SGD(groups, lr=1.0), schedule, (1.0, 3.0), frozenset({0, 1, 2}), method
    ), weights


@pytest.mark.parametrize(
    ("schedule", "method", "rates"),
    # At step 2 of 8; the user's own rates were set to 7.
    [(None, None, [7.0, 7.0]), (Falling(), None, [0.75, 2.25]), (Falling(), Halves(), [0.75, 1.75])],
)
def test_rates_are_set_for_the_step_that_starts(schedule: Any, method: Method | None, rates: list[float]) -> None:
    scheduled, weights = _optimizer(schedule, method)
    for group in scheduled.optimizer.param_groups:
        group["lr"] = 7.0
    for weight in (weights[0], weights[2]):
        weight.grad = torch.ones(1)
    for _ in range(2):
        scheduled.step(Clock(step=2), BUDGET)
        assert [group["lr"] for group in scheduled.optimizer.param_groups] == rates
    assert [weight.item() for weight in weights] == [-rates[0], 0.0, -rates[1]]
    assert all(weight.grad is None for weight in weights)


def test_a_turn_steps_all_of_its_optimizers_at_the_clock() -> None:
    one, first = _optimizer(Falling())
    two, second = _optimizer(None)
    turn = Turn("both", Regression(), {4: "a", 7: "b"}, (one, two))
    for weight in (*first, *second):
        weight.grad = torch.ones(1)
    turn.step(Clock(step=4), BUDGET)
    assert [weight.item() for weight in (*first, *second)] == [-0.5, -0.5, -1.5, -1.0, -1.0, -3.0]
    assert turn.indices == {4, 7}
    assert turn.learning(frozenset({"b", "c"})) == {4}


def test_progress_is_a_line_for_each_tenth_of_the_run() -> None:
    text = io.StringIO()
    bar = ProgressBar("fitting", file=text)
    bar.on_end(Clock(), "completed")  # before its start: nothing to close
    bar.on_start(Clock(step=10), Budget(Time.parse("20ba")))
    for step in (10, 11, 12):
        bar.on_step(outcome(step - 1, loss=0.25))
    bar.on_end(Clock(step=20), "completed")
    lines = text.getvalue().splitlines()
    assert [line[:40].rstrip() for line in lines] == [
        "fitting:  50%  step 10  loss 0.2500",
        "fitting:  60%  step 12  loss 0.2500, 0:0",
    ]
    assert (bar.every, ProgressBar(every=3).every) == (10, 3)


def test_a_history_keeps_what_it_is_told() -> None:
    history = History()
    history.on_step(outcome(4, loss=0.5))
    history.on_evaluation(Clock(step=5), {"a": 1.0}, 2.5)
    assert history.losses == [(5, 0.5)]
    assert history.evaluations == [(Clock(step=5), 2.5, {"a": 1.0})]
    assert history.every == 1


# ----------------------------------------------------------------------------------------------------------- averages


@dataclass(frozen=True, kw_only=True)
class Keeps(Method):
    """Ships its state from a step on."""

    since: int
    stage: ClassVar[Stage] = Stage.AVERAGE

    def init(self, weights: Pieces) -> State:
        return {"0.weight": torch.full_like(weights.tensors["0.weight"], float(self.since))}

    def evaluation_weights(self, state: State, at: Position) -> State | None:
        return state if at.clock.step >= self.since else None


ROWS = torch.randn(32, 3, generator=torch.Generator().manual_seed(2)), torch.zeros(32, 1)


def _loss(model: nn.Module, data: Data) -> Tensor:
    return Regression()(model, data).mean()


def _prepared(optimizer: Any, methods: Any = (), loss: Any = _loss, **config: Any) -> Prepared:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
    settings = RunConfig(**{"budget": "4ba", "num_threads": 1, "num_microbatches": 2} | config)
    return prepare(Ingredients(model, loss, InMemory(ROWS, 8), [optimizer], methods, None, None, settings))


def _at(ready: Prepared, step: int) -> Position:
    a = ready.assembly
    return Position(Clock(step=step), a.budget, 0, 0, a.model, a.turns[0].loss)


def test_the_first_method_that_ships_averages_does() -> None:
    ready = _prepared(SGD(lr=0.1), [Keeps(since=3), Keeps(since=2)])
    states = {i: method.init(ready.assembly.layout.weights()) for i, method in enumerate(ready.assembly.plan.methods)}
    found = [averaged_weights(ready.assembly, states, _at(ready, step)) for step in (1, 2, 3)]
    assert found[0] is None
    assert [None if one is None else float(one["0.weight"][0, 0]) for one in found[1:]] == [2.0, 3.0]


def test_optimizers_ship_their_own_averages_by_name() -> None:
    ready = _prepared(ScheduleFreeAdamW(lr=0.1))
    a = ready.assembly
    for parameter in a.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    a.turns[0].step(Clock(), a.budget)
    found = averaged_weights(a, {}, _at(ready, 1))
    assert found is not None
    own = {id(p): value for p, value in a.optimizers[0].optimizer.evaluation_weights().items()}
    assert set(found) == {name for name, _ in a.model.named_parameters()}
    assert all(torch.equal(found[name], own[id(parameter)]) for name, parameter in a.model.named_parameters())


def test_averages_stand_in_for_a_while_with_statistics_of_their_own() -> None:
    ready = _prepared(SGD(lr=0.1))
    a, before = ready.assembly, {n: v.clone() for n, v in ready.assembly.model.state_dict().items()}
    weights = {"0.weight": torch.full((2, 3), 2.0)}
    drawn = torch.get_rng_state()
    with averaged(a, weights, ready.feed) as model:
        assert model is a.model
        assert torch.equal(model[0].weight, weights["0.weight"])
        statistics = model[1].running_mean.clone()
        assert int(model[1].num_batches_tracked) == 16, "8 steps of 2 microbatches"
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in a.model.state_dict().items())
    assert ready.feed is not None
    microbatches = [batch.data[0] for step in range(8) for batch in ready.feed.again(step)]
    means = [nn.functional.linear(rows, weights["0.weight"], before["0.bias"]).mean(0) for rows in microbatches]
    torch.testing.assert_close(statistics, torch.stack(means).mean(0))
    with averaged(a, weights, None) as model:
        assert torch.equal(model[1].running_mean, before["1.running_mean"]), "no data to read again"
    with averaged(a, None, ready.feed) as model:
        assert torch.equal(model[0].weight, before["0.weight"])
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_recalibration_draws_by_position_in_the_precision_of_the_run() -> None:
    seen: list[tuple[float, torch.dtype]] = []

    def loss(model: nn.Module, data: Data) -> Tensor:
        seen.append((float(torch.rand(())), model[0](data[0]).dtype))
        return model(data[0]).sum()

    ready = _prepared(SGD(lr=0.1), loss=loss, seed=5, precision="bfloat16")
    for forward in recalibration_passes(ready.assembly, ready.feed):
        forward()
    keys = [position_key(5, "recalibrate", step, index) for step in range(8) for index in range(2)]
    expected = [torch.rand((), generator=torch.Generator().manual_seed(key)).item() for key in keys]
    assert seen == [(value, torch.bfloat16) for value in expected]
    assert list(recalibration_passes(ready.assembly, None)) == []
