"""Losses and metrics as lines of JSON in the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from cosmati.core.clock import Budget, Clock
from cosmati.errors import RunError
from cosmati.storage.atomic import replace_file
from cosmati.train.observers.observer import Observer
from cosmati.train.outcome import StepOutcome

FILES = ("steps.jsonl", "evaluations.jsonl", "monitors.jsonl")
"""What a run writes line by line, each with its step."""
LATEST = 30.0
"""Seconds after which a line of `steps.jsonl` is due, however slow steps are."""


class MetricsFile(Observer):
    """Write losses and metrics as lines of JSON, which a crash can't damage but for the last line.

    A line of `steps.jsonl` is never later than `LATEST` seconds and one step (with its evaluation and checkpoint), so
    that a watchdog can tell a slow run from a dead one.

    Args:
        folder: the run's folder; `steps.jsonl` and `evaluations.jsonl` are appended to.
        interval: steps between lines of `steps.jsonl`, where they're quick.
        check: raises where this process may not write any more.
    """

    def __init__(self, folder: Path, interval: int = 10, check: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._check = check
        self._interval = interval
        self._written = -math.inf

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Cut what was written after the step from which the run goes on."""
        for name in FILES:
            cut_after(self._folder / name, clock.step, remove=True)

    def on_step(self, outcome: StepOutcome) -> None:
        """Append the clock, the loss, the first optimizer's learning rate, and the norm of the gradients."""
        clock, now = outcome.clock, monotonic()
        if clock.step % self._interval and now - self._written < LATEST:
            return
        self._written = now
        self._append(
            "steps.jsonl",
            {
                "step": clock.step,
                "rows": clock.rows,
                "tokens": clock.tokens,
                "seconds": clock.seconds,
                "loss": _finite(float(outcome.loss)),
                "learning_rate": outcome.learning_rates[0] if outcome.learning_rates else None,
                "gradient_norm": _finite(outcome.gradient_norm()),
            },
        )

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Append the metrics."""
        values = {name: _finite(value) for name, value in metrics.items()}
        self._append(
            "evaluations.jsonl",
            {"step": clock.step, "rows": clock.rows, "tokens": clock.tokens, "seconds": seconds, **values},
        )

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        """Append what monitors have measured."""
        told = {name: _finite(value) for name, value in values.items()}
        time = {"step": clock.step, "seconds": clock.seconds}
        self._append("monitors.jsonl", {**time, **told})

    def _append(self, name: str, content: Mapping[str, object]) -> None:
        path = self._folder / name
        self._check()
        with refusals_named(path), path.open("a") as file:
            file.write(json.dumps(content) + "\n")


def cut_after(path: Path, step: int, *, remove: bool) -> list[dict[str, Any]]:
    """Return the lines of a file that come after a step, and remove them, with what a crash has torn, if asked to.

    Raises:
        RunError: the file can't be written.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    kept = [line for line in lines if _step_of(line) <= step]
    if remove:
        with refusals_named(path):
            replace_file(path, "".join(line + "\n" for line in kept).encode())
    return [json.loads(line) for line in lines if step < _step_of(line) < math.inf]


@contextmanager
def refusals_named(path: Path) -> Iterator[None]:
    """Say which file the disk refused, and what to do."""
    try:
        yield
    except OSError as error:
        msg = f"{path} can't be written: {error}. Free space, and start the run again: it goes on."
        raise RunError(msg) from error


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
