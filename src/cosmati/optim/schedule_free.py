"""Schedule-free AdamW: an average of the iterates in the place of a decay (Defazio et al., 2024, arXiv 2405.15682)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.optimizers import Named, Optimizer, parameter_groups
from cosmati.optim.stepping import Betas, GroupedOptimizer, Params, check_options


class ScheduleFree(GroupedOptimizer):
    """Schedule-free AdamW, counted for each parameter by itself.

    Parameters hold y, where gradients are taken. z makes AdamW's steps without momentum, x is the weighted mean of the
    z's, and y lies between: `y = (1 - beta1) z + beta1 x`. What is evaluated and shipped is x. A step weighs the
    largest learning rate so far to the power `weight_lr_power`, so a warm-up counts for little.

    The authors' library counts steps for a whole group, so a parameter that was absent for a while would count as if
    it had stood still; here it doesn't count. The state is z and the squared gradients, of the parameter's shape, and
    three numbers. It is float32 at least: a share of 1/t is soon less than a low precision's rounding. Such a
    parameter is y rounded, and y itself is in the state.

    Args:
        params: parameters or groups.
        lr: learning rate; one to ten times AdamW's with a decay.
        betas: share of x in y, in (0, 1), and decay of the average of the squared gradient.
        eps: added to the denominator.
        weight_decay: at y, times the learning rate.
        weight_lr_power: of the learning rate in a step's weight.

    Raises:
        PlanError: an option out of range.
    """

    numbers: ClassVar[tuple[str, ...]] = ("step", "weight_sum", "lr_max")

    def __init__(
        self,
        params: Params,
        lr: float = 2.5e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        _check(betas, lr=lr, eps=eps, weight_decay=weight_decay, weight_lr_power=weight_lr_power)
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "weight_lr_power": weight_lr_power,
        }
        super().__init__(params, options)

    def steps_elements(self, group: dict[str, Any]) -> bool:
        """Say that each element is stepped by itself."""
        return True

    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a group that have a gradient."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for parameter, low in zip(present, gradients, strict=True):
            state = self.state[parameter]
            if not state:
                state |= _new_state(parameter)
            y, z = state.get("y", parameter), state["z"]
            gradient = low.to(y.dtype)
            state["step"] += 1
            state["lr_max"] = state["lr_max"].clamp(min=lr)
            weight = float(state["lr_max"]) ** group["weight_lr_power"]
            state["weight_sum"] += weight
            total = float(state["weight_sum"])
            share = weight / total if total else 0.0
            state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2 ** int(state["step"]))).sqrt_().add_(group["eps"])
            direction = gradient / root
            if group["weight_decay"]:
                direction = direction.add_(y, alpha=group["weight_decay"])
            # x moves to z by its share, z a step on, and y stays between them.
            y.lerp_(z, share).add_(direction, alpha=lr * (beta1 * (1 - share) - 1))
            z.sub_(direction, alpha=lr)
            if y is not parameter:
                parameter.copy_(y)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in its own types; that of float32 parameters serves narrower ones too."""
        super().load_state_dict(state_dict)
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            state = self.state.get(parameter)
            if state and "y" not in state and state["z"].dtype != parameter.dtype:
                state["y"] = parameter.detach().to(state["z"].dtype)

    @torch.no_grad()
    def evaluation_weights(self) -> dict[Tensor, Tensor]:
        """Return x for each parameter that has been stepped, float32 at least."""
        return {
            parameter: state.get("y", parameter).lerp(state["z"], 1 - 1 / group["betas"][0])
            for group in self.param_groups
            for parameter in group["params"]
            if (state := self.state.get(parameter))
        }


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamW(Optimizer):
    """Schedule-free AdamW: give it a constant schedule with warm-up. Evaluation uses its average.

    `with trainer.averaged() as model` gives the weights to ship; the model itself holds those that gradients are taken
    at.

    Args:
        betas: share of the average where gradients are taken, in (0, 1), and decay of the squared gradient's average.
        eps: added to the denominator.
        weight_decay: times the learning rate.
        decay_vectors: decay biases, norms and other parameters of less than two dimensions too.
        weight_lr_power: of the learning rate in a step's weight in the average.
    """

    owns: ClassVar[frozenset[str]] = frozenset({"evaluation weights"})

    betas: Betas = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_vectors: bool = True
    weight_lr_power: float = 2.0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _check(self.betas, eps=self.eps, weight_decay=self.weight_decay, weight_lr_power=self.weight_lr_power)

    def build(self, named_parameters: Named) -> ScheduleFree:
        """Return the optimizer over some parameters."""
        return ScheduleFree(
            parameter_groups(named_parameters, self.weight_decay, decay_vectors=self.decay_vectors),
            self.lr,
            self.betas,
            self.eps,
            weight_lr_power=self.weight_lr_power,
        )


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    wide = parameter.to(dtype, copy=True)
    return {
        "z": wide,
        "exp_avg_sq": torch.zeros_like(wide),
        **({} if dtype == parameter.dtype else {"y": wide.clone()}),
        **{name: torch.tensor(0.0, dtype=torch.float64) for name in ScheduleFree.numbers},
    }


def _check(betas: Betas, **at_least_zero: float) -> None:
    check_options("ScheduleFreeAdamW", betas, **at_least_zero)
    if not betas[0] > 0:
        msg = f"ScheduleFreeAdamW can't use betas={betas}: at 0 nothing is averaged. Use a first one inside (0, 1)."
        raise PlanError(msg)
