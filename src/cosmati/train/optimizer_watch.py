"""Sees what others do to optimizers in mid-run, and what optimizers keep that no checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from cosmati.core.plan import Plan, Promise
from cosmati.errors import CheckpointError
from cosmati.train.assembly import ScheduledOptimizer
from cosmati.train.couplings import hooked
from cosmati.train.values import content_of


class OptimizerWatch:
    """Compares optimizers with what they were at the plan.

    Args:
        scheduled: all of them.
    """

    def __init__(self, scheduled: Sequence[ScheduledOptimizer]) -> None:
        self._scheduled = scheduled
        self._before = _beside_state(scheduled)

    def judged(self, plan: Plan) -> Plan:
        """Return the plan without the promises that are broken by now."""
        acted, lost = self._acted(), self._lost()
        for promise in (Promise.RESUME, Promise.REPLAYABLE):
            if plan.holds(promise) and (acted or lost):
                plan = plan.withdraw(promise, acted or lost)
        for guarantee in plan.guarantees if acted else ():
            if guarantee.promise is Promise.NO_DIRECT_WRITE and guarantee.holds:
                plan = plan.withdraw(guarantee.promise, acted, guarantee.pair)
        return plan

    def tensors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the tensors that optimizers keep for parameters, by name, as checkpoints have them."""
        return {
            f"optimizer/{index}/{name}/{key}": value
            for index, own in enumerate(self._scheduled)
            for name, parameter in parameters.items()
            for key, value in own.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def refuse_unsavable(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Refuse state that no checkpoint can hold: it comes with an optimizer's first step, and isn't known before.

        Raises:
            CheckpointError: the message names it.
        """
        sparse = [
            f"{name} ({value.layout})"
            for name, value in self.tensors(parameters).items()
            if value.layout is not torch.strided
        ]
        if sparse:
            msg = (
                f"No checkpoint can hold {', '.join(sparse[:5])}. Let gradients be dense (nn.Embedding(sparse=False)), "
                "use an optimizer that keeps nothing sparse (SGD without momentum, SparseAdam), or train without a "
                "run_folder."
            )
            raise CheckpointError(msg)

    def _acted(self) -> str:
        """Say who acts beside an optimizer: a rate may follow from any row's loss."""
        for own in self._scheduled:
            name = type(own.optimizer).__name__
            if does := hooked(own.optimizer):
                return f"{name} {does}"
            if _is_users(own.optimizer):
                continue  # It may set its rates by itself.
            rates = [float(group["lr"]) for group in own.optimizer.param_groups if "lr" in group]
            if own.schedule is None and rates != [float(rate) for rate in own.base_rates[: len(rates)]]:
                return f"the learning rate of {name} is changed from outside, by what no checkpoint holds"
        return ""

    def _lost(self) -> str:
        """Say what moves in optimizers beside their groups and state."""
        now = _beside_state(self._scheduled)
        moved = sorted({key[1] for key in now if key not in self._before or now[key] != self._before[key]})
        return f"{', '.join(moved)} isn't in a checkpoint: of an optimizer it holds groups and state" if moved else ""


@cache
def _of_every_optimizer() -> frozenset[str]:
    return frozenset((*vars(torch.optim.SGD([nn.Parameter(torch.zeros(()))])), "step"))


def _is_users(optimizer: torch.optim.Optimizer) -> bool:
    return not type(optimizer).__module__.startswith(("torch.optim", "cosmati."))


def _beside_state(scheduled: Sequence[ScheduledOptimizer]) -> dict[tuple[int, str], object]:
    """Return what optimizers of the user's own keep beside groups and state, and beside parameters that they move.

    By the optimizer's index, since several may be of one class, and the attribute's name in words.
    """
    found: dict[tuple[int, str], object] = {}
    optimizers = [own.optimizer for own in scheduled]
    moved = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    for index, optimizer in enumerate(optimizers):
        if _is_users(optimizer):
            name = type(optimizer).__name__
            found |= {
                (index, f"{name}.{key}"): content_of(value, moved)
                for key, value in vars(optimizer).items()
                if not (key in _of_every_optimizer() or id(value) in moved)
            }
    return found
