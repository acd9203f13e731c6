"""A progress bar, or plain lines where the output isn't a terminal."""

from __future__ import annotations

from typing import IO

from rich.console import Console

from cosmati.core.clock import Budget, Clock
from cosmati.progress import ProgressDisplay
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
        self._budget: Budget | None = None
        self._display: ProgressDisplay | None = None

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Draw the bar."""
        self._budget = budget
        self._display = ProgressDisplay(self._label, start=budget.elapsed(clock), console=self._console)

    def on_step(self, outcome: StepOutcome) -> None:
        """Move the bar, or print a line for each tenth of the run."""
        assert self._budget is not None, "the run has started"
        assert self._display is not None, "as the budget"
        loss = "withheld" if "loss" in outcome.withheld else f"{float(outcome.loss):.4f}"
        text = f"step {outcome.clock.step}  loss {loss}"
        self._display.update(self._budget.elapsed(outcome.clock), text)

    def on_end(self, clock: Clock, ended: str) -> None:
        """Take the bar away."""
        if self._display is not None:
            self._display.close()
