"""Selective backprop: gradients of the rows that still have a loss (Jiang et al., 2019, arXiv 1910.00762)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.batch import Batch
from cosmati.core.clock import Budget
from cosmati.core.loss import Loss
from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.building_blocks.target_maps import refuse_target_map

__all__ = ["SelectiveBackprop", "select_using_loss", "should_selective_backprop"]

_INTERPOLATION = {3: "linear", 4: "bilinear", 5: "trilinear"}


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Say whether a step selects rows.

    Args:
        current_duration: fraction of the run that has passed, in [0, 1].
        batch_idx: index of the step within the epoch, from 0.
        start: fraction of the run from which on rows are selected.
        end: fraction of the run from which on they aren't any more.
        interrupt: every so many steps one keeps all its rows; 0 interrupts never.
    """
    return start <= current_duration < end and (interrupt == 0 or (batch_idx + 1) % interrupt != 0)


def select_using_loss(
    input: Tensor,
    target: Tensor,
    model: Callable[[Tensor], Tensor],
    loss_fun: Callable[..., Tensor],
    keep: float = 0.5,
    scale_factor: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep a fixed share of the rows, preferring those of a high loss.

    A row whose loss is at percentile p of the batch is drawn with a probability in proportion to
    `p ** (1 / keep - 1)`, without replacement.

    Args:
        input: [rows, ...].
        target: [rows, ...].
        model: scores the rows without gradient, in the mode (training or evaluation) that it's in.
        loss_fun: `loss_fun(output, target, reduction="none")`, losses [rows, ...].
        keep: share of the rows, in (0, 1]; the number is rounded, and at least 1.
        scale_factor: spatial scale of the input that is scored, in (0, 1]; what is kept has full size.
        generator: of the CPU; None is PyTorch's default generator.

    Returns:
        Kept input and target, in the order that they had.

    Raises:
        BatchError: keep, scale_factor or the input's shape is out of range, or the losses aren't per row.
    """
    if not 0 < keep <= 1:
        msg = f"keep={keep} is not a share of the rows. Give a number above 0, up to 1."
        raise BatchError(msg)
    with torch.no_grad():
        losses = loss_fun(model(_scaled(input, scale_factor)), target, reduction="none")
    if losses.ndim == 0 or losses.shape[0] != input.shape[0]:
        msg = f"Losses {tuple(losses.shape)} of {input.shape[0]} rows: the loss function must honour reduction='none'."
        raise BatchError(msg)
    draws = torch.rand(input.shape[0], dtype=torch.float64, generator=generator)
    indices = _choose(losses.float().flatten(1).mean(1) if losses.ndim > 1 else losses, draws, keep)
    return input[indices], target[indices]


@dataclass(frozen=True, kw_only=True)
class SelectiveBackprop(Method):
    """Score all rows of a microbatch, and train on a fixed share of them: smaller, not only weighted.

    Rows are drawn as `select_using_loss` says, with draws that belong to the rows. A tombstone is chosen only
    when there aren't enough other rows.

    The scores are those of the model in evaluation mode: BatchNorm uses and keeps its running statistics,
    dropout draws nothing, and a row's score doesn't depend on its neighbours. (Composer scores in training
    mode, which counts every selected row twice in the running statistics.) The row ids are kept on the host,
    so the choice costs one synchronisation with the device in each selecting step.

    Args:
        start: fraction of the run from which on rows are selected.
        end: fraction of the run from which on they aren't any more.
        keep: share of the rows, in (0, 1]; 1 is off.
        scale_factor: spatial scale of the input that is scored, in (0, 1].
        interrupt: every so many steps one keeps all its rows; 0 interrupts never.
    """

    stage: ClassVar[Stage] = Stage.SELECT

    start: float = 0.5
    end: float = 0.9
    keep: float = 0.5
    scale_factor: float = 1.0
    interrupt: int = 2

    def __post_init__(self) -> None:
        """Check the shares and the interval."""
        if not 0 < self.keep <= 1 or not 0 < self.scale_factor <= 1:
            msg = f"keep={self.keep} and scale_factor={self.scale_factor} must be shares: above 0, up to 1."
            raise PlanError(msg)
        if not 0 <= self.start <= self.end <= 1 or not self.interrupt >= 0:
            msg = (
                f"start={self.start}, end={self.end}, interrupt={self.interrupt} is no interval of a run. "
                "Give fractions with start <= end, and a number of steps >= 0."
            )
            raise PlanError(msg)

    @property
    def couples(self) -> frozenset[Coupling]:
        """Rows: which ones are kept depends on the others' losses."""
        return frozenset({"rows"} if self.keep < 1 else ())

    def shapes(self, budget: Budget) -> int:
        """Return 2: all rows, and the share. The budget doesn't matter."""
        return 1 if self.keep == 1 else 2

    def batch(self, batch: Batch, at: Position) -> Batch:
        """Return the batch with a share of its rows, their order and ids kept."""
        if self.keep == 1 or not should_selective_backprop(
            at.elapsed, at.clock.step_in_epoch, self.start, self.end, self.interrupt
        ):
            return batch
        draws = at.row_uniform("selective_backprop", batch)[:, 0]
        return batch.select(_choose(self._score(batch, at), draws, self.keep, batch.present))

    def _score(self, batch: Batch, at: Position) -> Tensor:
        data = batch.data
        if self.scale_factor != 1:
            refuse_target_map(batch, "SelectiveBackprop scores smaller images", "Give scale_factor=1.")
            data = batch.replace(input=_scaled(batch.input, self.scale_factor)).data
        with torch.no_grad(), _evaluating(at.model):
            loss = at.loss(at.model, data)
        if not isinstance(loss, Loss) or loss.per_row is None:
            msg = (
                "SelectiveBackprop chooses among rows, and the loss doesn't tell them apart. Return "
                "Loss(sum, weight, per_row=...)."
            )
            raise PlanError(msg)
        if loss.per_row_weight is None:
            return loss.per_row
        return torch.where(loss.per_row_weight > 0, loss.per_row / loss.per_row_weight, 0.0)


def _choose(losses: Tensor, draws: Tensor, keep: float, present: Tensor | None = None) -> Tensor:
    """Return the indices of the rows to keep, ascending, on the losses' device.

    The largest of log-weight plus Gumbel noise are a sample without replacement in proportion to the weights
    (Gumbel top-k; Efraimidis and Spirakis, 2006): a fixed number of rows, without a loop over them.
    """
    num_rows = len(losses)
    num_kept = max(1, int(keep * num_rows + 0.5))
    losses, noise = losses.double(), -torch.log(-torch.log(draws)).to(losses.device, non_blocking=True)
    num_absent = 0
    if present is not None:
        num_absent = int((~present).sum())
        present = present.to(losses.device, non_blocking=True)
        losses = losses.where(present, -torch.inf)
    rank = torch.argsort(torch.argsort(losses, stable=True))
    percentile = (rank - num_absent + 0.5).clamp(min=0.5) / max(1, num_rows - num_absent)
    score = (1 / keep - 1) * torch.log(percentile) + noise
    if present is not None:
        score = score.where(present, -torch.inf)
    return torch.argsort(score, descending=True, stable=True)[:num_kept].sort().values


def _scaled(input: Tensor, scale_factor: float) -> Tensor:
    if scale_factor == 1:
        return input
    if not 0 < scale_factor < 1 or not isinstance(input, Tensor) or input.ndim not in _INTERPOLATION:
        found = f"{input.ndim}-D" if isinstance(input, Tensor) else type(input).__name__
        msg = (
            f"Can't scale a {found} input by scale_factor={scale_factor}. Give a factor above 0, up to 1, "
            "and inputs [rows, channels, ...] of one to three spatial dimensions."
        )
        raise BatchError(msg)
    return F.interpolate(input, scale_factor=scale_factor, mode=_INTERPOLATION[input.ndim], align_corners=False)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and each module back in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
