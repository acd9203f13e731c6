"""How a run gets on, by the files that it writes, and whether it has come to a halt. Durations are monotonic."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import monotonic

from cosmati.records.attempts import read_attempts
from cosmati.records.launched import LaunchedRun

_TAIL = 1 << 16
_LINE_STEPS, _LINE_SECONDS = 10, 30.0
"""A line of `steps.jsonl` comes every so many steps, and at the latest after so many seconds and a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How an attempt gets on.

    Attributes:
        run: what it trains; None before it has said so.
        first_step: commits before it.
        step: the last one known of this attempt.
        step_seconds: median time of a step.
        silent_seconds: since the run was last seen to get on, or said where it is, or the attempt began.
    """

    run: LaunchedRun | None = None
    first_step: int | None = None
    step: int | None = None
    step_seconds: float | None = None
    silent_seconds: float = 0.0


class RunWatch:
    """Watches one attempt's run.

    Args:
        note: the file in which the run says where it is.
        clock: seconds that only grow.
    """

    def __init__(self, note: Path, clock: Callable[[], float] = monotonic) -> None:
        self._note, self._clock = note, clock
        self._noted: tuple[int, ...] = ()
        self._begin(None)

    def _begin(self, run: LaunchedRun | None) -> None:
        self._run = run
        self._seen: tuple[int, ...] = ()
        self._last = self._clock()
        self._longest = 0.0
        self._first_step: int | None = None
        self._step: int | None = None
        self._step_seconds: float | None = None

    def look(self) -> RunProgress:
        """Look at the run's files; where they can't be read, as on a disk that is lost, it's silent."""
        with contextlib.suppress(OSError):
            self._look_at_note()
            if self._run is not None:
                self._look_at(self._run)
        return RunProgress(
            run=self._run,
            first_step=self._first_step,
            step=self._step,
            step_seconds=self._step_seconds,
            silent_seconds=self._clock() - self._last,
        )

    def silence_allowed(self, patience: float, min_seconds: float, start_seconds: float) -> float:
        """Return the seconds that the run may be silent.

        Args:
            patience: how many times the median step may pass without one.
            min_seconds: in any case.
            start_seconds: to the attempt's first step.
        """
        if self._step_seconds is None:
            # One line is no median: the first step may compile for long, and the second evaluate.
            return max(min_seconds, start_seconds)
        due = min(_LINE_STEPS * self._step_seconds, _LINE_SECONDS + self._step_seconds)
        # What it has once taken between two lines, as with an evaluation, it may take again.
        return max(min_seconds, due + patience * self._step_seconds, 3 * self._longest)

    def _look_at_note(self) -> None:
        """Read which run it is: a program may train one after another."""
        noted = _state_of(self._note)
        if noted != self._noted:
            run = LaunchedRun.from_json(self._note.read_text())
            self._noted = noted
            if run != self._run:
                self._begin(run)  # what a program prepares before is none of the run's silence

    def _look_at(self, run: LaunchedRun) -> None:
        folder = Path(run.folder)
        if self._first_step is None:
            # Until this attempt has begun, the file holds lines of earlier ones that it's going to cut.
            begun = [one for one in read_attempts(folder) if one.number == run.attempt]
            if not begun:
                return
            self._first_step = begun[0].first_step
        seen = _state_of(folder / "steps.jsonl")
        if seen != self._seen:
            self._take([line for line in _last_lines(folder / "steps.jsonl") if line[0] > self._first_step])
            self._seen = seen

    def _take(self, lines: list[tuple[int, float]]) -> None:
        if not lines or lines[-1][0] == self._step:
            return
        now = self._clock()
        if self._step is not None:
            self._longest = max(self._longest, now - self._last)
        self._step, self._last = lines[-1][0], now
        pairs = pairwise(lines)
        paces = [(end[1] - begin[1]) / (end[0] - begin[0]) for begin, end in pairs if end[0] > begin[0]]
        if paces:
            self._step_seconds = statistics.median(paces)


def _state_of(path: Path) -> tuple[int, ...]:
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns


def _last_lines(path: Path) -> list[tuple[int, float]]:
    """Return steps and seconds of the last whole lines of `steps.jsonl`."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, 2) - _TAIL)
        file.seek(start)
        whole = file.read().rpartition(b"\n")[0].split(b"\n")
    found = []
    for text in whole[1:] if start else whole:
        try:
            line = json.loads(text)
            found.append((int(line["step"]), float(line["seconds"])))
        except (ValueError, KeyError, TypeError):
            continue
    return found
