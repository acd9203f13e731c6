"""Where the host's time goes, by part of a step, and how long a run has trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Stopwatch:
    """Seconds by part, and seconds of training: evaluation and checkpoints left out.

    Each `lap` charges the time since the last one to a part. On an accelerator these are the host's seconds: kernels
    run on after the call that started them returns.

    Attributes:
        seconds: by part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()
        self._before = 0.0
        self._since: float | None = None

    def start(self, training_seconds: float | None = None) -> None:
        """Start to count training; the time since the last lap is charged to nobody.

        Args:
            training_seconds: of the run so far, where it goes on from a checkpoint.
        """
        self._last = self._since = perf_counter()
        self._before = self._before if training_seconds is None else training_seconds

    def stop(self) -> None:
        """Stop counting training."""
        self._before, self._since = self.training_seconds(), None

    def training_seconds(self) -> float:
        """Return the seconds of training so far."""
        return self._before + (perf_counter() - self._since if self._since is not None else 0.0)

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to a part."""
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

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
