"""One run of an arm, from its start to what it reached. It can be sent to another process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cosmati.core.clock import Clock
from cosmati.errors import DivergenceError, RunError
from cosmati.records.study import EvaluationPoint
from cosmati.train.observers import Observer
from cosmati.train.run.result import RunResult


class Run(Protocol):
    """What an arm gives for each run; a `Trainer` is one."""

    clock: Clock
    observers: list[Observer]

    def fit(self) -> RunResult:
        """Train to the end of the budget."""
        ...


@dataclass(frozen=True)
class MeasuredRun:
    """What a run reached: its evaluations, the last of which counts, and its seconds by part."""

    points: tuple[EvaluationPoint, ...]
    seconds_by_part: Mapping[str, float]

    @property
    def final(self) -> EvaluationPoint:
        """The evaluation at its end. A run that diverged has a quality that isn't a number."""
        return self.points[-1]


class _Points(Observer):
    """Keeps what evaluations on the way say."""

    every = 1 << 62  # is told of no step

    def __init__(self, quality: str) -> None:
        self.points: list[EvaluationPoint] = []
        self._quality = quality

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Keep a point."""
        if self._quality in metrics:
            point = EvaluationPoint(clock.step, seconds, metrics[self._quality], clock.rows, clock.tokens)
            self.points.append(point)


def measure(arm: str, start: Callable[[], Run], quality: str) -> MeasuredRun:
    """Train a run to its end.

    Args:
        arm: whose it is, for messages.
        start: makes the run.
        quality: name of the metric that counts.

    Raises:
        RunError: the metric isn't measured. KeyboardInterrupt: somebody stopped the run.
    """
    run = start()
    kept = _Points(quality)
    run.observers.append(kept)
    parts: Mapping[str, float] = {}
    try:
        result = run.fit()
    except DivergenceError:
        clock, reached, seconds = run.clock, math.nan, run.clock.seconds
    else:
        if result.outcome == "stopped":
            raise KeyboardInterrupt
        if quality not in result.metrics:
            msg = f"The runs of {arm!r} measure {sorted(result.metrics)}, and the study asks for {quality!r}."
            raise RunError(msg)
        clock, reached = result.clock, result.metrics[quality]
        seconds, parts = result.seconds, result.seconds_by_part
    point = EvaluationPoint(clock.step, seconds, reached, clock.rows, clock.tokens)
    before = [one for one in kept.points if one.step < point.step]
    return MeasuredRun((*before, point), dict(parts))
