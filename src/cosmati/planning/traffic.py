"""How many bytes a rank sends in a step, and how deep the tree of gradients is."""

from __future__ import annotations

from dataclasses import dataclass

from cosmati.planning.measuring import MeasuredParts
from cosmati.planning.memory import leaves_of, ranks_of_a_copy
from cosmati.train.config import Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that a rank sends in a step.

    Attributes:
        gradients: to be summed.
        results: summed gradients, or parameters that follow from them, back to everybody.
        gathers: parameters for forward and backward, where each rank holds a part of them.
    """

    gradients: int
    results: int
    gathers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.results + self.gathers


def traffic_of(parts: MeasuredParts, ranks: int, sharding: Sharding, shards: int | None = None) -> Traffic:
    """Return what a rank sends in a step.

    Microbatches lie together on a rank (consecutive), so that a whole subtree is folded before anything is sent: as
    many bytes as a ring's all-reduce, 2 P (W - 1) / W. Under full sharding each microbatch is reduced at once, and
    parameters are gathered for its forward and for its backward pass: among the ranks that hold a copy together. What
    these have summed goes once a pass over those that hold the same part, as in a ring.

    Args:
        parts: as measured.
        ranks: W, which divides V.
        sharding: see `memory_of`.
        shards: see `memory_of`.

    Raises:
        PlanError: W doesn't divide V.
    """
    leaves = leaves_of(parts.num_microbatches, ranks)
    passes = 2 if parts.again else 1
    if sharding == "full":
        own = ranks_of_a_copy(ranks, sharding, shards)
        over_replicas = passes * ring_share(-(-parts.gradients // own), ranks // own)
        reduced = passes * leaves * ring_share(parts.gradients, own)
        sent = parts.parameters if parts.gathered is None else parts.gathered
        gathers = passes * 2 * leaves * ring_share(sent, own)
        return Traffic(gradients=reduced + over_replicas, results=over_replicas, gathers=gathers)
    back = parts.gradients if sharding == "replicated" else parts.learning
    return Traffic(gradients=passes * ring_share(parts.gradients, ranks), results=passes * ring_share(back, ranks))


def strided_bytes(gradients: int, num_microbatches: int, ranks: int) -> int:
    """Return what a rank sends where each microbatch is reduced at once and the sum gathered at the end of the step.

    That's (V / W + 1) P (W - 1) / W: what it costs to have microbatches r, r + W, ... on rank r.

    Args:
        gradients: bytes of one copy, P.
        num_microbatches: V.
        ranks: W, which divides V.

    Raises:
        PlanError: W doesn't divide V.
    """
    return (leaves_of(num_microbatches, ranks) + 1) * ring_share(gradients, ranks)


def ring_share(size: int, ranks: int) -> int:
    """Return what a rank sends of a tensor of so many bytes that everybody has a part in: all but its own part."""
    return size * (ranks - 1) // ranks


def tree_levels(num_microbatches: int, ranks: int) -> tuple[int, int]:
    """Return how many levels of the tree lie within a rank, and how many across ranks: log2(V) together.

    Raises:
        PlanError: W doesn't divide V.
    """
    leaves = leaves_of(num_microbatches, ranks)
    return leaves.bit_length() - 1, ranks.bit_length() - 1
