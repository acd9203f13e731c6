"""Optimizers step and clear gradients, turns share optimizers out, and the model stays what was planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, Regression
from cosmati.core.method import Method, Stage
from cosmati.errors import PlanError
from cosmati.train.assembly import Assembly, ScheduledOptimizer, SubStep, Turn, resolve_turns
from cosmati.train.layout.layout import Parameter

BUDGET = Budget(Time.parse("8ba"))
NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")


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
        assert budget is BUDGET
        return scheduled(0.0) / 2 + elapsed


def optimizer(
    schedule: Any = None, method: Method | None = None, kind: type[torch.optim.Optimizer] = torch.optim.SGD
) -> tuple[ScheduledOptimizer, list[nn.Parameter]]:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    made = kind([{"params": weights[:2]}, {"params": weights[2:], "lr": 4.0}], lr=2.0)  # type: ignore[call-arg]
    return ScheduledOptimizer(made, schedule, (2.0, 4.0), frozenset({0, 1, 2}), method), weights


def test_rates_are_the_base_rates_times_the_schedule_or_what_a_method_makes_of_it() -> None:
    clock = Clock(step=2)
    for schedule, method, multiplier, rates in (
        (None, None, 1.0, [2.0, 4.0]),
        (None, Halves(), 1.0, [2.0, 4.0]),
        (Falling(), None, 0.75, [1.5, 3.0]),
        (Falling(), Halves(), 0.75, [1.25, 2.25]),
    ):
        scheduled, _ = optimizer(schedule, method)
        assert scheduled.multiplier(clock, BUDGET) == multiplier
        assert scheduled.rates(clock, BUDGET) == rates
        assert [group["lr"] for group in scheduled.optimizer.param_groups] == [2.0, 4.0], "asking sets nothing"


@pytest.mark.parametrize(("schedule", "rates"), [(None, [9.0, 9.0]), (Falling(), [1.0, 2.0])])
def test_a_step_sets_the_rates_takes_it_and_clears_all_gradients(schedule: Any, rates: list[float]) -> None:
    scheduled, weights = optimizer(schedule)
    for group in scheduled.optimizer.param_groups:
        group["lr"] = 9.0
    for weight in (weights[0], weights[2]):
        weight.grad = torch.ones(1)
    scheduled.step(Clock(step=4), BUDGET)
    assert [group["lr"] for group in scheduled.optimizer.param_groups] == rates
    assert [weight.item() for weight in weights] == [-rates[0], 0.0, -rates[1]]
    assert all(weight.grad is None for weight in weights)


@pytest.mark.parametrize("change", ["add", "remove"])
def test_other_groups_than_were_planned_are_refused_before_anything_moves(change: str) -> None:
    scheduled, weights = optimizer(Falling())
    if change == "add":
        scheduled.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    else:
        del scheduled.optimizer.param_groups[1]
    weights[0].grad = torch.ones(1)
    with pytest.raises(PlanError, match=r"^SGD has another parameter group.*RunConfig\(load_weights=\.\.\.\)\.$"):
        scheduled.step(Clock(step=4), BUDGET)
    assert weights[0].item() == 0
    assert weights[0].grad is not None
    assert scheduled.optimizer.param_groups[0]["lr"] == 2.0


def test_a_turn_steps_its_optimizers_in_their_order() -> None:
    stepped: list[tuple[str, object, object]] = []
    both: Any = tuple(
        SimpleNamespace(step=lambda clock, budget, name=name: stepped.append((name, clock, budget))) for name in "ab"
    )
    turn = Turn("both", Regression(), {7: "x", 4: "y", 5: "z"}, both)
    assert turn.step(Clock(step=3), BUDGET) is None
    assert stepped == [("a", Clock(step=3), BUDGET), ("b", Clock(step=3), BUDGET)]
    assert turn.every == 1
    assert turn.indices == {4, 5, 7}
    assert turn.learning(frozenset()) == {4, 5, 7}
    assert turn.learning(frozenset({"x", "other"})) == {4, 5}
    assert turn.learning(frozenset({"other"})) == {4, 5, 7}
    assert turn.learning(frozenset("xyz")) == frozenset()


# ------------------------------------------------------------------------------------------------------- sub-steps


def over(*indices: int, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> ScheduledOptimizer:
    made = kind([nn.Parameter(torch.zeros(1)) for _ in indices], lr=1.0)  # type: ignore[call-arg]
    return ScheduledOptimizer(made, None, (1.0,), frozenset(indices))


def test_a_loss_alone_is_one_turn_of_every_step_over_all_optimizers() -> None:
    loss, first, second = Regression(), over(2, 0), over(1)
    (turn,) = resolve_turns(loss, NAMES, [first, second])
    assert (turn.name, turn.every) == ("step", 1)
    assert turn.loss is loss
    assert turn.optimizers == (first, second)
    # By index, whatever the order in which optimizers hold them; what no optimizer holds doesn't learn.
    assert list(turn.parameters.items()) == [(0, "body.weight"), (1, "body.bias"), (2, "head.weight")]


def test_sub_steps_take_the_optimizers_that_lie_within_their_glob_in_their_order() -> None:
    losses = Regression(), Classification(2)
    body, bias, head = over(0), over(1), over(2, 3)
    sub_steps = [SubStep("critic", losses[0], "head.*", every=1), SubStep("made", losses[1], "body.*", every=3)]
    critic, made = resolve_turns(sub_steps, NAMES, [body, head, bias])
    assert (critic.name, critic.loss, critic.optimizers, critic.every) == ("critic", losses[0], (head,), 1)
    assert (made.name, made.loss, made.optimizers, made.every) == ("made", losses[1], (body, bias), 3)
    assert (critic.parameters, made.parameters) == (
        {2: "head.weight", 3: "head.bias"},
        {0: "body.weight", 1: "body.bias"},
    )
    defaults = SubStep("all", losses[0])
    assert (defaults.parameters, defaults.every) == ("*", 1)


def test_a_glob_heeds_upper_and_lower_case() -> None:
    with pytest.raises(PlanError, match=r"lie within sub-step 'a' \('BODY\.\*'\)"):
        resolve_turns([SubStep("a", Regression(), "BODY.*")], NAMES, [over(0)])


def test_the_first_sub_step_takes_an_optimizer_that_several_would() -> None:
    mine, other = over(0), over(1)
    with pytest.raises(PlanError, match=r"sub-step 'second' \('\*'\)"):
        resolve_turns([SubStep("first", Regression()), SubStep("second", Regression())], NAMES, [mine, other])


@pytest.mark.parametrize(("every", "is_fine"), [((1, 5), True), ((2, 3), False), ((1, 0), False), ((1, -1), False)])
def test_one_sub_step_acts_in_every_step_and_none_less_often_than_never(every: tuple[int, int], is_fine: bool) -> None:
    given = [SubStep(name, Regression(), f"{name}.*", one) for name, one in zip(("body", "head"), every, strict=True)]
    if is_fine:
        assert [turn.every for turn in resolve_turns(given, NAMES, [over(0), over(2)])] == list(every)
        return
    with pytest.raises(PlanError, match=r"^Give SubStep\.every as 1 or more, and one sub-step at least"):
        resolve_turns(given, NAMES, [over(0), over(2)])


def test_optimizers_that_no_sub_step_takes_are_counted() -> None:
    given = [SubStep("body", Regression(), "body.*"), SubStep("head", Regression(), "head.*")]
    with pytest.raises(PlanError, match=r"^2 optimizer\(s\) have parameters of several sub-steps"):
        resolve_turns(given, NAMES, [over(0), over(1, 2), over(0, 3), over(2)])


def test_two_optimizers_over_one_parameter_are_refused_where_they_act_in_one_turn() -> None:
    names = [f"p{i}" for i in range(9)]
    given = [over(8, 6, 0, 1, 2, 3, 4), over(7), over(5, 6, 4, 3, 2, 1, 0, kind=torch.optim.Adam)]
    with pytest.raises(
        PlanError, match=r"^6 parameter\(s\) are in two optimizers, SGD and Adam, of one step: (.*?)\."
    ) as told:
        resolve_turns(Regression(), names, given)
    assert "of one step: p0, p1, p2, p3, p4. Each steps" in str(told.value)
    with pytest.raises(PlanError, match=r"^1 parameter\(s\) are in two optimizers, Adam and SGD, of one step: p3\."):
        resolve_turns(Regression(), names, [over(1), over(3, kind=torch.optim.Adam), over(3, 4)])
    sub_steps = [SubStep("head", Regression(), "head.*"), SubStep("body", Regression(), "body.*")]
    with pytest.raises(PlanError, match=r"^1 parameter\(s\) are in two optimizers"):
        resolve_turns(sub_steps, NAMES, [over(2), over(0), over(0, 1)])


# ---------------------------------------------------------------------------------------------------------- the plan


class Planned:
    """A model of three layers, the last of which is frozen, and an assembly of it with an optimizer for each other."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        self.model[2].weight.requires_grad_(False)
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.parameters = tuple(Parameter(i, name, 0, p) for i, (name, p) in enumerate(trained))
        self.held = list(trained)
        self.optimizers = [self.over(torch.optim.SGD, 0, 1), self.over(torch.optim.Adam, 2)]
        layout: Any = SimpleNamespace(parameters=self.parameters, pieces=lambda: self.held)
        turns = tuple(Turn(f"turn {i}", Regression(), {}, (one,)) for i, one in enumerate(self.optimizers))
        given: dict[str, Any] = {field.name: None for field in dataclasses.fields(Assembly)}
        self.assembly = Assembly(**(given | {"model": self.model, "layout": layout, "turns": turns}))

    def over(self, kind: type[torch.optim.Optimizer], *indices: int) -> ScheduledOptimizer:
        made = kind([self.parameters[index].tensor for index in indices], lr=1.0)  # type: ignore[call-arg]
        return ScheduledOptimizer(made, None, (1.0,), frozenset(indices))

    def told(self) -> str:
        with pytest.raises(PlanError, match=r"Regions, optimizers and promises rest on the plan") as error:
            self.assembly.check_unchanged()
        return str(error.value).removeprefix("The model isn't what was planned: ").partition(". Regions,")[0]


