"""One run of an arm, from its start to what it reached. It can be sent to another process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from cosmati.core.batch import count_rows
from cosmati.core.clock import Budget, Clock
from cosmati.errors import BatchError, DivergenceError, RunError
from cosmati.records.study import EvaluationPoint
from cosmati.study.evaluated_rows import row_sample
from cosmati.train.facts import describe_hardware
from cosmati.train.named_evaluations import batches_of, evaluate_all, held_batches
from cosmati.train.observers import Observer
from cosmati.train.run.environment import environment
from cosmati.train.run.result import RunResult
from cosmati.train.timing import Stopwatch
from cosmati.train.trainer import Trainer


class Run(Protocol):
    """What an arm gives for each run; a `Trainer` is one, and says more: its device and processor time."""

    clock: Clock
    observers: list[Observer]

    def fit(self) -> RunResult:
        """Train to the end of the budget."""
        ...


@dataclass(frozen=True)
class MeasuredRun:
    """What a run reached.

    Attributes:
        points: its evaluations, the last of which counts.
        seconds_by_part: host seconds by part of a step; none where it diverged.
        num_threads: of the process, as it trained.
        hardware: that it ran on, in words.
        evaluation_seconds: of one more evaluation at its end; 0 where none was asked for or there is none.
        evaluated_rows: of that one.
        evaluated_on: a sample of the rows that it's evaluated on, none where they aren't known.
    """

    points: tuple[EvaluationPoint, ...]
    seconds_by_part: Mapping[str, float]
    num_threads: int
    hardware: str
    evaluation_seconds: float = 0.0
    evaluated_rows: int = 0
    evaluated_on: tuple[str, ...] = ()

    @property
    def final(self) -> EvaluationPoint:
        """The evaluation at its end. A run that diverged has a quality that isn't a number."""
        return self.points[-1]


class _Points(Observer):
    """Keeps what evaluations on the way say, and with how many threads they were reached."""

    every = 1 << 62  # is told of no step

    def __init__(self, quality: str, stopwatch: Stopwatch | None) -> None:
        self.points: list[EvaluationPoint] = []
        self.num_threads = torch.get_num_threads()
        self._quality, self._stopwatch = quality, stopwatch

    def on_start(self, clock: Clock, budget: Budget) -> None:  # noqa: ARG002  (an observer's)
        """Look at the threads: a recipe may ask for others than the process has."""
        self.num_threads = torch.get_num_threads()

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Keep a point."""
        if self._quality in metrics:
            self.points.append(self.point(clock, seconds, metrics[self._quality]))

    def point(self, clock: Clock, seconds: float, quality: float) -> EvaluationPoint:
        """Return where the run stands."""
        cpu_seconds = self._stopwatch.cpu_seconds() if self._stopwatch else 0.0
        return EvaluationPoint(clock.step, seconds, quality, clock.rows, clock.tokens, cpu_seconds=cpu_seconds)


def hardware_of(run: Run) -> str:
    """Return what a run trains on, in words: its trainer's device, or this machine's CPU where it isn't a `Trainer`."""
    return describe_hardware(run.assembly.device if isinstance(run, Trainer) else torch.device("cpu"))


def hardware_of_start(start: Callable[[], Run]) -> str:
    """Make a run, and return what it would train on."""
    return hardware_of(start())


def measure(arm: str, start: Callable[[], Run], quality: str, *, inference: bool = False) -> MeasuredRun:
    """Train a run to its end.

    Args:
        arm: whose it is, for messages.
        start: makes the run.
        quality: name of the metric that counts.
        inference: whether a `Trainer` evaluates once more at its end, to measure what inference costs.

    Raises:
        RunError: the metric isn't measured. KeyboardInterrupt: somebody stopped the run.
    """
    run = start()
    kept = _Points(quality, run.stopwatch if isinstance(run, Trainer) else None)
    run.observers.append(kept)
    parts: Mapping[str, float] = {}
    evaluated = 0.0, 0
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
        if inference and isinstance(run, Trainer):
            evaluated = _inference(run)
    point = kept.point(clock, seconds, reached)
    before = [one for one in kept.points if one.step < point.step]
    rows = row_sample(held_batches(run.evaluation, quality)) if isinstance(run, Trainer) else ()
    return MeasuredRun((*before, point), dict(parts), kept.num_threads, hardware_of(run), *evaluated, rows)


def _inference(run: Trainer) -> tuple[float, int]:
    """Evaluate once more, and return seconds and rows.

    It's the model as its authors ship it: with its averages, precision and threads, the kernels warm. Not in it is what
    an evaluation during training does besides: to put averages in, and compute BatchNorm's statistics for them.
    """
    if run.evaluation is None:
        return 0.0, 0
    a = run.assembly
    with environment(a), run.averaged() as model:
        began = perf_counter()
        losses = [turn.loss for turn in a.turns]
        evaluate_all(model, run.evaluation, a.ranks, a.device, a.config.autocast(a.device), losses)
        seconds = perf_counter() - began
    try:
        rows = sum(map(count_rows, batches_of(run.evaluation)))
    except BatchError:  # what metrics can read isn't always countable
        return 0.0, 0
    return seconds, rows
