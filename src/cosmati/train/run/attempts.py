"""Writes down each start of a run, and keeps what a restart takes anew.

`steps.jsonl` and its kin hold the run as it counts. What an earlier attempt had written after the step from which this
one goes on is moved to `superseded.jsonl`, so that nobody has to guess why a curve was begun twice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from cosmati.core.clock import Clock
from cosmati.records.attempts import (
    ATTEMPTS_FILE,
    SUPERSEDED_FILE,
    RunAttempt,
    append_lines,
    attempt_of,
    read_attempts,
)
from cosmati.train.observers.metrics import FILES, cut_after, refusals_named


def begin_attempt(folder: Path, clock: Clock) -> tuple[RunAttempt, dict[int, int]]:
    """Note that a run starts or goes on, and set aside what earlier attempts wrote after the clock's step.

    Returns:
        This attempt, and for each earlier attempt that it supersedes in part, from which step.

    Raises:
        RunError: the folder can't be written.
    """
    attempts = read_attempts(folder)
    superseded: dict[int, int] = {}
    for name in FILES:
        lines = []
        for line in cut_after(folder / name, clock.step, remove=False):
            number = attempt_of(int(line["step"]), attempts)
            superseded[number] = clock.step
            lines.append({"attempt": number, "from_step": clock.step, "file": name, "line": line})
        # Kept before it is cut: a crash in between leaves a line twice, and no line is lost.
        _append(folder / SUPERSEDED_FILE, *lines)
        cut_after(folder / name, clock.step, remove=True)
    number = attempts[-1].number + 1 if attempts else 0
    now = RunAttempt(number=number, first_step=clock.step, started=time.time(), first_seconds=clock.seconds)
    told = {"attempt": number, "first_step": clock.step, "started": now.started, "first_seconds": clock.seconds}
    _append(folder / ATTEMPTS_FILE, told)
    return now, superseded


def end_attempt(folder: Path, number: int, clock: Clock, outcome: str, reason: str) -> None:
    """Note how an attempt has ended."""
    told = {"attempt": number, "last_step": clock.step, "outcome": outcome, "reason": reason}
    _append(folder / ATTEMPTS_FILE, told)


def _append(path: Path, *lines: Mapping[str, object]) -> None:
    with refusals_named(path):
        append_lines(path, *lines)
