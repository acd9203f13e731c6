"""Whether the loss is in good health."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cosmati.core.clock import Budget, Clock
from cosmati.train.observers.monitors.monitor import Measured, Monitor
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.outcome import StepOutcome

_FEWEST = 20
_SIGMA = 1.4826
"""Of a normal distribution, over its median absolute deviation."""


class LossHealth(Monitor):
    """Every step's loss, also between measurements: its mean since the last one, spikes, and what wasn't finite.

    A spike is a loss that is further above the median of those up to the last measurement than so many of their
    deviations (robust ones: 1.4826 times the median absolute deviation), and by a thousandth of the median at least.
    Publishes `loss_mean`, and counted since the run began `loss_spikes`, `losses_not_finite` and `steps_left_out`.

    Args:
        window: losses to compare with; it waits for 20.
        deviations: how far off a spike is.

    Raises:
        ValueError: the window is too short, or the deviations aren't positive.
    """

    def __init__(self, *, window: int = 100, deviations: float = 8.0) -> None:
        if window < _FEWEST or not 0 < deviations < math.inf:
            msg = f"LossHealth(window={window}, deviations={deviations}): at least {_FEWEST} losses, and more than 0."
            raise ValueError(msg)
        self._deviations = deviations
        self._window: deque[float] = deque(maxlen=window)
        self._copies = False
        self._forget()

    def _forget(self) -> None:
        self._window.clear()
        self._new: list[Tensor | float] = []
        self._counts = {"loss_spikes": 0, "losses_not_finite": 0, "steps_left_out": 0}

    def open(self, run: WatchedRun) -> None:
        """See where losses are."""
        self._copies = any(parameter.device.type != "cpu" for parameter in run.model.parameters())

    def start(self, clock: Clock, budget: Budget) -> None:
        """Begin anew with a run that begins: it may have watched another one."""
        if not clock.step:
            self._forget()

    def note(self, outcome: StepOutcome) -> None:
        """Keep the loss where it is."""
        if outcome.left_out:
            self._counts["steps_left_out"] += 1
        elif "loss" not in outcome.withheld:
            # A compiled graph may write the next step's loss into the same memory.
            self._new.append(outcome.loss.clone() if self._copies else outcome.loss)

    def measure(self, outcome: StepOutcome) -> Measured:
        """Return the new losses."""
        return {"losses": _stacked(self._new)} if self._new else {}

    def judge(self, found: Mapping[str, float | list[float]], outcome: StepOutcome) -> Mapping[str, float]:
        """Compare each with those before it."""
        losses, self._new = found.get("losses", []), []
        assert isinstance(losses, list), "of one dimension"
        kept, bound = [], self._bound()
        for loss in losses:
            if not math.isfinite(loss):
                self._counts["losses_not_finite"] += 1
                continue
            kept.append(loss)
            self._counts["loss_spikes"] += loss > bound
        self._window.extend(kept)
        mean = {"loss_mean": sum(kept) / len(kept)} if kept else {}
        return mean | {name: float(count) for name, count in self._counts.items()}

    def _bound(self) -> float:
        if len(self._window) < _FEWEST:
            return math.inf
        middle = median(self._window)
        deviation = _SIGMA * median(abs(value - middle) for value in self._window)
        return middle + max(self._deviations * deviation, 1e-3 * abs(middle))

    def state_dict(self) -> Mapping[str, Any]:
        """Return window, counts, and the losses that wait to be measured."""
        waiting = [float(one) for one in self._new]
        return {"window": list(self._window), "counts": dict(self._counts), "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""
        self._forget()
        self._window.extend(state["window"])
        self._counts, self._new = dict(state["counts"]), list(state["waiting"])


def _stacked(losses: list[Tensor | float]) -> Tensor:
    """Return them in a row; those of before a resume are numbers."""
    like = next((loss for loss in losses if isinstance(loss, Tensor)), torch.zeros(()))
    return torch.stack([loss if isinstance(loss, Tensor) else like.new_tensor(loss) for loss in losses])
