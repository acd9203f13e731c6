"""The states of a job, and which follows which."""

from __future__ import annotations

from enum import StrEnum


class LaunchState(StrEnum):
    """Where a job stands."""

    PENDING = "PENDING"
    """Asked for; waits for its supervisor, or for the next try after a failure."""
    QUEUED = "QUEUED"
    """Waits for ranks that others have, or for a scheduler's machines."""
    STARTING = "STARTING"
    """Its processes begin: no step of this attempt is known yet."""
    RUNNING = "RUNNING"
    TERMINATING = "TERMINATING"
    """Is asked to end, and writes its checkpoint."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    """Ended because somebody asked for it, which is no failure: it can be resumed."""


ENDED = frozenset({LaunchState.COMPLETED, LaunchState.FAILED, LaunchState.STOPPED})
ACTIVE = frozenset({LaunchState.STARTING, LaunchState.RUNNING, LaunchState.TERMINATING})
"""It has processes."""

FOLLOWS: dict[LaunchState, frozenset[LaunchState]] = {
    LaunchState.PENDING: frozenset({LaunchState.QUEUED, LaunchState.FAILED, LaunchState.STOPPED}),
    LaunchState.QUEUED: frozenset({LaunchState.STARTING, LaunchState.PENDING, LaunchState.FAILED, LaunchState.STOPPED}),
    LaunchState.STARTING: frozenset({LaunchState.RUNNING, LaunchState.PENDING, LaunchState.TERMINATING, *ENDED}),
    LaunchState.RUNNING: frozenset({LaunchState.PENDING, LaunchState.TERMINATING, *ENDED}),
    LaunchState.TERMINATING: frozenset({LaunchState.PENDING, *ENDED}),
    LaunchState.COMPLETED: frozenset(),
    LaunchState.FAILED: frozenset({LaunchState.PENDING}),
    LaunchState.STOPPED: frozenset({LaunchState.PENDING}),
}
"""Each move is made by one who names the state that he found: whoever comes second is refused."""
