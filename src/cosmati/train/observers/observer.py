"""What watches a run: an observer is told of steps, evaluations, checkpoints and the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cosmati.core.clock import Budget, Clock
from cosmati.train.outcome import StepOutcome


class Observer:
    """Base of observers: every call does nothing.

    Attributes:
        every: call `on_step` every so many steps.
    """

    every: int = 1

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Take note that the run starts or goes on."""

    def on_step(self, outcome: StepOutcome) -> None:
        """Take note of a commit."""

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Take note of metrics, after this many seconds of training."""

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        """Take note of a model checkpoint, before it's published."""

    def on_end(self, clock: Clock, ended: str) -> None:
        """Take note that the run has ended."""


@dataclass
class History(Observer):
    """Keep losses and metrics in memory.

    Attributes:
        losses: (step, loss).
        evaluations: (clock, seconds of training, metrics).
    """

    def __post_init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self.evaluations: list[tuple[Clock, float, Mapping[str, float]]] = []

    def on_step(self, outcome: StepOutcome) -> None:
        """Keep the loss."""
        self.losses.append((outcome.clock.step, float(outcome.loss)))

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Keep the metrics."""
        self.evaluations.append((clock, seconds, metrics))
