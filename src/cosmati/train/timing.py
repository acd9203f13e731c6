"""Where the host's time goes, by part of a step."""

from __future__ import annotations

from time import perf_counter


class Stopwatch:
    """Seconds by part. Each `lap` charges the time since the last one to a part.

    On an accelerator these are the host's seconds: kernels run on after the call that started them returns.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def start(self) -> None:
        """Charge the time since the last lap to nobody."""
        self._last = perf_counter()

    def lap(self, part: str) -> None:
        """Charge the time since the last lap to a part."""
        now = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
