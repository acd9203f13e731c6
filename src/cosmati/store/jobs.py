"""How far a running job is, and whether it still runs: read from its folder alone, a few kilobytes of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cosmati.storage.lock import is_locked
from cosmati.store.live import lines_after
from cosmati.store.scan import RUN_FILE, is_plain, plain_bytes
from cosmati.store.summary import finite, is_step

LINE_DUE = 30.0
"""Seconds after which a run writes a line, and the step it is in."""
_TAIL_BYTES = 1 << 14
_FEW_STEPS = 3
_CLOCKS_DIFFER = 5.0
"""Seconds, at most, by which the clock of files (another machine's, perhaps) may be ahead as clocks are."""
_GOING = frozenset({"running"})


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A run as its folder has it now.

    Attributes:
        status: `running`, `broken off` (no end, and nobody holds its lock), `removed`, or how it ended.
        step: Optimizer steps done, as far as they were written.
        num_steps: Of the whole run, None where that isn't known ahead.
        share: Of the run that is done, from 0 to 1; None where its length isn't known.
        steps_per_second: Of training, over the newest lines; None before there are two.
        seconds_left: Of training, evaluation and checkpoints not counted; None where it can't be told.
        age: Seconds since the newest line was written, None where there's none yet. Below 0 its time lies ahead of the
            clock, which was set back, and nobody can tell how old it is.
        checkpoint: Step of the newest checkpoint, None where there's none.
        last: The newest line of `steps.jsonl`.
    """

    status: str
    step: int = 0
    num_steps: int | None = None
    share: float | None = None
    steps_per_second: float | None = None
    seconds_left: float | None = None
    age: float | None = None
    checkpoint: int | None = None
    last: Mapping[str, Any]

    @property
    def is_going(self) -> bool:
        """Whether a process trains in the folder."""
        return self.status in _GOING

    @property
    def is_silent(self) -> bool:
        """Whether a line is overdue by as much again."""
        return self.age is not None and self.age > 2 * LINE_DUE


class _Record(msgspec.Struct):
    outcome: str
    recipe_text: str
    num_steps: int


def job_state(folder: Path, now: float | None = None) -> JobState:
    """Return how far the run in a folder is.

    Args:
        folder: of the run.
        now: seconds since the epoch; None is now.
    """
    try:
        if not (folder / RUN_FILE).exists():
            return JobState(status="removed", last={})
        record = msgspec.json.decode(plain_bytes(folder / RUN_FILE), type=_Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return JobState(status="unreadable", last={})
    status = record.outcome
    if status == "running" and not is_locked(folder / "lock"):
        status = "broken off"
    lines = newest_lines(folder / "steps.jsonl")
    last = lines[-1] if lines else {}
    step = max(last.get("step", 0), record.num_steps)
    num_steps, seconds = _length(record.recipe_text)
    rate = steps_per_second(lines)
    share, left = None, None
    if num_steps:
        share = min(1.0, step / num_steps)
        left = None if rate is None else max(0, num_steps - step) / rate
    elif seconds and (spent := finite(last.get("seconds"))) is not None:
        share, left = min(1.0, spent / seconds), max(0.0, seconds - spent)
    return JobState(
        status=status,
        step=step,
        num_steps=num_steps,
        share=share,
        steps_per_second=rate,
        seconds_left=left if status == "running" else None,
        age=_age(folder, time.time() if now is None else now),
        checkpoint=_newest_checkpoint(folder / "checkpoints"),
        last=last,
    )


def newest_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines at the end of a file that have a step, in order; a half written one isn't among them."""
    if not is_plain(path):
        return []
    try:
        size = path.stat().st_size
        start = max(0, size - _TAIL_BYTES)
        with path.open("rb") as file:
            file.seek(start)
            skipped = len(file.readline()) if start else 0
    except OSError:
        return []
    return [line for line in lines_after(path, start + skipped)[0] if is_step(line.get("step"))]


def steps_per_second(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the pace of training over some lines, None where they don't tell."""
    known = [(line["step"], clock) for line in lines if (clock := finite(line.get("seconds"))) is not None]
    if len(known) < 2 or known[-1][0] - known[0][0] < _FEW_STEPS or known[-1][1] <= known[0][1]:
        return None
    return float((known[-1][0] - known[0][0]) / (known[-1][1] - known[0][1]))


def _length(recipe_text: str) -> tuple[int | None, float | None]:
    """Return a run's length in steps, or in seconds of training, as far as its recipe says it."""
    try:
        recipe = json.loads(recipe_text)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(recipe, dict):
        return None, None
    num_steps, budget = recipe.get("num_steps"), str(recipe.get("budget"))
    if type(num_steps) is int and num_steps > 0:
        return num_steps, None
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*sec\s*", budget)
    is_dilated = "ScaleSchedule" in str(recipe.get("methods"))
    return None, float(found[1]) if found and not is_dilated else None


def _age(folder: Path, now: float) -> float | None:
    times = []
    for name in ("steps.jsonl", "evaluations.jsonl"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    if not times:
        return None
    age = now - max(times)
    return 0.0 if -_CLOCKS_DIFFER < age < 0 else age


def _newest_checkpoint(folder: Path) -> int | None:
    try:
        steps = [one.name[5:] for one in folder.iterdir() if one.name.startswith("step-")]
    except OSError:
        return None
    return max((int(text) for text in steps if text.isascii() and text.isdigit()), default=None)
