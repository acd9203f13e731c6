"""What the optimizers of this room that PyTorch doesn't have share: checks of options, and the loop over groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.sharing import Sharing

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
Betas = tuple[float, float]


class GroupedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps one parameter group after the other.

    A parameter whose gradient is None is left alone whole: weights, state and decay. State is tensors only.

    Attributes:
        sharing: with whom work on whole matrices is shared; alone unless a trainer says otherwise.

    Class attributes:
        numbers: names of state that is on CPU, where reading it waits for no accelerator.
    """

    sharing: Sharing = Sharing()
    numbers: ClassVar[tuple[str, ...]] = ("step",)

    def __init__(self, params: Params, options: dict[str, Any]) -> None:
        super().__init__(cast("Any", params), options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take on a group, as at the beginning.

        Raises:
            PlanError: it can't be stepped; the others stay.
        """
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except PlanError:
            self.param_groups.pop()
            raise

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse a group that can't be stepped; note what it begins with."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            if present:
                self.step_group(group, present, [cast("Tensor", p.grad) for p in present])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in its own types, from which the next bits follow; PyTorch brings it to the parameters'."""
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, own, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                device = torch.device("cpu") if name in self.numbers else parameter.device
                self.state[parameter][name] = value.to(device, copy=True)

    def evaluation_weights(self) -> dict[Tensor, Tensor]:
        """Return what to evaluate and ship in place of parameters; empty where these are it themselves."""
        return {}

    def steps_elements(self, group: dict[str, Any]) -> bool:
        """Say whether a group's parameters are stepped element by element, so that ranks may each step a part."""
        return False

    def kept_together(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Return those of a group's parameters whose bits follow from being stepped together."""
        return []

    @abstractmethod
    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a group that have a gradient."""


def check_options(name: str, betas: Sequence[float], **at_least_zero: float) -> None:
    """Check that averages' decays are in [0, 1), and other options >= 0.

    Raises:
        PlanError: one isn't.
    """
    if not (all(0 <= beta < 1 for beta in betas) and all(value >= 0 for value in at_least_zero.values())):
        options: Mapping[str, object] = {"betas": tuple(betas), **at_least_zero}
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        msg = f"{name} can't use {given}. Use betas in [0, 1), and {', '.join(at_least_zero)} >= 0."
        raise PlanError(msg)


def held_epsilon(eps: float, dtype: torch.dtype) -> float:
    """Return an epsilon that a type holds: where it would round one > 0 to 0, the smallest number that it has.

    float16 ends at 6e-8, and a gradient of 0 over an epsilon of 1e-8 would be 0 / 0.
    """
    limits = torch.finfo(dtype)
    return max(eps, limits.smallest_normal * limits.eps) if eps else eps
