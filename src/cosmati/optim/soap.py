"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., 2024, arXiv 2409.11321)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.optimizers import Named, Optimizer, parameter_groups
from cosmati.optim.sharing import Job
from cosmati.optim.stepping import Betas, GroupedOptimizer, Params, check_options

_SIDES = ("rows", "columns")


class EigenbasisAdam(GroupedOptimizer):
    """SOAP's step. A parameter of more than two dimensions is a matrix [first dimension, all others].

    Each side of a matrix has a running average of its Gram matrix and an orthogonal basis. The first step that
    a matrix has a gradient in only builds the bases: the gradient is diagonal in its own, so Adam would step
    along rounding errors. A basis is renewed by one step of power iteration and a QR decomposition. Sides
    longer than `max_precondition_dim`, and vectors, are Adam's. A parameter whose gradient is None is left
    alone whole.

    The state of a matrix [rows, columns] is two tensors of its shape, and two [side, side] for each side.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the averages of gradient and squared gradient.
        gram_beta: decay of the averages of the Gram matrices; None is `betas[1]`.
        eps: added to the denominator, > 0.
        weight_decay: decoupled, times the learning rate.
        precondition_frequency: steps between two renewals of the bases, >= 1.
        max_precondition_dim: longest side that gets a basis.

    Raises:
        PlanError: an option out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 3e-3,
        betas: Betas = (0.95, 0.95),
        gram_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10_000,
    ) -> None:
        gram_beta = betas[1] if gram_beta is None else gram_beta
        _check(betas, gram_beta, eps, precondition_frequency, lr=lr, weight_decay=weight_decay)
        options = {
            "lr": lr,
            "betas": betas,
            "gram_beta": gram_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precondition_dim": max_precondition_dim,
        }
        super().__init__(params, options)

    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a group that have a gradient."""
        due: list[tuple[dict[str, Tensor], str]] = []
        for parameter, gradient in zip(present, gradients, strict=True):
            state = self.state[parameter]
            matrix = _wide(gradient).flatten(1) if gradient.ndim >= 2 else _wide(gradient)
            is_new = not state
            if is_new:
                state |= _new_state(matrix, group)
            sides = [side for side in _SIDES if f"gram_{side}" in state]
            if not (is_new and sides):
                _step(parameter, matrix, state, group)
            if is_new or int(state["step"]) % group["precondition_frequency"] == 0:
                due += [(state, side) for side in sides]
        jobs = [_basis_job(state[f"gram_{side}"], state.get(f"basis_{side}")) for state, side in due]
        for (state, side), basis in zip(due, self.sharing.results(jobs), strict=True):
            state[f"basis_{side}"] = basis


@dataclass(frozen=True, kw_only=True)
class SOAP(Optimizer):
    """SOAP for matrices, Adam with decoupled weight decay for what isn't.

    Args:
        betas: decay of the averages of gradient and squared gradient.
        gram_beta: decay of the averages of the Gram matrices; None is `betas[1]`.
        eps: added to the denominator, > 0.
        weight_decay: decoupled, times the learning rate.
        decay_vectors: decay biases, norms and other parameters of less than two dimensions too.
        precondition_frequency: steps between two renewals of the bases, >= 1.
        max_precondition_dim: longest side that gets a basis.
    """

    betas: Betas = (0.95, 0.95)
    gram_beta: float | None = None
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_vectors: bool = True
    precondition_frequency: int = 10
    max_precondition_dim: int = 10_000

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        gram_beta = self.betas[1] if self.gram_beta is None else self.gram_beta
        _check(self.betas, gram_beta, self.eps, self.precondition_frequency, weight_decay=self.weight_decay)

    def build(self, named_parameters: Named) -> EigenbasisAdam:
        """Return the optimizer over some parameters."""
        return EigenbasisAdam(
            parameter_groups(named_parameters, self.weight_decay, decay_vectors=self.decay_vectors),
            self.lr,
            self.betas,
            self.gram_beta,
            self.eps,
            precondition_frequency=self.precondition_frequency,
            max_precondition_dim=self.max_precondition_dim,
        )


def _check(betas: Betas, gram_beta: float, eps: float, frequency: int, **at_least_zero: float) -> None:
    check_options("SOAP", (*betas, gram_beta), **at_least_zero)
    if not eps > 0 or frequency < 1:
        msg = (
            f"SOAP can't use eps={eps}, precondition_frequency={frequency}. Use eps > 0, and at least one step "
            "between two renewals of the bases."
        )
        raise PlanError(msg)


def _new_state(matrix: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    sides = [side for side in _SIDES if _has_basis(matrix, side, group["max_precondition_dim"])]
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(matrix),
        "exp_avg_sq": torch.zeros_like(matrix),
        **{f"gram_{side}": (1 - group["gram_beta"]) * _gram(matrix, side) for side in sides},
    }


def _basis_job(gram: Tensor, basis: Tensor | None) -> Job:
    """Return the work of making a basis, or renewing one by a step of power iteration."""

    def run() -> Tensor:
        renewed: Tensor = torch.linalg.eigh(gram).eigenvectors if basis is None else torch.linalg.qr(gram @ basis).Q
        return renewed

    return Job(float(gram.shape[0]) ** 3, tuple(gram.shape), gram, run)


def _step(parameter: Tensor, matrix: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
    first, second = group["betas"]
    state["step"] += 1
    num_steps = int(state["step"])
    projected = _rotated(matrix, state, back=False)
    state["exp_avg"].lerp_(matrix, 1 - first)
    state["exp_avg_sq"].lerp_(projected.square(), 1 - second)
    root = (state["exp_avg_sq"] / (1 - second**num_steps)).sqrt_().add_(group["eps"])
    update = _rotated(state["exp_avg"], state, back=False) / (1 - first**num_steps) / root
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(_rotated(update, state, back=True).view_as(parameter), alpha=-group["lr"])
    for side in _SIDES:
        if f"gram_{side}" in state:
            state[f"gram_{side}"].lerp_(_gram(matrix, side), 1 - group["gram_beta"])


def _rotated(matrix: Tensor, state: Mapping[str, Tensor], *, back: bool) -> Tensor:
    """Return a matrix in the bases, or one in the bases in the parameter's own coordinates."""
    if "basis_rows" in state:
        basis = state["basis_rows"]
        matrix = (basis if back else basis.mT) @ matrix
    if "basis_columns" in state:
        basis = state["basis_columns"]
        matrix = matrix @ (basis.mT if back else basis)
    return matrix


def _has_basis(matrix: Tensor, side: str, longest: int) -> bool:
    return matrix.ndim == 2 and 1 < matrix.shape[_SIDES.index(side)] <= longest


def _gram(matrix: Tensor, side: str) -> Tensor:
    return matrix @ matrix.mT if side == "rows" else matrix.mT @ matrix


def _wide(gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype is torch.float64 else gradient.float()
