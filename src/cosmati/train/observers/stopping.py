"""Observers that end a run: where a metric gets no better, or where a value is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cosmati.core.clock import Budget, Clock
from cosmati.core.named_settings import KnownNames
from cosmati.errors import PlanError
from cosmati.train.observers.observer import Observer, WatchedRun


class EarlyStopping(Observer, KnownNames):
    """End the run where a metric of the evaluation gets no better.

    The run ends after the step in progress, with a checkpoint. The same command stops at once again, as the state is in
    the checkpoint; with more patience, or without this observer, it goes on.

    Args:
        metric: its name in the evaluation.
        higher_is_better: which way is up.
        patience: evaluations in a row without a better one.
        min_delta: by how much one has to be better to count.

    Raises:
        PlanError: a number that can't be; while it runs, an evaluation without that metric.
    """

    other_names = {  # noqa: RUF012  (read, never written)
        "monitor": "metric",
        "mode": "higher_is_better=... in place of {!r}",
        "early_stopping_patience": "patience",
        "early_stopping_threshold": "min_delta",
    }

    def __init__(self, metric: str, *, higher_is_better: bool, patience: int = 3, min_delta: float = 0.0) -> None:
        if patience < 1 or not min_delta >= 0:
            msg = f"EarlyStopping(patience={patience}, min_delta={min_delta}): at least 1, and not negative."
            raise PlanError(msg)
        self._metric, self._sign = metric, 1.0 if higher_is_better else -1.0
        self._patience, self._min_delta = patience, min_delta
        self.best: float | None = None
        self.best_step = 0
        self.num_worse = 0

    def on_open(self, run: WatchedRun) -> None:
        """Keep the run."""
        self._run = run

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Stop at once where the run was stopped for this before."""
        self._stop_if_due()

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Compare; what isn't finite is no better."""
        if self._metric not in metrics:
            found = ", ".join(metrics) or "nothing"
            msg = f"EarlyStopping watches {self._metric!r}, and the evaluation measures {found}. Name one of these."
            raise PlanError(msg)
        value = metrics[self._metric]
        if math.isfinite(value) and (self.best is None or self._sign * (value - self.best) > self._min_delta):
            self.best, self.best_step, self.num_worse = value, clock.step, 0
        else:
            self.num_worse += 1
            self._stop_if_due()

    def _stop_if_due(self) -> None:
        if self.num_worse >= self._patience:
            best = "was never finite" if self.best is None else f"was {self.best:g} after step {self.best_step}"
            self._run.stop(f"{self._metric} {best}, and none of {self.num_worse} evaluations since is better")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the best and the count."""
        return {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""
        self.best, self.best_step, self.num_worse = state["best"], state["best_step"], state["num_worse"]


class Threshold(Observer):
    """End the run where a metric, or a value that a monitor publishes, reaches a bound.

    Args:
        name: of the metric or value.
        above: end where it is this or more.
        below: end where it is this or less.

    Raises:
        PlanError: neither bound, or both.
    """

    def __init__(self, name: str, *, above: float | None = None, below: float | None = None) -> None:
        if (above is None) == (below is None):
            msg = f"Threshold({name!r}, above={above}, below={below}): give one of both bounds."
            raise PlanError(msg)
        self._name, self._above, self._below = name, above, below

    def on_open(self, run: WatchedRun) -> None:
        """Keep the run."""
        self._run = run

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        """Compare what a monitor has measured."""
        value = values.get(self._name, math.nan)
        if self._above is not None and value >= self._above:
            self._run.stop(f"{self._name} is {value:g}, and {self._above:g} was enough")
        if self._below is not None and value <= self._below:
            self._run.stop(f"{self._name} is {value:g}, and {self._below:g} was enough")

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Compare a metric."""
        self.on_values(clock, metrics)
