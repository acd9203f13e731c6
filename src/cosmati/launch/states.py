"""The states of a job, and which follows which."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
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


ENDED = frozenset({State.COMPLETED, State.FAILED, State.STOPPED})
ACTIVE = frozenset({State.STARTING, State.RUNNING, State.TERMINATING})
"""It has processes."""

FOLLOWS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.QUEUED, State.FAILED, State.STOPPED}),
    State.QUEUED: frozenset({State.STARTING, State.PENDING, State.FAILED, State.STOPPED}),
    State.STARTING: frozenset({State.RUNNING, State.PENDING, State.TERMINATING, *ENDED}),
    State.RUNNING: frozenset({State.PENDING, State.TERMINATING, *ENDED}),
    State.TERMINATING: frozenset({State.PENDING, *ENDED}),
    State.COMPLETED: frozenset(),
    State.FAILED: frozenset({State.PENDING}),
    State.STOPPED: frozenset({State.PENDING}),
}
"""Each move is made by one who names the state that he found: whoever comes second is refused."""
