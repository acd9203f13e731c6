"""How fast a run is, and when it will end."""

from __future__ import annotations

import copy
import inspect
import math
from time import monotonic

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cosmati.core.batch import Data, count_rows_and_tokens
from cosmati.core.clock import Budget, Clock
from cosmati.core.loss import Loss, LossFunction, as_loss
from cosmati.core.rng import DefaultGenerators
from cosmati.errors import BatchError
from cosmati.train.observers.monitors.monitor import Measured, Monitor
from cosmati.train.outcome import StepOutcome


def flops_per_row(model: nn.Module, loss: LossFunction, data: Data) -> float:
    """Return the floating-point operations of a row's forward and backward pass, counted on a copy of the model.

    The batch is copied, too, and a loss with parameters, or the whole object of which the loss is a method: give a
    function that calls the method where that's too much, or can't be copied. PyTorch counts products of matrices,
    convolutions and attention; a multiplication with its addition is two.

    Args:
        model: as it trains.
        loss: likewise.
        data: a batch, on the model's device.

    Raises:
        BatchError: the batch has no rows, or the loss isn't one that can be trained on.
    """
    num_rows = count_rows_and_tokens(data)[0]
    if not num_rows:
        raise BatchError("flops_per_row() is given a batch without rows. Give one as it's trained on.")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    # Copied together: a loss may be a method of the model.
    is_copied = isinstance(loss, nn.Module) or inspect.ismethod(loss)
    own_model, own_data, own_loss = copy.deepcopy((model, data, loss if is_copied else None))
    with DefaultGenerators(device).restored(), torch.enable_grad(), FlopCounterMode(display=False) as counter:
        result = as_loss((own_loss or loss)(own_model, own_data))
        (result.mean() if isinstance(result, Loss) else result).backward()
    return float(counter.get_total_flops()) / num_rows


class Throughput(Monitor):
    """Steps, rows and tokens a second of training since the last measurement; FLOPs and MFU where they're known.

    Publishes `steps_per_second`, `rows_per_second`, `tokens_per_second` (where rows are sequences), `flops_per_second`
    and `model_flops_utilization`.

    Args:
        flops_per_row: of a forward and a backward pass: see `flops_per_row()`.
        peak_flops_per_second: of the devices together, at the precision of the run.

    Raises:
        ValueError: one of them isn't positive, or a peak without the FLOPs of a row.
    """

    def __init__(self, *, flops_per_row: float | None = None, peak_flops_per_second: float | None = None) -> None:
        wrong = [v for v in (flops_per_row, peak_flops_per_second) if v is not None and not 0 < v < math.inf]
        if wrong or (peak_flops_per_second is not None and flops_per_row is None):
            msg = (
                f"Throughput(flops_per_row={flops_per_row}, peak_flops_per_second={peak_flops_per_second}): both are "
                "positive and finite, and a utilization needs both. Count with flops_per_row(model, loss, batch)."
            )
            raise ValueError(msg)
        self._flops, self._peak = flops_per_row, peak_flops_per_second

    def start(self, clock: Clock, budget: Budget) -> None:
        """Count from here."""
        self._last = clock

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return the rates."""
        last, now = self._last, outcome.clock
        self._last = now
        seconds = now.seconds - last.seconds
        if seconds <= 0:
            return {}
        rows, tokens = (now.rows - last.rows) / seconds, (now.tokens - last.tokens) / seconds
        found = {"steps_per_second": (now.step - last.step) / seconds, "rows_per_second": rows}
        if tokens not in (0, rows):
            found["tokens_per_second"] = tokens
        if self._flops is not None:
            found["flops_per_second"] = rows * self._flops
            if self._peak is not None:
                found["model_flops_utilization"] = rows * self._flops / self._peak
        return found


class EstimatedEnd(Monitor):
    """How far the run is, from 0 to 1, and the seconds that are left at the pace since it was started.

    Publishes `progress` and `remaining_seconds`, by the wall clock: evaluations and checkpoints included.
    """

    def start(self, clock: Clock, budget: Budget) -> None:
        """Count from here."""
        self._budget, self._first, self._since = budget, budget.elapsed(clock), monotonic()

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return both."""
        done = self._budget.elapsed(outcome.clock)
        if done <= self._first:
            return {"progress": done}
        seconds = monotonic() - self._since
        return {"progress": done, "remaining_seconds": (1 - done) * seconds / (done - self._first)}