def test_optimizers_are_all_of_them_in_the_order_of_their_turns() -> None:
    planned = Planned()
    first, second = planned.optimizers
    turns = (Turn("b", Regression(), {}, (second, first)), Turn("a", Regression(), {}, (first,)))
    assert dataclasses.replace(planned.assembly, turns=turns).optimizers == (second, first, first)


def test_a_model_as_planned_is_left_alone() -> None:
    planned = Planned()
    planned.model.register_buffer("more", torch.ones(1))
    assert planned.assembly.check_unchanged() is None


def test_what_was_thawed_frozen_added_removed_or_exchanged_is_told_by_name() -> None:
    planned = Planned()
    planned.model[2].weight.requires_grad_(True)
    assert planned.told() == "2.weight trains now, and didn't"
    planned.model[2].weight.requires_grad_(False)
    planned.model[0].bias.requires_grad_(False)
    assert planned.told() == "0.bias trained, and doesn't now"
    planned.model[0].bias = None
    assert planned.told() == "0.bias trained, and doesn't now"
    planned.model[0].bias = nn.Parameter(torch.ones(1))
    assert planned.told() == "0.bias is another tensor"
    planned.model[0].bias = planned.parameters[1].tensor.requires_grad_(True)
    planned.model.append(nn.Linear(1, 1, bias=False))
    assert planned.told() == "3.weight trains now, and didn't"


