"""Tells a tracker of a run while it goes on: from a thread of its own, and never at the run's expense."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from cosmati.core.clock import Budget, Clock
from cosmati.errors import CosmatiError, RunError
from cosmati.integrations.catalogue import tracker_of
from cosmati.integrations.told import Sent, config_of, note_sent, run_of, sent_to, try_to_note
from cosmati.integrations.tracker import TrackedRun, Tracker, finite
from cosmati.train.observers import Observer, StepOutcome, WatchedRun

_LOG = logging.getLogger("cosmati")
_CALLS = ("label", "where", "rewrites", "open", "log", "summary", "artifact", "supersede", "close")


class Tracking(Observer):
    """Send losses, what monitors measure, metrics and checkpoints to a tracker.

    The training thread puts what is due into a bounded queue, and a thread sends it. Where the queue is full, values
    are dropped and counted; where the tracker fails, this is logged once, and tracking ends. Neither ends the run.

    Args:
        tracker: where to; or in words, as `tracker_of` reads them.
        every: steps between losses; each reads loss and gradient norm from the device.
        capacity: of the queue, in calls.
        patience_seconds: how long the end of the run waits for what is still in the queue.

    Attributes:
        num_dropped: calls of the last run that found the queue full.
        problem: what ended tracking, empty where nothing did.

    Raises:
        ValueError: a number that can't be.
        RunError: no tracker.
    """

    def __init__(
        self, tracker: Tracker | str, *, every: int = 10, capacity: int = 1000, patience_seconds: float = 30.0
    ) -> None:
        if not (every >= 1 and capacity >= 1 and 0 <= patience_seconds <= threading.TIMEOUT_MAX):
            msg = (
                f"Tracking(every={every}, capacity={capacity}, patience_seconds={patience_seconds}): every and "
                "capacity are at least 1, and patience_seconds isn't negative, and finite."
            )
            raise ValueError(msg)
        tracker = tracker_of(tracker) if isinstance(tracker, str) else tracker
        missing = [name for name in _CALLS if not hasattr(tracker, name)]
        if missing or isinstance(tracker, type):
            msg = (
                f"Tracking({tracker!r}) is given no tracker: it has no {', '.join(missing) or 'instance'}. Give one of "
                "cosmati.integrations, tracker_of('tensorboard') for one, or see cosmati.integrations.Tracker."
            )
            raise RunError(msg)
        self.every = every
        self.num_dropped = 0
        self.problem = ""
        self._tracker = tracker
        self._patience = patience_seconds
        self._capacity = capacity
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self._is_on = False
        self._run: WatchedRun | None = None
        self._metrics: Mapping[str, float] = {}
        self._first_seconds = 0.0

    def on_open(self, run: WatchedRun) -> None:
        """Keep the run; one rank speaks for all."""
        self._run = run if run.rank == 0 else None

    def on_start(self, clock: Clock, budget: Budget) -> None:
        """Start the thread, open the attempt, and say which earlier ones it supersedes."""
        if self._run is None:
            return
        self.num_dropped, self.problem, self._metrics = 0, "", {}
        if self._thread is not None and self._thread.is_alive():
            self._tell("a call of the run before hasn't returned yet")
            return
        self._is_on, self._first_seconds = True, clock.seconds
        self._calls = queue.Queue(self._capacity)
        given = (self._calls,)
        self._thread = threading.Thread(
            target=self._work, args=given, name=f"cosmati-{self._tracker.label}", daemon=True
        )
        self._thread.start()
        self._put(partial(self._open, self._run, clock.step))

    def _open(self, run: WatchedRun, first_step: int) -> None:
        name, config = TrackedRun(run.facts.recipe, f"{time.time_ns():032x}"), {}
        if run.folder is not None:
            record, name = run_of(run.folder)
            config = dict(config_of(record))
        sent = {} if run.folder is None else sent_to(run.folder, self._tracker)
        for attempt, from_step in run.superseded.items():
            # To tag one that isn't there would make an empty run, which `track` would take for one that is.
            if attempt not in sent:
                continue
            if self._tracker.supersede(name, attempt, from_step):
                self._note(run, attempt, replace(sent[attempt], superseded=from_step))
            else:
                _LOG.warning(
                    "%s can't be told here that attempt %d was superseded from step %d: `cosmati track` into another "
                    "project shows it.",
                    self._tracker.label,
                    attempt,
                    from_step,
                )
        if run.folder is not None:
            try_to_note(run.folder)
        self._tracker.open(name, run.attempt, first_step, config)
        self._note(run, run.attempt, Sent(last_step=None, is_whole=False))

    def _note(self, run: WatchedRun, attempt: int, sent: Sent) -> None:
        if run.folder is not None:
            note_sent(run.folder, self._tracker, attempt, sent)

    def on_step(self, outcome: StepOutcome) -> None:
        """Send loss, learning rate and gradient norm."""
        if self._is_off():
            return
        values = {} if "loss" in outcome.withheld else {"loss": float(outcome.loss)}
        if "norms" not in outcome.withheld:
            values["gradient_norm"] = outcome.gradient_norm()
        if outcome.learning_rates:
            values["learning_rate"] = outcome.learning_rates[0]
        self._log(outcome.clock.step, values, outcome.clock.seconds)

    def on_values(self, clock: Clock, values: Mapping[str, float]) -> None:
        """Send what monitors have measured."""
        if not self._is_off():
            self._log(clock.step, dict(values), clock.seconds)

    def on_evaluation(self, clock: Clock, metrics: Mapping[str, float], seconds: float) -> None:
        """Send metrics."""
        self._metrics = metrics
        if not self._is_off():
            self._log(clock.step, {f"evaluation/{name}": value for name, value in metrics.items()}, seconds)

    def on_checkpoint(self, clock: Clock, state_digest: bytes, parameter_root: bytes) -> None:
        """Send a checkpoint's place and the Merkle root of its weights."""
        if not self._is_off() and self._run is not None and self._run.folder is not None:
            path = Path(self._run.folder) / "checkpoints" / f"step-{clock.step:08d}"
            self._put(partial(self._tracker.artifact, path, f"merkle:{parameter_root.hex()}"))

    def on_end(self, clock: Clock, ended: str) -> None:
        """Wait for the thread, for as long as patience lasts."""
        if self._thread is None or self._run is None or not self._is_on:
            return
        until = time.monotonic() + self._patience
        if not self._is_off():
            try:
                self._calls.put(partial(self._close, self._run, ended), timeout=self._patience)
                self._calls.put(None, timeout=max(0.0, until - time.monotonic()))
            except queue.Full:
                self._tell("it took nothing any more")
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"it hadn't ended {self._patience:g} s after the run")
        if self.num_dropped:
            _LOG.warning("%s was too slow: %d calls were dropped.", self._tracker.label, self.num_dropped)
        self._is_on = False

    def _close(self, run: WatchedRun, ended: str) -> None:
        self._tracker.summary(finite(self._metrics))
        self._tracker.close(ended)
        self._note(run, run.attempt, Sent(last_step=None, is_whole=True))

    def _is_off(self) -> bool:
        return not self._is_on or bool(self.problem)

    def _log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        if self._run is not None:
            # As `track` works it out, to the last bit: MLflow knows a value that is sent twice by its time.
            at = self._run.started + max(0.0, seconds - self._first_seconds)
            self._put(partial(self._send, step, values, at))

    def _send(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._tracker.log(step, finite(values), at)

    def _put(self, call: Callable[[], object]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.num_dropped += 1

    def _work(self, calls: queue.Queue[Callable[[], object] | None]) -> None:
        while (call := calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  (a tool of somebody else's; some raise SystemExit)
                named = "" if isinstance(error, CosmatiError) else f"{type(error).__name__}: "
                self._tell(f"{named}{error}")
                return

    def _tell(self, problem: str) -> None:
        """Log the first problem; a warning would be an error under `-W error`, and end the run."""
        if not self.problem:
            self.problem = problem
            _LOG.warning("Tracking by %s has ended, and the run goes on: %s", self._tracker.label, problem)
