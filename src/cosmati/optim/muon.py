"""Muon: orthogonalized momentum (Jordan et al., 2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.sharing import Job
from cosmati.optim.stepping import GroupedOptimizer, Params
from cosmati.optim.weights import check_spheres, decay_where_agreed, more_options, radius_of, step_on_sphere

Scale = Literal["aspect", "rms"]
_QUINTIC = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7


def orthogonalize(matrices: Tensor, num_iterations: int = 5, *, bfloat16: bool = False) -> Tensor:
    """Bring the singular values of matrices close to 1, and keep their singular vectors.

    Each iteration is an odd quintic whose slope at 0 is as steep as it can be; after five, the singular
    values of a well-conditioned matrix lie between about 0.7 and 1.2.

    Args:
        matrices: [n, rows, columns]; a zero matrix stays zero.
        num_iterations: of Newton-Schulz.
        bfloat16: compute in bfloat16 on a CPU too.

    Returns:
        Same shape and type. Computed in float32 at least, in bfloat16 on an accelerator.
    """
    a, b, c = _QUINTIC
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    if bfloat16 or x.device.type != "cpu":
        x = x.bfloat16()
    elif x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    # The Frobenius norm bounds the spectral one.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPSILON)
    for _ in range(num_iterations):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


class OrthogonalizedMomentum(GroupedOptimizer):
    """Step along the orthogonalized momentum of each matrix, with decoupled weight decay.

    A parameter of more than two dimensions is a matrix [first dimension, all others]. One whose gradient is
    None is left alone whole: weights, momentum and decay. An empty one is taken, as PyTorch's optimizers take it.

    Args:
        params: parameters or groups, of two dimensions at least.
        lr: learning rate.
        momentum: decay of the gradients' running average, in [0, 1).
        nesterov: look ahead by one step of it.
        weight_decay: decoupled, times the learning rate.
        num_iterations: of Newton-Schulz.
        scale: `aspect` multiplies the update by sqrt(max(1, rows / columns)); `rms` by 0.2 sqrt(max(rows,
            columns)), about AdamW's root mean square, so that its learning rates can be used (2502.16982).
        bfloat16: work as an accelerator does on a CPU too: in bfloat16, all matrices of one shape together.
        cautious: decay only where update and weight have the same sign (2510.12402).
        hyperball: keep each matrix's Frobenius norm, instead of a decay (2606.16899). An update's length is then the
            learning rate times that norm, whatever the scale.

    Raises:
        PlanError: a vector or scalar, an option out of range, or what can't be kept on a sphere (`check_spheres`).
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        num_iterations: int = 5,
        scale: Scale = "aspect",
        bfloat16: bool = False,
        cautious: bool = False,
        hyperball: bool = False,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1 or weight_decay < 0 or num_iterations < 1 or scale not in get_args(Scale):
            msg = (
                f"Muon can't use lr={lr}, momentum={momentum}, weight_decay={weight_decay}, num_iterations="
                f"{num_iterations}, scale={scale!r}. Use lr >= 0, momentum in [0, 1), weight_decay >= 0, at "
                "least one iteration, and scale 'aspect' or 'rms'."
            )
            raise PlanError(msg)
        options = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "num_iterations": num_iterations,
            "scale": scale,
            "bfloat16": bfloat16,
        }
        super().__init__(params, options | more_options(cautious=cautious, hyperball=hyperball))

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse vectors, and what has no sphere to stay on."""
        vectors = [tuple(p.shape) for p in group["params"] if p.ndim < 2]
        if vectors:
            msg = (
                f"Muon orthogonalizes matrices, and {len(vectors)} parameter(s) have less than two "
                f"dimensions (shapes {vectors[:5]}). Give those to another optimizer: "
                "[Muon(lr=..., parameters=matrices), AdamW(lr=...)]."
            )
            raise PlanError(msg)
        check_spheres("Muon", group["params"], group)

    def kept_together(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Return the matrices that are orthogonalized together."""
        return _batches(group)

    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step the matrices of a group that have a gradient."""
        for parameter in present:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                if group.get("hyperball"):
                    self.state[parameter]["radius"] = radius_of(parameter)
        buffers = [self.state[p]["momentum_buffer"] for p in present]
        torch._foreach_lerp_(buffers, list(gradients), 1 - group["momentum"])
        ahead = torch._foreach_lerp(list(gradients), buffers, group["momentum"]) if group["nesterov"] else buffers  # noqa: SLF001
        directions = {id(p): d.flatten(1) for p, d in zip(present, ahead, strict=True)}
        is_cautious = bool(group["weight_decay"]) and group.get("cautious", False)
        if group["weight_decay"] and not is_cautious:
            torch._foreach_mul_(list(present), 1 - group["lr"] * group["weight_decay"])
        batches = [batch for batch in _batches(group) if any(id(p) in directions for p in batch)]
        jobs = [self._job(batch, directions, group) for batch in batches]
        for batch, updates in zip(batches, self.sharing.results(jobs), strict=True):
            for parameter, update in zip(batch, updates, strict=True):
                if id(parameter) in directions and parameter.numel():
                    if is_cautious:
                        rate = group["lr"] * group["weight_decay"]
                        decay_where_agreed(parameter, update.view_as(parameter), rate)
                    self.apply_update(parameter, update, group)

    def apply_update(self, parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        """Move a parameter along its orthogonalized direction [rows, columns]."""
        if group.get("hyperball"):
            step_on_sphere(parameter, update.view_as(parameter), self.state[parameter]["radius"], group["lr"])
            return
        scale = group["lr"] * _factor(group["scale"], *update.shape)
        parameter.add_(update.view_as(parameter), alpha=-scale)

    def orthogonalized(self, stack: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the directions of matrices [n, rows, columns]."""
        # A checkpoint from before there was the option brings groups without it.
        return orthogonalize(stack, group["num_iterations"], bfloat16=group.get("bfloat16", False))

    def _job(self, batch: Sequence[Tensor], directions: dict[int, Tensor], group: dict[str, Any]) -> Job:
        rows, columns = _matrix_shape(batch[0])
        found = [directions[id(p)] if id(p) in directions else p.new_zeros(rows, columns) for p in batch]
        cost = len(batch) * rows * columns * min(rows, columns)
        shape = (len(batch), rows, columns)
        return Job(cost, shape, found[0], lambda: self.orthogonalized(torch.stack(found), group))


def _batches(group: dict[str, Any]) -> list[list[Tensor]]:
    """Return which matrices are orthogonalized together.

    A matrix's bits must not depend on which others have a gradient. On CPU each is by itself: with 2 threads
    the bits of a batched product depend on the size of the batch, and a batch is hardly faster (24 of 64 x
    256: 4.7 ms for 5.0 one by one, 6 of 256 x 1024: 60 for 55; 1 thread). An accelerator batches all of one
    shape, absent ones as zeros; so does bfloat16 on a CPU that multiplies it, where a batch is faster (16 of
    128 x 128: 3.6 ms for 6.4 one by one, 8 of 128 x 512: 4.1 for 5.8, and 14.1 and 15.8 in float32).
    """
    parameters: list[Tensor] = group["params"]
    if parameters[0].device.type == "cpu" and not group.get("bfloat16"):
        return [[parameter] for parameter in parameters]
    shapes: dict[tuple[int, int], list[Tensor]] = {}
    for parameter in parameters:
        shapes.setdefault(_matrix_shape(parameter), []).append(parameter)
    return list(shapes.values())


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    return parameter.shape[0], math.prod(parameter.shape[1:])


def _factor(scale: Scale, rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns)) if scale == "aspect" else 0.2 * math.sqrt(max(rows, columns))