def test_what_an_optimizer_no_longer_holds_is_told_where_this_rank_has_it() -> None:
    planned = Planned()
    planned.optimizers[1].optimizer.param_groups[0]["params"].clear()
    assert planned.told() == "1.weight is no longer in Adam"
    planned.optimizers[0].optimizer.param_groups.clear()
    assert planned.told() == "0.bias is no longer in SGD; 0.weight is no longer in SGD; 1.weight is no longer in Adam"
    planned.held.pop(2)  # Another rank's optimizer steps it.
    assert planned.told() == "0.bias is no longer in SGD; 0.weight is no longer in SGD"


def test_a_piece_stands_for_its_parameter_in_an_optimizer() -> None:
    planned = Planned()
    piece = nn.Parameter(torch.ones(1))
    planned.held[2] = ("1.weight", piece)
    assert planned.told() == "1.weight is no longer in Adam"
    planned.optimizers[1].optimizer.param_groups[0]["params"][:] = [piece]
    assert planned.assembly.check_unchanged() is None


def test_five_changes_are_told_at_most_in_their_order() -> None:
    planned = Planned()
    planned.model.extend([nn.Linear(1, 1, bias=False) for _ in range(7)])
    told: Sequence[str] = planned.told().split("; ")
    assert told == [f"{index}.weight trains now, and didn't" for index in range(3, 8)]
