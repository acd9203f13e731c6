"""AdamW with what PyTorch's hasn't: decay where it agrees with the update, and matrices on spheres."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmati.optim.stepping import Betas, GroupedOptimizer, Params, check_options, held_epsilon
from cosmati.optim.weights import check_spheres, decay_where_agreed, more_options, radius_of, step_on_sphere


class BoundedAdamW(GroupedOptimizer):
    """AdamW (1711.05101) with cautious decay (2510.12402), or Adam on spheres (Hyperball, 2606.16899).

    A parameter whose gradient is None is left alone whole. The state is two tensors of a parameter's shape and the
    number of its steps; with `hyperball` its first norm too.

    Args:
        params: parameters or groups; with `hyperball` of two dimensions at least.
        lr: learning rate; with `hyperball` the length of an update as a share of the matrix's norm.
        betas: decay of the averages of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: decoupled, times the learning rate.
        cautious: decay only where update and weight have the same sign.
        hyperball: keep each matrix's Frobenius norm; instead of a decay.

    Raises:
        PlanError: an option out of range, or what can't be kept on a sphere (see `check_spheres`).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        cautious: bool = False,
        hyperball: bool = False,
    ) -> None:
        check_options("AdamW", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | more_options(cautious=cautious, hyperball=hyperball))

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse what has no sphere to stay on."""
        check_spheres("AdamW", group["params"], group)

    def steps_elements(self, group: dict[str, Any]) -> bool:
        """Say whether each element is stepped by itself: on a sphere it isn't."""
        return not group.get("hyperball")

    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a group that have a gradient."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        states = [self._state_of(parameter, group) for parameter in present]
        torch._foreach_lerp_([state["exp_avg"] for state in states], list(gradients), 1 - beta1)
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, list(gradients), list(gradients), value=1 - beta2)
        for parameter, state in zip(present, states, strict=True):
            state["step"] += 1
            num_steps = int(state["step"])
            eps = held_epsilon(group["eps"], parameter.dtype)
            root = (state["exp_avg_sq"] / (1 - beta2**num_steps)).sqrt_().add_(eps)
            update = state["exp_avg"] / (1 - beta1**num_steps) / root
            if group.get("hyperball"):
                step_on_sphere(parameter, update, state["radius"], lr)
                continue
            if group["weight_decay"] and group.get("cautious"):
                decay_where_agreed(parameter, update, lr * group["weight_decay"])
            elif group["weight_decay"]:
                parameter.mul_(1 - lr * group["weight_decay"])
            parameter.sub_(update, alpha=lr)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            if group.get("hyperball"):
                state["radius"] = radius_of(parameter)
        return state
