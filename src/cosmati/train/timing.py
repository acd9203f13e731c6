"""Where the host's time goes, by part of a step, and how long a run has trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time

EARLIER = "earlier attempts"


class Stopwatch:
    """Seconds by part, and seconds of training: evaluation and checkpoints left out.

    Each `lap` charges the time since the last one to a part. On an accelerator these are the host's seconds: kernels
    run on after the call that started them returns.

    Beside them it counts the processor time of this process while it trains: of all its threads, not of other processes
    such as a loader's workers.

    Attributes:
        seconds: by part; of earlier attempts at the run together, whose parts this process doesn't know.
        on_lap: told of each part as it ends; None tells nobody.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.on_lap: Callable[[str], None] | None = None
        self._last = perf_counter()
        self._before = 0.0
        self._since: float | None = None
        self._has_started = False
        self._cpu_before: float | None = 0.0
        self._cpu_since = 0.0

    def start(self, training_seconds: float | None = None) -> None:
        """Start to count training; the time since the last lap is charged to nobody.

        Args:
            training_seconds: of the run so far, where it goes on from a checkpoint.
        """
        self._last = self._since = perf_counter()
        self._cpu_since = process_time()
        if training_seconds is not None:
            self._before = training_seconds
            # What an earlier process has spent isn't on record.
            self._cpu_before = None if training_seconds else 0.0
            if training_seconds and not self._has_started:
                self.seconds[EARLIER] = training_seconds
        self._has_started = True

    def stop(self) -> None:
        """Stop counting training."""
        self._cpu_before = self._cpu()
        self._before, self._since = self.training_seconds(), None

    def training_seconds(self) -> float:
        """Return the seconds of training so far."""
        return self._before + (perf_counter() - self._since if self._since is not None else 0.0)

    def cpu_seconds(self) -> float:
        """Return the processor time of training so far; 0 where a part of it was another process's."""
        return self._cpu() or 0.0

    def _cpu(self) -> float | None:
        if self._cpu_before is None or self._since is None:
            return self._cpu_before
        return self._cpu_before + process_time() - self._cpu_since

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to a part."""
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
        if self.on_lap is not None:
            self.on_lap(part)

    @contextmanager
    def paused(self, part: str) -> Iterator[None]:
        """Charge what happens within to a part that isn't training."""
        self.stop()
        self._last = perf_counter()
        try:
            yield
        finally:
            self.lap(part)
            self.start()
