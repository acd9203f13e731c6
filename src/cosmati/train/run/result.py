"""How a run ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cosmati.core.clock import Clock
from cosmati.errors import DivergenceError
from cosmati.provenance.authority.errors import NoLongerVouchedError


def outcome_of(error: type[BaseException]) -> str:
    """Return how a run has ended that an error has ended."""
    if issubclass(error, NoLongerVouchedError):
        return "stopped"
    return "diverged" if issubclass(error, DivergenceError) else "failed"


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        outcome: `completed`, or `stopped` by Ctrl-C, SIGTERM or an observer; in the
            record also `diverged` and `failed`.
        clock: where it stands.
        metrics: of the last evaluation.
        seconds: of training, without evaluation and checkpoints.
        seconds_by_part: host seconds by part of a step.
        run_folder: where it is kept.
        reason: why it was stopped, where an observer asked for it; empty for Ctrl-C, SIGTERM and `trainer.stop()`.
        never_offered: rows by class that a loop of the user's own gave while the policy deferred them, and not again.
    """

    outcome: str
    clock: Clock
    metrics: Mapping[str, float]
    seconds: float
    seconds_by_part: Mapping[str, float]
    run_folder: Path | None
    reason: str = ""
    never_offered: Mapping[str, int] = field(default_factory=dict)
