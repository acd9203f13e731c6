"""One try at what may never answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import IO, Any


class Attempt:
    """One try, in a thread of its own, so that a server that never answers can't hold the caller."""

    def __init__(self, work: Callable[[Attempt], Any]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_over = False
        self.result: Any = None
        self._progress = time.monotonic()
        self._error: BaseException | None = None

    def run(self, seconds: float | None, *, stall_seconds: float) -> BaseException | None:
        """Work for so long at most, and no longer than `stall_seconds` without a byte; return what went wrong.

        Without a limit it's done in the caller's own thread. An interrupt of the caller is no error of the attempt.
        """
        if seconds is None:
            try:
                self.result = self._work(self)
            except Exception as error:  # noqa: BLE001  (handed to the caller, whatever it is)
                return error
            return None
        self.start()
        return self.wait(seconds, stall_seconds=stall_seconds)

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="cosmati-fetch")
        self._thread.start()

    def wait(self, seconds: float, *, stall_seconds: float) -> BaseException | None:
        """Wait for what was begun; afterwards it's over, whatever came of it."""
        assert self._thread is not None, "start() comes first"
        thread, end = self._thread, time.monotonic() + seconds
        try:
            while thread.is_alive() and time.monotonic() < min(end, self._progress + stall_seconds):
                thread.join(max(0.0, min(end, self._progress + stall_seconds) - time.monotonic()))
        finally:
            with self._lock:
                # From here on a thread that is late writes nothing.
                self.is_over = True
        return TimeoutError("no answer, or too slow a one") if thread.is_alive() else self._taken()

    def _run(self) -> None:
        try:
            self.result = self._work(self)
        except BaseException as error:  # noqa: BLE001  (clients' own panics and cancellations too)
            self._error = error

    def _taken(self) -> BaseException | None:
        """Hand the error over: held here, it would hold all frames that it passed until the garbage collector comes."""
        error, self._error = self._error, None
        try:
            return error
        finally:
            del error

    def write(self, to: IO[bytes], piece: bytes, *, rewind: bool = False) -> bool:
        """Write, unless the attempt is over."""
        with self._lock:
            if self.is_over:
                return False
            if rewind:
                to.seek(0)
                to.truncate()
            to.write(piece)
            self._progress = time.monotonic()
            return True
