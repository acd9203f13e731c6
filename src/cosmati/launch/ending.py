"""How an attempt has ended, by what its engine says of it and by the record of its run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from cosmati.errors import RunError
from cosmati.launch.engine import AttemptStanding
from cosmati.launch.watch import RunProgress
from cosmati.records.run import RunRecord

WHOLE = ("completed", "exhausted")
"""Outcomes of a run that has nothing left to do."""


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """How an attempt has ended.

    Attributes:
        outcome: `completed`, `stopped`, `failed` or `stalled`.
        reason: in words.
        place: that failed first.
        own_fault: an error of the program, which ends the job where no attempt has come to a step.
        is_final: it would end so again.
    """

    outcome: str
    reason: str = ""
    place: str = ""
    own_fault: bool = False
    is_final: bool = False


def end_of(standing: AttemptStanding, progress: RunProgress, *, asked: bool) -> EndedAttempt:
    """Return how an attempt has ended.

    Args:
        standing: its engine's last word.
        progress: of its run.
        asked: it was asked to stop.
    """
    outcome = outcome_of(progress)
    if standing.status == 0 and outcome in WHOLE:
        return EndedAttempt("completed")
    if asked:
        return EndedAttempt("stopped", f"it failed while it was stopped: {standing.reason}" if standing.status else "")
    if outcome == "stopped":
        return EndedAttempt("stopped", "its process was asked to stop")
    if outcome == "diverged":
        return EndedAttempt("failed", "the run has diverged, and would do so again", is_final=True)
    if standing.status == 0:
        return (
            EndedAttempt("failed", "the run has failed, and its program ended well", own_fault=True)
            if outcome
            else EndedAttempt("completed")
        )
    own, again = standing.own_fault, standing.is_final
    return EndedAttempt("failed", standing.reason or "ended without a word", standing.place, own, again)


def outcome_of(progress: RunProgress) -> str:
    """Return the outcome that this attempt has put on record; empty where it has none."""
    if progress.run is None or progress.first_step is None:
        return ""
    with contextlib.suppress(OSError, ValueError, RunError):
        outcome = RunRecord.from_json((Path(progress.run.folder) / "run.json").read_text()).outcome
        return "" if outcome == "running" else outcome
    return ""
