"""Lion: steps along the sign of the momentum (Chen et al., 2023, arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmati.core.later import later
from cosmati.optim.optimizers import Named, Optimizer, parameter_groups
from cosmati.optim.stepping import Betas, GroupedOptimizer, Params, check_options
from cosmati.optim.weights import decay_where_agreed, more_options


class SignMomentum(GroupedOptimizer):
    """Lion's step: `w <- (1 - lr decay) w - lr sign(b1 m + (1 - b1) g)`, then `m <- b2 m + (1 - b2) g`.

    A parameter whose gradient is None is left alone whole. The state is one tensor for each parameter, its shape.

    Args:
        params: parameters or groups.
        lr: learning rate; a third to a tenth of AdamW's.
        betas: share of the momentum in the step's direction, and in the next momentum.
        weight_decay: decoupled, times the learning rate; three to ten times AdamW's.
        cautious: decay only where step and weight have the same sign (2510.12402).

    Raises:
        PlanError: an option out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        cautious: bool = False,
    ) -> None:
        check_options("Lion", betas, lr=lr, weight_decay=weight_decay)
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, options | more_options(cautious=cautious, hyperball=False))

    def steps_elements(self, group: dict[str, Any]) -> bool:
        """Say that each element is stepped by itself."""
        return True

    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a group that have a gradient."""
        for parameter in present:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [self.state[p]["momentum_buffer"] for p in present]
        direction = torch._foreach_lerp(momenta, list(gradients), 1 - group["betas"][0])  # noqa: SLF001
        torch._foreach_sign_(direction)
        torch._foreach_lerp_(momenta, list(gradients), 1 - group["betas"][1])
        if group["weight_decay"] and group.get("cautious"):
            for parameter, sign in zip(present, direction, strict=True):
                decay_where_agreed(parameter, sign, group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            torch._foreach_mul_(list(present), 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(list(present), direction, alpha=-group["lr"])


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion: half of AdamW's state, and every weight moves by the learning rate.

    Args:
        betas: share of the momentum in the step's direction, and in the next momentum.
        weight_decay: decoupled, times the learning rate.
        decay_vectors: decay biases, norms and other parameters of less than two dimensions too.
        cautious: decay only where step and weight have the same sign (2510.12402).
    """

    betas: Betas = (0.9, 0.99)
    weight_decay: float = 0.0
    decay_vectors: bool = True
    cautious: bool = later(default=False)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_options("Lion", self.betas, weight_decay=self.weight_decay)

    def build(self, named_parameters: Named) -> SignMomentum:
        """Return the optimizer over some parameters."""
        groups = parameter_groups(named_parameters, self.weight_decay, decay_vectors=self.decay_vectors)
        return SignMomentum(groups, self.lr, self.betas, cautious=self.cautious)
