"""A progress bar, or plain lines where the output isn't a terminal."""

from __future__ import annotations

import math
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cosmati.core.clock import Budget, Clock
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome


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
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._budget: Budget | None = None
        self._next_line = 0.0

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Draw the bar."""
        self._budget = budget
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            fields = (TextColumn("{task.fields[loss]}"), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, *fields, console=self._console)
            self._task = self._bar.add_task(self._label, total=1.0, loss="")
            self._bar.start()

    def on_step(self, outcome: StepOutcome) -> None:
        """Move the bar, or print a line for each tenth of the run."""
        assert self._budget is not None, "the run has started"
        elapsed = self._budget.elapsed(outcome.clock)
        text = f"step {outcome.clock.step}  loss {float(outcome.loss):.4f}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=elapsed, loss=text)
        elif elapsed >= self._next_line:
            self._next_line = math.floor(elapsed * 10 + 1) / 10
            self._console.print(f"{self._label}: {elapsed:4.0%}  {text}", highlight=False)

    def on_end(self, clock: Clock, ended: str) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
