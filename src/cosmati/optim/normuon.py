"""NorMuon: Muon whose rows are normalised by their own second moments (Li et al., 2025, arXiv 2510.05491)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmati.core.later import later
from cosmati.errors import PlanError
from cosmati.optim.muon import OrthogonalizedMomentum
from cosmati.optim.optimizers import Named, Optimizer, ParameterFilter, matrices
from cosmati.optim.stepping import Params, check_options, held_epsilon

_RMS = 0.2
"""Of the entries of an update at a learning rate of 1: about AdamW's, whose rates can be used."""


class RowNormalizedMuon(OrthogonalizedMomentum):
    """Divide each row of the orthogonalized momentum by the root of a running average of its mean square.

    The update is then scaled to a root mean square of 0.2 times the learning rate. The state of a matrix
    [rows, columns] is the momentum, of its shape, and the rows' second moments [rows, 1].

    Args:
        params: parameters or groups, of two dimensions at least.
        lr: learning rate.
        momentum: decay of the gradients' running average, in [0, 1).
        beta2: decay of the rows' second moments, in [0, 1).
        eps: added to their root, > 0.
        nesterov: look ahead by one step of the momentum.
        weight_decay: decoupled, times the learning rate.
        num_iterations: of Newton-Schulz.
        cautious: decay only where update and weight have the same sign (2510.12402).

    Raises:
        PlanError: a vector or scalar, or an option out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0.95,
        beta2: float = 0.95,
        eps: float = 1e-8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        num_iterations: int = 5,
        cautious: bool = False,
    ) -> None:
        _check(beta2, eps)
        super().__init__(params, lr, momentum, nesterov, weight_decay, num_iterations, cautious=cautious)
        for group in (self.defaults, *self.param_groups):
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)

    def apply_update(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        """Move a parameter along its orthogonalized direction [rows, columns], row by row as long on average."""
        state = self.state[parameter]
        if "row_moment" not in state:
            state["row_moment"] = update.new_zeros(update.shape[0], 1)
        moment = state["row_moment"].lerp_(update.square().mean(dim=1, keepdim=True), 1 - group["beta2"])
        eps = held_epsilon(group["eps"], update.dtype)
        normal = update / (moment.sqrt() + eps)
        norm = torch.linalg.vector_norm(normal).clamp(min=eps)
        parameter.add_((normal / norm).view_as(parameter), alpha=-group["lr"] * _RMS * math.sqrt(update.numel()))


@dataclass(frozen=True, kw_only=True)
class NorMuon(Optimizer):
    """NorMuon for hidden matrices; the rest needs another optimizer, after it in the list.

    Args:
        momentum: in [0, 1).
        beta2: decay of the rows' second moments, in [0, 1).
        eps: added to their root, > 0.
        nesterov: look ahead by one step of the momentum.
        weight_decay: decoupled, times the learning rate.
        num_iterations: of Newton-Schulz.
        cautious: decay only where update and weight have the same sign (2510.12402).
    """

    parameters: ParameterFilter = matrices
    momentum: float = 0.95
    beta2: float = 0.95
    eps: float = 1e-8
    nesterov: bool = True
    weight_decay: float = 0.0
    num_iterations: int = 5
    cautious: bool = later(default=False)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        _check(self.beta2, self.eps)

    def build(self, named_parameters: Named) -> RowNormalizedMuon:
        """Return the optimizer over some parameters."""
        return RowNormalizedMuon(
            [parameter for _, parameter in named_parameters],
            self.lr,
            self.momentum,
            self.beta2,
            self.eps,
            self.nesterov,
            self.weight_decay,
            self.num_iterations,
            self.cautious,
        )


def _check(beta2: float, eps: float) -> None:
    check_options("NorMuon", (beta2,))
    if not eps > 0:
        msg = f"NorMuon can't use eps={eps}. Use a number > 0: a row of zeros would be divided by zero."
        raise PlanError(msg)
