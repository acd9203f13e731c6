"""How far something is: a bar with the time left, or plain lines where there is no terminal."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class ProgressDisplay:
    """Shows one piece of work until it's closed. A context manager.

    Where there is no terminal, it prints a line for each tenth of the work, or one at the end where the share isn't
    known.

    Args:
        label: what is done.
        start: share that was done before, 0 to 1; the time left is reckoned from what comes after it.
        console: where to; None means standard error.
    """

    def __init__(self, label: str, *, start: float = 0.0, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._label, self._start = label, start
        self._began = time.monotonic()
        self._next_line = 0.0
        self._last_line = ""
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        fields = (TextColumn("{task.fields[text]}", markup=False), TimeElapsedColumn())
        self._bar = Progress(*columns, *fields, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(label, total=None, text="")
        self._bar.start()

    def update(self, share: float | None, text: str) -> None:
        """Tell how far it is.

        Args:
            share: done, 0 to 1; None where nobody knows.
            text: anything that goes with it, such as a loss.
        """
        if share is not None and share > self._start:
            seconds = (time.monotonic() - self._began) * max(0.0, 1 - share) / (share - self._start)
            text = f"{text}, {timedelta(seconds=round(seconds))} left"
        if not self._bar.disable:
            self._bar.update(self._task, total=None if share is None else 1.0, completed=share or 0.0, text=text)
        elif share is None:
            self._last_line = f"{self._label}: {text}"
        elif share >= self._next_line - 1e-9:
            self._next_line = math.floor(share * 10 + 1e-9) / 10 + 0.1
            self._print(f"{self._label}: {share:4.0%}  {text}")

    def close(self) -> None:
        """Take the bar away; a second call does nothing."""
        self._bar.stop()
        if self._last_line:
            self._print(self._last_line)
            self._last_line = ""

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()
