"""SGD with a weight decay of its own, which no learning rate multiplies (Loshchilov and Hutter, 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.optimizers import Named, Optimizer, parameter_groups
from cosmati.optim.stepping import GroupedOptimizer, Params


class DecoupledMomentum(GroupedOptimizer):
    """SGDW's step: `m <- momentum m + g`, then `w <- (1 - s decay) w - lr m`, where s is what the schedule gives.

    s is the learning rate over the one that the optimizer was built with. So the decay follows the schedule, as the
    paper has it, and not the learning rate that is searched for. A parameter whose gradient is None is left alone
    whole. The state is one tensor for each parameter, its shape; none without momentum.

    Args:
        params: parameters or groups.
        lr: learning rate, and what s is in proportion to; with 0, s is 1.
        momentum: in [0, 1).
        nesterov: look ahead by one step of the momentum.
        weight_decay: share of a weight that a step takes off, before s.

    Raises:
        PlanError: an option out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        _check(lr, momentum, weight_decay)
        options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, options)

    def check_group(self, group: dict[str, Any]) -> None:
        """Note the rate where the schedule is at 1."""
        group.setdefault("full_lr", group["lr"])

    def steps_elements(self, group: dict[str, Any]) -> bool:
        """Say that each element is stepped by itself."""
        return True

    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a group that have a gradient."""
        steps = list(gradients)
        if group["momentum"]:
            for parameter in present:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            momenta = [self.state[p]["momentum_buffer"] for p in present]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, steps)
            if group["nesterov"]:
                momenta = list(torch._foreach_add(steps, momenta, alpha=group["momentum"]))  # noqa: SLF001
            steps = momenta
        if group["weight_decay"]:
            share = group["lr"] / group["full_lr"] if group["full_lr"] else 1.0
            torch._foreach_mul_(list(present), 1 - share * group["weight_decay"])
        torch._foreach_add_(list(present), steps, alpha=-group["lr"])


@dataclass(frozen=True, kw_only=True)
class SGDW(Optimizer):
    """SGD with decoupled weight decay: a share of each weight, times the schedule and not times the learning rate.

    Composer's `DecoupledSGDW`. `AdamW`'s decay is times the learning rate: `weight_decay=w` here has the strength that
    `weight_decay=w / lr` has there.

    Args:
        momentum: in [0, 1).
        nesterov: look ahead by one step of the momentum.
        weight_decay: share of a weight that a step takes off where the schedule is at 1, in [0, 1); about lr times what
            SGD takes.
        decay_vectors: decay biases, norms and other parameters of less than two dimensions too.

    Raises:
        PlanError: an option out of range.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_vectors: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _check(self.lr, self.momentum, self.weight_decay)

    def build(self, named_parameters: Named) -> DecoupledMomentum:
        """Return the optimizer over some parameters."""
        groups = parameter_groups(named_parameters, self.weight_decay, decay_vectors=self.decay_vectors)
        return DecoupledMomentum(groups, self.lr, self.momentum, self.nesterov)


def _check(lr: float, momentum: float, weight_decay: float) -> None:
    if not (lr >= 0 and 0 <= momentum < 1 and 0 <= weight_decay < 1):
        msg = (
            f"SGDW can't use lr={lr}, momentum={momentum}, weight_decay={weight_decay}. Use lr >= 0, and the others in "
            "[0, 1): weight_decay is the share of a weight that a step takes off, lr times that of SGD or AdamW."
        )
        raise PlanError(msg)
