"""Ghost batch normalisation: statistics of small parts of the batch (Dimitriou and Arandjelovic, arXiv 2007.08554)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cosmati.core.method import Method, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.surgery import warn_unchanged

__all__ = ["GhostBatchNorm", "GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d", "apply_ghost_batchnorm"]

_not_compiled = cast("Callable[[Callable[..., Any]], Callable[..., Any]]", torch.compiler.disable)
"""Compiled in a block, the parts' gradient is wrong by orders of magnitude (torch 2.13, CPU); a test would see it."""


class _GhostBatchNorm(_BatchNorm):
    """Normalises the rows of a microbatch in parts ("ghosts") of at most `ghost_batch_size`, as even as possible.

    A ghost has two values for each channel at least, which may make it larger. The running statistics move once for
    each forward pass, to the ghosts' means and unbiased variances, averaged over rows. A batch that's one ghost, and
    every batch in evaluation, is normalised as by the native layer, bit for bit.
    """

    ghost_batch_size: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the input [rows, channels, ...], normalised."""
        if isinstance(input, torch.fx.Proxy):
            return self._traced(input)
        num_ghosts = self._num_ghosts(input) if self.training else 1
        if num_ghosts == 1:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch's own
        normalised: Tensor = _not_compiled(self._in_parts)(input, num_ghosts)
        return normalised

    def _traced(self, input: Tensor) -> Tensor:
        """Let torch.fx write evaluation down: the native layer asks for dimensions, which only a run knows."""
        if self.training:
            msg = (
                "torch.fx can't write down how many ghosts a batch has. Trace the model in evaluation mode "
                "(model.eval()), where there are none."
            )
            raise BatchError(msg)
        by_batch = self.running_mean is None
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, by_batch, 0.0, self.eps)

    def _in_parts(self, input: Tensor, num_ghosts: int) -> Tensor:
        ghosts = input.tensor_split(num_ghosts)
        if self.running_mean is not None:
            self._move(ghosts, self.running_mean.dtype)
        outputs = [F.batch_norm(ghost, None, None, self.weight, self.bias, True, 0.0, self.eps) for ghost in ghosts]  # noqa: FBT003
        return torch.cat(outputs)

    def _num_ghosts(self, input: Tensor) -> int:
        rows = len(input)
        num_ghosts = max(1, -(-rows // self.ghost_batch_size))
        positions = input.shape[2:].numel()
        return max(1, rows // 2) if positions == 1 and rows // num_ghosts < 2 else num_ghosts

    @torch.no_grad()
    def _move(self, ghosts: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Move the running statistics, with the native formula, to the ghosts' own, averaged over rows."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        num_rows = sum(len(ghost) for ghost in ghosts)
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        for ghost in ghosts:
            values = ghost.detach().to(dtype).transpose(0, 1).flatten(1)
            own_variance, own_mean = torch.var_mean(values, dim=1)
            mean.add_(own_mean, alpha=len(ghost) / num_rows)
            variance.add_(own_variance, alpha=len(ghost) / num_rows)
        self.num_batches_tracked.add_(1)
        factor = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_((1 - factor) * running + factor * value)

    def extra_repr(self) -> str:
        """Show the ghosts' size after the native options."""
        native: str = super().extra_repr()  # type: ignore[no-untyped-call]  # torch's own
        return f"{native}, ghost_batch_size={self.ghost_batch_size}"


class GhostBatchNorm1d(_GhostBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with ghosts."""


class GhostBatchNorm2d(_GhostBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with ghosts."""


class GhostBatchNorm3d(_GhostBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with ghosts."""


_KINDS: dict[type[nn.Module], type[_GhostBatchNorm]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


def apply_ghost_batchnorm(
    model: nn.Module,
    ghost_batch_size: int = 32,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,  # noqa: ARG001
) -> nn.Module:
    """Let every `nn.BatchNorm1d`, `2d` and `3d` normalise small parts of the microbatch, in place.

    Layers stay the same objects with the same parameters, statistics, hooks and names. Subclasses are left alone,
    since their function isn't known; so is `nn.SyncBatchNorm`, which is made for larger batches. Layers that are
    ghosts already take the new size.

    Args:
        model: the model; the root itself may be a layer.
        ghost_batch_size: most rows of a part, >= 1.
        optimizers: needs no change; taken so that calls of the functional interface fit.

    Returns:
        The same model.

    Raises:
        PlanError: the size isn't positive.

    Warns:
        UserWarning: the model has no BatchNorm.
    """
    _check(ghost_batch_size)
    changed = False
    for module in model.modules():
        if type(module) in _KINDS:
            module.__class__ = _KINDS[type(module)]
        if isinstance(module, _GhostBatchNorm):
            module.ghost_batch_size = ghost_batch_size
            changed = True
    if not changed:
        msg = f"GhostBatchNorm changes nothing: {type(model).__name__} has no BatchNorm1d, 2d or 3d. Leave it out."
        warn_unchanged(msg, model, *_KINDS)
    return model


@dataclass(frozen=True, kw_only=True)
class GhostBatchNorm(Method):
    """Normalise small parts of each microbatch: the noise of small batches in large ones.

    A microbatch is one part where it's no larger than that: nothing changes then.

    Args:
        ghost_batch_size: most rows of a part, >= 1.
    """

    stage: ClassVar[Stage] = Stage.REPLACE

    ghost_batch_size: int = 32

    def __post_init__(self) -> None:
        """Check the size."""
        _check(self.ghost_batch_size)

    def apply(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
        """Return the model with ghosts."""
        return apply_ghost_batchnorm(model, self.ghost_batch_size, optimizers)


def _check(ghost_batch_size: int) -> None:
    if not ghost_batch_size >= 1:
        msg = f"ghost_batch_size={ghost_batch_size} holds no row. Give the most rows of a ghost, 1 at least."
        raise PlanError(msg)
