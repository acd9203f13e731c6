"""Observers that end a run: where a metric gets no better, or where a value is reached."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from cosmati.core.clock import Budget, Clock
from cosmati.core.named_settings import KnownNames
from cosmati.errors import PlanError
from cosmati.train.observers.observer import Observer, WatchedRun

_LOG = logging.getLogger("cosmati")


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

    ends_runs = True
    other_names = {  # noqa: RUF012  (read, never written)
        "monitor": "metric",
        "mode": "higher_is_better=... in place of {!r}",
        "early_stopping_patience": "patience",
        "early_stopping_threshold": "min_delta",
    }

    def __init__(self, metric: str, *, higher_is_better: bool, patience: int = 3, min_delta: float = 0.0) -> None:
        if not (isinstance(patience, int) and patience >= 1 and _is_finite(min_delta) and min_delta >= 0):
            msg = (
                f"EarlyStopping(patience={patience!r}, min_delta={min_delta!r}): patience is a number of evaluations, "
                "at least 1, and min_delta a finite number that isn't negative."
            )
            raise PlanError(msg)
        self._metric, self._sign = metric, 1.0 if higher_is_better else -1.0
        self._patience, self._min_delta = patience, min_delta
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        self.best_step = 0
        self.num_worse = 0

    def on_open(self, run: WatchedRun) -> None:
        """Keep the run."""
        self._run = run

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Stop at once where the run was stopped for this before."""
        if not clock.step:  # It may have watched another run.
            self._forget()
        self._stop_if_due()

    def on_end(self, clock: Clock, ended: str) -> None:
        """Say where nothing was ever compared."""
        if self.best is None and not self.num_worse and self._run.rank == 0 and ended == "completed":
            _LOG.warning(
                "EarlyStopping watched %r, and nothing was evaluated: set RunConfig.evaluate_every.", self._metric
            )

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
            by = f" by more than {self._min_delta:g}" if self._min_delta else ""
            self._run.stop(f"{self._metric} {best}, and none of {self.num_worse} evaluations since is better{by}")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the best and the count, and of what."""
        told = {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse}
        return {**told, "metric": self._metric, "higher_is_better": self._sign > 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them; begin anew where they're of another metric."""
        self._forget()
        was = state.get("metric", self._metric), state.get("higher_is_better", self._sign > 0)
        if was != (self._metric, self._sign > 0):
            _LOG.warning("EarlyStopping watched %r before, and begins anew with %r.", was[0], self._metric)
            return
        self.best, self.best_step, self.num_worse = state["best"], state["best_step"], state["num_worse"]


class Threshold(Observer):
    """End the run where a metric, or a value that a monitor publishes, reaches a bound.

    It looks at the last value again where the run goes on: the same command stops at once, another bound goes on.

    Args:
        name: of the metric or value.
        above: end where it is this or more.
        below: end where it is this or less.

    Raises:
        PlanError: neither bound, or both, or no number.
    """

    ends_runs = True

    def __init__(self, name: str, *, above: float | None = None, below: float | None = None) -> None:
        bound = below if above is None else above
        if (above is None) == (below is None) or not _is_finite(bound):
            msg = f"Threshold({name!r}, above={above!r}, below={below!r}): give one of both bounds, a finite number."
            raise PlanError(msg)
        self._name, self._above, self._below = name, above, below
        self.last: float | None = None

    def on_open(self, run: WatchedRun) -> None:
        """Keep the run."""
        self._run = run

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Stop at once where the run was stopped for this before."""
        if not clock.step:  # It may have watched another run.
            self.last = None
        self._stop_if_due()

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        """Compare what a monitor has measured."""
        if self._name in values:
            self.last = values[self._name]
            self._stop_if_due()

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Compare a metric."""
        self.on_values(clock, metrics)

    def _stop_if_due(self) -> None:
        value = math.nan if self.last is None else self.last
        if self._above is not None and value >= self._above:
            self._run.stop(f"{self._name} is {value:g}, and {self._above:g} was enough")
        if self._below is not None and value <= self._below:
            self._run.stop(f"{self._name} is {value:g}, and {self._below:g} was enough")

    def on_end(self, clock: Clock, ended: str) -> None:
        """Say where nothing was ever compared."""
        if self.last is None and self._run.rank == 0 and ended == "completed":
            _LOG.warning("Threshold watched %r, and nothing of that name was evaluated or published.", self._name)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the last value, and of what."""
        return {"last": self.last, "name": self._name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it, where it's of the same name."""
        self.last = state["last"] if state["name"] == self._name else None


def _is_finite(number: object) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)
