"""The parts of a run after setup, all frozen: what the step works with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import nn

from cosmati.core.clock import Budget, Clock
from cosmati.core.loss import LossFunction
from cosmati.core.method import Method
from cosmati.core.plan import Plan
from cosmati.core.rng import DefaultGenerators
from cosmati.core.source import ImageSize
from cosmati.errors import PlanError
from cosmati.optim.schedules import Schedule
from cosmati.routing.policy import CompiledPolicy
from cosmati.routing.regions import Regions
from cosmati.train.bare_calls import step_of
from cosmati.train.buffers import BatchNormStatistics
from cosmati.train.config import RunConfig
from cosmati.train.deferred_rows import DeferredRows
from cosmati.train.layout.layout import Layout
from cosmati.train.ranks import Ranks
from cosmati.train.routes import Router


@dataclass(frozen=True)
class SubStep:
    """One of several losses that take turns within a step, each with a commit of its own (a GAN's two, say).

    Args:
        name: for the record.
        loss: the loss function.
        parameters: glob over the names that learn from it.
        every: it acts in each step whose number this divides (n critic steps to one of the generator).
    """

    name: str
    loss: LossFunction
    parameters: str = "*"
    every: int = 1


@dataclass(frozen=True)
class ScheduledOptimizer:
    """An optimizer and the schedule of its learning rates.

    Attributes:
        optimizer: built over the model's parameters.
        schedule: multiplies `base_rates`; None leaves the rates to the user.
        base_rates: learning rate of each parameter group before the schedule.
        parameters: indices of its parameters.
        method: changes what the schedule gives; None is the usual case.
    """

    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    base_rates: tuple[float, ...]
    parameters: frozenset[int]
    method: Method | None = None

    def step(self, clock: Clock, budget: Budget) -> None:
        """Set the learning rates for the step that starts at the clock, and take it.

        Raises:
            PlanError: a parameter group was added after the plan.
        """
        if len(self.optimizer.param_groups) != len(self.base_rates):
            msg = (
                f"{type(self.optimizer).__name__} has another parameter group than it was planned with. Give all "
                "groups before the Trainer is made, or go on in a new Trainer: RunConfig(load_weights=...)."
            )
            raise PlanError(msg)
        if self.schedule is not None:
            for group, rate in zip(self.optimizer.param_groups, self.rates(clock, budget), strict=True):
                group["lr"] = rate
        step_of(self.optimizer)()
        # As zero_grad does, without its profiling scope: 8 us less.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def multiplier(self, clock: Clock, budget: Budget) -> float:
        """Return what the schedule multiplies rates by in the step that starts at the clock."""
        return 1.0 if self.schedule is None else self.schedule.multiplier(budget.elapsed(clock), budget)

    def rates(self, clock: Clock, budget: Budget) -> list[float]:
        """Return each group's learning rate in the step that starts at the clock."""
        if self.schedule is not None and self.method is not None:
            return [self._changed(rate, clock, budget) for rate in self.base_rates]
        multiplier = self.multiplier(clock, budget)
        return [rate * multiplier for rate in self.base_rates]

    def _changed(self, rate: float, clock: Clock, budget: Budget) -> float:
        assert self.schedule is not None, "checked by setup"
        assert self.method is not None, "asked for"
        multiplier = self.schedule.multiplier
        elapsed = budget.elapsed(clock)
        return self.method.learning_rate(lambda fraction: rate * multiplier(fraction, budget), elapsed, budget)


@dataclass(frozen=True)
class Turn:
    """A sub-step resolved: its loss, the parameters that learn, the optimizers that commit.

    Attributes:
        parameters: name of each parameter that its optimizers hold, by index.
        every: it acts in each step whose number this divides.
    """

    name: str
    loss: LossFunction
    parameters: Mapping[int, str]
    optimizers: tuple[ScheduledOptimizer, ...]
    every: int = 1

    @cached_property
    def indices(self) -> frozenset[int]:
        """Indices of the parameters that its optimizers hold."""
        return frozenset(self.parameters)

    def learning(self, frozen: frozenset[str]) -> frozenset[int]:
        """Return the indices of the parameters that learn where some are frozen."""
        if not frozen:
            return self.indices
        return frozenset(index for index, name in self.parameters.items() if name not in frozen)

    def step(self, clock: Clock, budget: Budget) -> None:
        """Step the optimizers, and clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.step(clock, budget)


@dataclass(frozen=True)
class Assembly:
    """Everything a step needs.

    Attributes:
        model: after surgery.
        layout: of its parameters.
        regions: the partition.
        policy: compiled; None trains every region on every row.
        turns: sub-steps, in order.
        statistics: of the model's BatchNorm layers.
        deferred_rows: that a loop of the user's own has given while their class was deferred.
        image_size: full size of the images, where their decoder gives them in the size of the step.
    """

    model: nn.Module
    layout: Layout
    regions: Regions
    policy: CompiledPolicy | None
    router: Router
    turns: tuple[Turn, ...]
    plan: Plan
    config: RunConfig
    budget: Budget
    num_microbatches: int
    ranks: Ranks
    generators: DefaultGenerators
    statistics: BatchNormStatistics
    device: torch.device
    deferred_rows: DeferredRows
    image_size: ImageSize | None = None

    @property
    def optimizers(self) -> tuple[ScheduledOptimizer, ...]:
        """All optimizers, in the order of their turns."""
        return tuple(optimizer for turn in self.turns for optimizer in turn.optimizers)

    def check_unchanged(self) -> None:
        """Compare the model with the plan: what was added since would never learn, or without a route.

        Raises:
            PlanError: a parameter was thawed, frozen, added or exchanged.
        """
        now = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        planned = {p.name: p.tensor for p in self.layout.parameters}
        found = [f"{name} trains now, and didn't" for name in now.keys() - planned.keys()]
        found += [f"{name} trained, and doesn't now" for name in planned.keys() - now.keys()]
        found += [f"{name} is another tensor" for name in now.keys() & planned.keys() if now[name] is not planned[name]]
        pieces = {name: id(piece) for name, piece in self.layout.pieces()}
        for scheduled in self.optimizers:
            held = {id(p) for group in scheduled.optimizer.param_groups for p in group["params"]}
            own = {self.layout.parameters[index] for index in scheduled.parameters}
            found += [
                f"{p.name} is no longer in {type(scheduled.optimizer).__name__}"
                for p in own
                if p.name in pieces and pieces[p.name] not in held
            ]
        if found:
            msg = (
                f"The model isn't what was planned: {'; '.join(sorted(found)[:5])}. Regions, optimizers and promises "
                "rest on the plan. Change the model before the Trainer is made, freeze with LayerFreezing, or go on in "
                "a new Trainer: RunConfig(load_weights=...)."
            )
            raise PlanError(msg)


def resolve_turns(
    loss: LossFunction | Sequence[SubStep], names: Sequence[str], optimizers: Sequence[ScheduledOptimizer]
) -> tuple[Turn, ...]:
    """Give each sub-step its parameters and optimizers.

    Raises:
        PlanError: an optimizer whose parameters aren't all of one sub-step, or a sub-step without an optimizer or with
            two over one parameter.
    """
    sub_steps = [SubStep("step", loss)] if callable(loss) else list(loss)
    turns: list[Turn] = []
    left = list(optimizers)
    if all(sub_step.every != 1 for sub_step in sub_steps) or any(sub_step.every < 1 for sub_step in sub_steps):
        msg = "Give SubStep.every as 1 or more, and one sub-step at least that acts in every step (every=1)."
        raise PlanError(msg)
    for sub_step in sub_steps:
        chosen = frozenset(i for i, name in enumerate(names) if fnmatchcase(name, sub_step.parameters))
        own = tuple(optimizer for optimizer in left if optimizer.parameters <= chosen)
        left = [optimizer for optimizer in left if optimizer not in own]
        if not own:
            msg = (
                f"No optimizer's parameters lie within sub-step {sub_step.name!r} ({sub_step.parameters!r}). Give one "
                f"optimizer for each sub-step, with parameters={sub_step.parameters!r}."
            )
            raise PlanError(msg)
        held = sorted(frozenset[int]().union(*(optimizer.parameters for optimizer in own)))
        turns.append(Turn(sub_step.name, sub_step.loss, {index: names[index] for index in held}, own, sub_step.every))
    if left:
        msg = (
            f"{len(left)} optimizer(s) have parameters of several sub-steps. Give each sub-step an "
            "optimizer of its own."
        )
        raise PlanError(msg)
    for turn in turns:
        _refuse_shared(turn.optimizers, names)
    return tuple(turns)


def _refuse_shared(optimizers: Sequence[ScheduledOptimizer], names: Sequence[str]) -> None:
    """Refuse two optimizers over one parameter: each clears its gradients, so the second would never move it.

    Raises:
        PlanError: a parameter is in two.
    """
    held: dict[int, ScheduledOptimizer] = {}
    for one in optimizers:
        shared = [index for index in sorted(one.parameters) if index in held]
        if shared:
            first, second = type(held[shared[0]].optimizer).__name__, type(one.optimizer).__name__
            found = ", ".join(names[index] for index in shared[:5])
            msg = (
                f"{len(shared)} parameter(s) are in two optimizers, {first} and {second}, of one step: {found}. Each "
                "steps on its own gradients and clears them. Give each parameter to one optimizer (leave these out of "
                "one of the two), or take turns: a SubStep for each loss, with an optimizer of its own."
            )
            raise PlanError(msg)
        held |= dict.fromkeys(one.parameters, one)
