"""What watches a run: observers are told of steps, evaluations, checkpoints and the end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from rich.console import Console
from torch import Tensor

from cosmati.core.batch import Batch
from cosmati.core.clock import Budget, Clock
from cosmati.errors import RunError
from cosmati.progress import ProgressDisplay
from cosmati.train.routes import Route


class StepReport(NamedTuple):
    """What one step did. Tensors stay on the device until somebody needs them.

    Attributes:
        clock: after the step; the step's own number is `clock.step - 1`.
        loss: mean over the step's weight, scalar; of the first sub-step.
        sub_losses: mean loss of each sub-step.
        routes: of all V microbatches; empty on the short road.
        weights: weight of each microbatch [V], or None on the short road.
        num_rows: rows of each microbatch that took part [V], or None on the short road.
        norms: each microbatch's gradient norm by region [V, regions], when it was measured.
        update_norms: norm of the parameters' change by region [regions], when it was measured.
        batches: this rank's microbatches as the methods left them.
    """

    clock: Clock
    loss: Tensor
    sub_losses: Sequence[Tensor]
    routes: Sequence[Route]
    weights: Tensor | None
    num_rows: Tensor | None
    norms: Tensor | None
    update_norms: Tensor | None
    batches: Sequence[Batch]


class Observer:
    """Base of observers: every call does nothing.

    Attributes:
        every: call `on_step` every so many steps.
    """

    every: int = 1

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Take note that the run starts or goes on."""

    def on_step(self, report: StepReport) -> None:
        """Take note of a commit."""

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Take note of metrics, after this many seconds of training."""

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        """Take note of a model checkpoint, before it's published."""

    def on_end(self, clock: Clock, outcome: str) -> None:
        """Take note that the run has ended."""


class MetricsFile(Observer):
    """Write losses and metrics as lines of JSON, which a crash can't damage but for the last line.

    Args:
        folder: the run's folder; `steps.jsonl` and `evaluations.jsonl` are appended to.
        every: steps between lines of `steps.jsonl`.
    """

    def __init__(self, folder: Path, every: int = 10) -> None:
        self.every = every
        self._folder = folder
        self._started = 0.0

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Cut what was written after the step from which the run goes on."""
        self._started = time.perf_counter() - clock.seconds
        for name in ("steps.jsonl", "evaluations.jsonl"):
            path = self._folder / name
            if path.exists():
                kept = [line for line in path.read_text().splitlines() if _step_of(line) <= clock.step]
                path.write_text("".join(line + "\n" for line in kept))

    def on_step(self, report: StepReport) -> None:
        """Append the loss."""
        clock = report.clock
        self._append("steps.jsonl", {"step": clock.step, "rows": clock.rows, "loss": _finite(float(report.loss))})

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Append the metrics."""
        values = {name: _finite(value) for name, value in metrics.items()}
        self._append(
            "evaluations.jsonl",
            {"step": clock.step, "rows": clock.rows, "tokens": clock.tokens, "seconds": seconds, **values},
        )

    def _append(self, name: str, content: Mapping[str, object]) -> None:
        try:
            with (self._folder / name).open("a") as file:
                file.write(json.dumps(content) + "\n")
        except OSError as error:
            msg = f"{self._folder / name} can't be written: {error}. Free space, and start the run again: it goes on."
            raise RunError(msg) from error


class ProgressBar(Observer):
    """Show progress, loss and time left; plain lines where the output isn't a terminal.

    Args:
        label: what stands before the bar.
        every: steps between refreshes; each reads the loss from the device.
        file: where plain lines go; None means standard error.
    """

    def __init__(self, label: str = "training", every: int = 10, file: IO[str] | None = None) -> None:
        self.every = every
        self._label = label
        self._console = Console(stderr=file is None, file=file)
        self._budget: Budget | None = None
        self._display: ProgressDisplay | None = None

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Draw the bar."""
        self._budget = budget
        self._display = ProgressDisplay(self._label, start=budget.elapsed(clock), console=self._console)

    def on_step(self, report: StepReport) -> None:
        """Move the bar, or print a line for each tenth of the run."""
        assert self._budget is not None, "the run has started"
        assert self._display is not None, "as the budget"
        text = f"step {report.clock.step}  loss {float(report.loss):.4f}"
        self._display.update(self._budget.elapsed(report.clock), text)

    def on_end(self, clock: Clock, outcome: str) -> None:
        """Take the bar away."""
        if self._display is not None:
            self._display.close()


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

    def on_step(self, report: StepReport) -> None:
        """Keep the loss."""
        self.losses.append((report.clock.step, float(report.loss)))

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Keep the metrics."""
        self.evaluations.append((clock, seconds, metrics))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
