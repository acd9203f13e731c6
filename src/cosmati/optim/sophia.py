"""Sophia: momentum over a diagonal of the curvature, clipped (Liu et al., 2023, arXiv 2305.14342)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.optimizers import Named, Optimizer, parameter_groups
from cosmati.optim.stepping import Betas, GroupedOptimizer, Params, check_options, held_epsilon


class ClippedCurvature(GroupedOptimizer):
    """Sophia's step: `w <- (1 - lr decay) w - lr clip(m / max(gamma h, eps), 1)`, entry by entry.

    The paper's Gauss-Newton-Bartlett estimate of h is the number of labels times the squared gradient of labels that
    are sampled from the model. A training step has the gradient of the true labels only, and this takes that one: the
    empirical Fisher diagonal, which agrees where the model fits its data. A loop that can afford the paper's estimate
    gives it to `update_curvature`, with `update_interval=0`.

    The state is three tensors for each parameter: momentum and curvature of its shape, and a counter.

    Args:
        params: parameters or groups.
        lr: learning rate; near AdamW's or somewhat less.
        betas: decay of the averages of gradient and curvature.
        gamma: larger clips less; chosen so that a tenth to a half of the entries are clipped.
        num_labels: how many labels a step's mean gradient is over: its rows, or its tokens.
        update_interval: steps between two estimates of the curvature; 0 leaves them to `update_curvature`.
        eps: smallest denominator, > 0.
        weight_decay: decoupled, times the learning rate.

    Raises:
        PlanError: an option out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: Betas = (0.96, 0.99),
        gamma: float = 0.04,
        num_labels: int = 1,
        update_interval: int = 10,
        eps: float = 1e-12,
        weight_decay: float = 0.1,
    ) -> None:
        _check(betas, gamma, num_labels, update_interval, eps, lr=lr, weight_decay=weight_decay)
        options = {
            "lr": lr,
            "betas": betas,
            "gamma": gamma,
            "num_labels": num_labels,
            "update_interval": update_interval,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, options)

    @torch.no_grad()
    def update_curvature(self, estimates: Mapping[Tensor, Tensor]) -> None:
        """Take estimates of the Hessian's diagonal, by parameter, into the running average.

        The paper's is the number of labels times the square of the mean loss's gradient, of labels that are sampled
        from the model's own output, every few steps and before the step.

        Raises:
            PlanError: one is of a parameter that isn't this optimizer's, or not of its shape; then none is taken.
        """
        betas = {parameter: group["betas"] for group in self.param_groups for parameter in group["params"]}
        wrong = [tuple(e.shape) for p, e in estimates.items() if p not in betas or e.shape != p.shape]
        if wrong:
            msg = (
                f"{len(wrong)} estimate(s) fit no parameter of this optimizer (shapes {wrong[:5]}). Give one of the "
                "parameter's own shape for each parameter that it steps, and none for those of other optimizers."
            )
            raise PlanError(msg)
        for parameter, estimate in estimates.items():
            self._state_of(parameter)["curvature"].lerp_(estimate.to(parameter.dtype), 1 - betas[parameter][1])

    def steps_elements(self, group: dict[str, Any]) -> bool:
        """Say that each element is stepped by itself."""
        return True

    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a group that have a gradient."""
        states = [self._state_of(parameter) for parameter in present]
        momenta = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(momenta, list(gradients), 1 - group["betas"][0])
        interval = group["update_interval"]
        for state, gradient in zip(states, gradients, strict=True):
            if interval and int(state["step"]) % interval == 0:
                state["curvature"].lerp_(gradient.square() * group["num_labels"], 1 - group["betas"][1])
            state["step"] += 1
        if group["weight_decay"]:
            torch._foreach_mul_(list(present), 1 - group["lr"] * group["weight_decay"])
        for parameter, state in zip(present, states, strict=True):
            curvature = (group["gamma"] * state["curvature"]).clamp_(min=held_epsilon(group["eps"], parameter.dtype))
            parameter.add_((state["momentum_buffer"] / curvature).clamp_(-1, 1), alpha=-group["lr"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["momentum_buffer"], state["curvature"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


@dataclass(frozen=True, kw_only=True)
class Sophia(Optimizer):
    """Sophia, with the curvature estimated from the true labels (see `ClippedCurvature`).

    Args:
        num_labels: how many labels a step's mean gradient is over: its rows, or its tokens.
        betas: decay of the averages of gradient and curvature.
        gamma: larger clips less; chosen so that a tenth to a half of the entries are clipped.
        update_interval: steps between two estimates of the curvature; 0 leaves them to `update_curvature` of what is
            built.
        eps: smallest denominator, > 0.
        weight_decay: decoupled, times the learning rate.
        decay_vectors: decay biases, norms and other parameters of less than two dimensions too.
    """

    num_labels: int
    betas: Betas = (0.96, 0.99)
    gamma: float = 0.04
    update_interval: int = 10
    eps: float = 1e-12
    weight_decay: float = 0.1
    decay_vectors: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _check(self.betas, self.gamma, self.num_labels, self.update_interval, self.eps, weight_decay=self.weight_decay)

    def build(self, named_parameters: Named) -> ClippedCurvature:
        """Return the optimizer over some parameters."""
        return ClippedCurvature(
            parameter_groups(named_parameters, self.weight_decay, decay_vectors=self.decay_vectors),
            self.lr,
            self.betas,
            self.gamma,
            self.num_labels,
            self.update_interval,
            self.eps,
        )


def _check(
    betas: Betas, gamma: float, num_labels: int, update_interval: int, eps: float, **at_least_zero: float
) -> None:
    check_options("Sophia", betas, **at_least_zero)
    if not (gamma > 0 and eps > 0 and num_labels >= 1 and update_interval >= 0):
        msg = (
            f"Sophia can't use gamma={gamma}, eps={eps}, num_labels={num_labels}, update_interval={update_interval}. "
            "Use gamma > 0, eps > 0, at least one label, and an interval >= 0."
        )
        raise PlanError(msg)
