"""What was asked for, and what has become of it: the rows of the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cosmati.launch.engine import RankProgram
from cosmati.launch.states import LaunchState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What is asked of the launcher.

    Attributes:
        name: the beginning of the job's id.
        program: what every rank runs.
        ranks: how many.
        priority: higher ones start first; among equals the older one.
        max_seconds: of its attempts together, after which it's stopped; None without an end.
        retries: failures in a row, none of which got further than the job had been, before it's given up.
        backoff_seconds: before the first try after a failure; doubled for each failure in a row, up to five minutes.
        patience: the watchdog's: how many times the median step may pass without one.
        min_silence_seconds: that the watchdog lets pass in any case.
        start_seconds: that an attempt may take to its first step.
        engine: that carries it out.
        settings: the engine's own.
        run_folder: where it trains, as far as the launcher was told; empty where the program says it.
    """

    name: str
    program: RankProgram
    ranks: int = 1
    priority: int = 0
    max_seconds: float | None = None
    retries: int = 5
    backoff_seconds: float = 5.0
    patience: float = 30.0
    min_silence_seconds: float = 120.0
    start_seconds: float = 1800.0
    engine: str = "local"
    settings: Mapping[str, str] = field(default_factory=dict)
    run_folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedJob:
    """A job as it stands.

    Attributes:
        id: its name and a number.
        request: what was asked for.
        state: where it stands.
        wish: `stop` where somebody has asked for its end; empty otherwise.
        reason: why it ended, or waits, in words.
        created: seconds since 1970; for people, never for durations.
        seconds: that its attempts have run together.
        step: the last one known of the run, None before the first.
        best_step: the furthest that it has ever been.
        num_steps: of the whole run, None where that isn't known.
        step_seconds: median time of a step, None before it's known.
        num_microbatches: V, which the number of replicas of T ranks divides; None before it's known.
        tensor_parallel: T, as far as it's known.
        failures: in a row, none of which got further.
        run_folder: where it trains; empty before it's known.
    """

    id: str
    request: JobRequest
    state: LaunchState
    wish: str
    reason: str
    created: float
    seconds: float
    step: int | None
    best_step: int
    num_steps: int | None
    step_seconds: float | None
    num_microbatches: int | None
    tensor_parallel: int
    failures: int
    run_folder: str

    @property
    def seconds_left(self) -> float | None:
        """Seconds to its estimated end; None where nobody knows."""
        if self.step is None or self.num_steps is None or self.step_seconds is None:
            return None
        left = max(0, self.num_steps - self.step) * self.step_seconds
        limit = self.request.max_seconds
        return left if limit is None else min(left, max(0.0, limit - self.seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAttempt:
    """One attempt of a job; those after the first are its resumptions.

    Attributes:
        number: from 0.
        started: seconds since 1970.
        seconds: that it has run.
        ranks: it has trained with.
        idle: ranks that could have run, and didn't, because their number has to divide V.
        outcome: `completed`, `stopped`, `failed`, `stalled` or `lost` (with its supervisor); empty while it goes on.
        reason: in words.
        place: that failed first, where that's known.
        handle: the engine's.
        first_step: commits before it, None where that isn't known.
        last_step: the last one known of it.
    """

    number: int
    started: float
    seconds: float = 0.0
    ranks: int
    idle: int = 0
    outcome: str = ""
    reason: str = ""
    place: str = ""
    handle: str = ""
    first_step: int | None = None
    last_step: int | None = None


def folder_of(home: Path, job_id: str) -> Path:
    """Return where a job's logs are."""
    return home / "jobs" / job_id


def attempt_folder(home: Path, job_id: str, number: int) -> Path:
    """Return where an attempt's logs and notes are."""
    return folder_of(home, job_id) / f"attempt-{number}"
