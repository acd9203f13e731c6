"""Where a rank fails at a microbatch of its own, all refuse the step: each tells it beside the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from cosmati.errors import CosmatiError, OutOfMemoryError
from cosmati.train.all_ranks import raise_together
from cosmati.train.collectives import refuse_unmet
from cosmati.train.leaf_facts import NO_LEAF, LeafFacts
from cosmati.train.ranks import Ranks

SHORT, ALONE, FAILED = 1.0, 2.0, 3.0
"""Memory was too short; it would have waited for ranks that don't run it; whatever else."""
RAN_ALONE = NO_LEAF._replace(failure=ALONE)


class Failure:
    """What this rank has failed at in a pass over its microbatches, if at anything; stands around the pass.

    Where the others can't be told, since they wait in code of the user's own, it's raised and not how that ends.

    Args:
        error: at which it has failed before.
    """

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise it where telling it has failed."""
        own, self.error = self.error, None  # Or it would be held by its own frames, with what didn't fit.
        if (
            own is not None
            and error is not own
            and isinstance(error, Exception)
            and not isinstance(error, CosmatiError)
        ):
            raise own from error

    def facts(self, found: LeafFacts) -> LeafFacts:
        """Return what a microbatch tells of which, or before which, this rank has failed; `found` where it hasn't."""
        if self.error is None:
            return found
        return NO_LEAF._replace(failure=SHORT if isinstance(self.error, OutOfMemoryError) else FAILED)

    def refuse(self, ranks: Ranks, told: Sequence[float]) -> None:
        """Refuse a step of which a microbatch has failed: on all ranks, for the same reason.

        Args:
            ranks: all of them.
            told: of each microbatch, its `LeafFacts.failure`.

        Raises:
            OutOfMemoryError: a rank's memory is too short.
            PlanError: some ranks run code that waits for the others.
            RunError: another rank has failed at something else; it says at what. That rank raises what it was.
        """
        if FAILED in told:
            raise_together(ranks, None if isinstance(self.error, OutOfMemoryError) else self.error)
        if ALONE in told:
            refuse_unmet()
        if SHORT in told:
            raise OutOfMemoryError(str(self.error or "on another rank"))
