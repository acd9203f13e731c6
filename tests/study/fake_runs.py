"""Runs that end at once, made by functions that can be sent to other processes."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from cosmati.core.clock import Clock
from cosmati.errors import DivergenceError
from cosmati.study.points import PointSettings
from cosmati.train.observers import Observer
from cosmati.train.run.result import RunResult

FULL_STEPS = 1000
STALL = "stall"
"""While this file is in its folder, no run ends."""


class FakeRun:
    """A run that ends at once, or after some seconds and when a file is gone, with a quality that is given."""

    def __init__(
        self,
        budget: float,
        quality: float,
        *,
        error: Exception | None = None,
        outcome: str = "completed",
        seconds: float = 0.0,
        while_there: Path | None = None,
    ) -> None:
        steps = round(FULL_STEPS * budget)
        self.clock = Clock(step=steps, rows=8 * steps, seconds=budget)
        self.observers: list[Observer] = []
        self._quality, self._error, self._outcome, self._wait = quality, error, outcome, seconds
        self._while_there = while_there

    def fit(self) -> RunResult:
        time.sleep(self._wait)
        while self._while_there is not None and self._while_there.exists():
            time.sleep(0.02)
        if self._error is not None:
            raise self._error
        metrics = {"loss": self._quality}
        return RunResult(self._outcome, self.clock, metrics, 2 * self.clock.seconds, {"forward": 1.0}, None)


def loss_at(settings: PointSettings, budget: float, seed: int) -> float:
    """A bowl around a rate of 0.1, smaller with the budget; a bit of noise by seed."""
    return 1 + math.log10(float(settings["lr"]) / 0.1) ** 2 + 0.1 / budget + 0.001 * (seed % 7)


def write_start(folder: str | Path, name: str) -> None:
    """Leave a trace of a start: one byte appended, which no two processes mix."""
    with (Path(folder) / "starts.txt").open("a") as file:
        file.write(f"{name}\n")


def search_start(folder: str, arm: str, seconds: float, settings: PointSettings, budget: float, seed: int) -> FakeRun:
    write_start(folder, f"{arm} {settings['lr']} {budget} {seed} {os.getpid()}")
    return FakeRun(budget, loss_at(settings, budget, seed), seconds=seconds, while_there=Path(folder) / STALL)


def study_start(folder: str, arm: str, seconds: float, budget: float, seed: int) -> FakeRun:
    write_start(folder, f"{arm} {budget} {seed} {os.getpid()}")
    return FakeRun(
        budget,
        {"baseline": 1.0}.get(arm, 0.9) + 0.1 / budget + seed / 100,
        seconds=seconds,
        while_there=Path(folder) / STALL,
    )


def failing_start(budget: float, seed: int) -> FakeRun:
    return FakeRun(budget, 0.0, error=ValueError(f"seed {seed} has no data"))


def diverging_start(budget: float, seed: int) -> FakeRun:
    return FakeRun(budget, 0.0, error=DivergenceError("loss isn't finite"))


def dying_start(budget: float, seed: int) -> FakeRun:
    os._exit(7)
