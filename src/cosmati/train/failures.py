"""Where a rank fails at a microbatch of its own, all refuse the step: each tells it beside the gradients."""

from __future__ import annotations

from collections.abc import Sequence

from cosmati.errors import OutOfMemoryError
from cosmati.train.all_ranks import raise_together
from cosmati.train.collectives import refuse_unmet
from cosmati.train.leaf_facts import NO_LEAF, LeafFacts
from cosmati.train.ranks import Ranks

SHORT, ALONE, FAILED = 1.0, 2.0, 3.0
"""Memory was too short; it would have waited for ranks that don't run it; whatever else."""
RAN_ALONE = NO_LEAF._replace(failure=ALONE)


def failed(failure: Exception) -> LeafFacts:
    """Return what a microbatch tells of which, or before which, its rank has failed."""
    return NO_LEAF._replace(failure=SHORT if isinstance(failure, OutOfMemoryError) else FAILED)


def refuse_failed(ranks: Ranks, told: Sequence[float], failure: Exception | None) -> None:
    """Refuse a step of which a microbatch has failed: on all ranks, for the same reason.

    Args:
        ranks: all of them.
        told: of each microbatch, its `LeafFacts.failure`.
        failure: of this rank.

    Raises:
        OutOfMemoryError: a rank's memory is too short.
        PlanError: some ranks run code that waits for the others.
        RunError: another rank has failed at something else; it says at what. That rank raises what it was.
    """
    if FAILED in told:
        raise_together(ranks, None if isinstance(failure, OutOfMemoryError) else failure)
    if ALONE in told:
        refuse_unmet()
    if SHORT in told:
        raise OutOfMemoryError(str(failure or "on another rank"))
