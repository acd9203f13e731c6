"""How much memory a rank needs, by part, at the moments when a step needs most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from cosmati.errors import PlanError
from cosmati.optim.sharing import assign_owners
from cosmati.planning.measuring import MeasuredParts
from cosmati.train.config import RunConfig, Sharding

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
_GATHERED_BLOCKS = 2
"""The one that computes, and the next one, which is fetched meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of a rank.

    Attributes:
        backward: by part, as the last microbatch is differentiated.
        commit: by part, as the optimizers step.
        look: by part, as it's seen what passes have changed: in steps 0, 1, 2, 4, 8 and so on.
        change: by part, as methods change the last microbatch's rows.
    """

    backward: Mapping[str, int]
    commit: Mapping[str, int]
    look: Mapping[str, int]
    change: Mapping[str, int]

    @property
    def moments(self) -> Mapping[str, Mapping[str, int]]:
        """All of them, in words."""
        return {
            "in backward": self.backward,
            "at commit": self.commit,
            "at a look": self.look,
            "rows change": self.change,
        }

    @property
    def total(self) -> int:
        """The most that is needed at a time."""
        return _total(self.parts)

    @property
    def parts(self) -> Mapping[str, int]:
        """By part, at the moment that needs most."""
        return max(self.moments.values(), key=_total)


def leaves_of(num_microbatches: int, ranks: int) -> int:
    """Return how many of a step's microbatches a rank runs.

    Raises:
        PlanError: the number of ranks doesn't divide V.
    """
    if ranks < 1 or num_microbatches % ranks:
        below = max(w for w in divisors(num_microbatches) if w <= max(1, ranks))
        is_power = ranks > 0 and ranks & (ranks - 1) == 0
        larger = f", or cut a step finer: --set config.num_microbatches={ranks}" if is_power else ""
        msg = (
            f"{ranks} ranks can't share V = {num_microbatches} microbatches: the number of ranks has to divide V, a "
            f"power of two. Take --ranks {below}{larger}."
        )
        raise PlanError(msg)
    return num_microbatches // ranks


def divisors(num_microbatches: int) -> list[int]:
    """Return the numbers of ranks that a step can be shared out to: powers of two up to V."""
    return [1 << power for power in range(num_microbatches.bit_length())]


def gradient_copies(num_leaves: int) -> int:
    """Return how many copies of the gradients a tree over a rank's leaves has at most.

    The second leaf of a pair is added to the first one's memory. So that's log2 of the leaves, the one of plain
    accumulation among them: log2(V) - 1 beside it where one rank runs all V.
    """
    return max(1, num_leaves.bit_length() - 1)


def ranks_of_a_copy(ranks: int, sharding: Sharding, shards: int | None) -> int:
    """Return over how many ranks what is cut lies.

    Args:
        ranks: W.
        sharding: see `memory_of`.
        shards: with full sharding, the ranks that hold one copy together; None for all.

    Raises:
        PlanError: shards are given where it isn't full sharding, or their number is no power of two.
    """
    RunConfig(sharding=sharding, shard_ranks=shards)  # refuses what can't be
    return 1 if sharding == "replicated" else min(shards or ranks, ranks)


def memory_of(parts: MeasuredParts, ranks: int, sharding: Sharding, shards: int | None = None) -> MemoryPlan:
    """Return what a rank needs.

    Args:
        parts: as measured.
        ranks: W, which divides V.
        sharding: what is held by one rank only: nothing, optimizer state, or parameters and gradients too.
        shards: see `ranks_of_a_copy`.

    Raises:
        PlanError: W doesn't divide V, or shards can't be.
    """
    cut = ranks_of_a_copy(ranks, sharding, shards)
    plans = [_plan(point, ranks, sharding, cut) for point in parts.points]
    backward, commit, look, change = (max(found, key=_total) for found in zip(*plans, strict=True))
    return MemoryPlan(backward=backward, commit=commit, look=look, change=change)


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _plan(parts: MeasuredParts, ranks: int, sharding: Sharding, cut: int) -> tuple[Mapping[str, int], ...]:
    """Return what a rank needs at each moment, by part."""
    leaves = leaves_of(parts.num_microbatches, ranks)
    sharding = "replicated" if ranks == 1 else sharding  # One rank holds everything.
    whole = cut if sharding == "full" else 1  # Over how many ranks weights lie.
    state = parts.state if cut == 1 else -(-parts.state_cut // cut) + _heaviest(parts.state_whole, cut)
    beside = parts.beside
    always = {
        "parameters": -(-parts.parameters // whole),
        "optimizer state": state,
        "averages": -(-parts.averages // whole),
        "buffers": parts.buffers,
        "held by losses": beside.losses,
        "to put back": beside.put_back + (-(-parts.learning // whole) + state if beside.has_undo else 0),
        "rows": leaves * parts.rows,
        "changed rows": leaves * parts.changed,
    }
    activations = parts.activations if leaves > 1 or sharding == "full" else parts.first_activations
    if sharding == "full":
        gathered = min(parts.parameters, parts.outside_blocks + _GATHERED_BLOCKS * parts.largest_block)
        always["gathered parameters"] = gathered
        shard = -(-parts.gradients // cut)
        # Strided: every microbatch is reduced at once, so the tree's copies are shards; gathered blocks' leaf is whole.
        whole_leaf = gathered * parts.gradients // max(1, parts.learning)
        gradients, root, exchange = gradient_copies(2 * leaves) * shard + whole_leaf, shard, 0
    else:
        gradients, root = _gradients(parts, leaves, activations), parts.learning if parts.is_plain else parts.gradients
        exchange = 2 * parts.gradients if ranks > 1 else 0  # What is sent, and what is received.
        root = -(-root // cut)
    # Then only what holds the gathered sum is left beside this rank's share of it, or the other way round.
    left = {"replicated": parts.gradients // ranks, "optimizer": parts.gradients, "full": 0}[sharding]
    left = left if ranks > 1 else 0
    again = {"second pass": -(-parts.again // whole)} if parts.again else {}
    # Where passes read rounded weights, who holds whole ones saves them for so long.
    again |= {"saved weights": parts.parameters} if parts.gathered is not None and sharding != "full" else {}
    backward = {**always, "gradients": gradients, "exchange": exchange, **again, "activations": activations}
    narrowed = 0 if parts.is_plain else -(-parts.narrow // cut)  # As the optimizers take them.
    commit = {**always, "gradients": root + narrowed, "exchange": left, "commit": -(-parts.commit // cut)}
    # The last pair's, which were widened, are still there.
    seen = root + (0 if parts.is_plain or whole > 1 else min(2, leaves.bit_length() - 1) * parts.widened)
    compared = max(beside.look, -(-beside.look_cut // whole))
    look = {**always, "gradients": seen, "exchange": left, **again, "look": compared}
    change = {**always, "changing": max(0, parts.changing - parts.changed)}
    return backward, commit, look, change


def _gradients(parts: MeasuredParts, leaves: int, activations: int) -> int:
    """Return the most bytes of gradients beside a microbatch's activations, on a rank that holds parameters whole.

    Narrow ones (bfloat16) are widened one by one after each backward pass, as its activations are gone, and added to
    those that wait: what that takes beyond activations counts here.
    """
    if parts.is_plain:
        return parts.learning
    waiting = leaves.bit_length() - 1
    last = max(parts.narrow, parts.widened + parts.largest_narrow - activations) if parts.narrow else 0
    return gradient_copies(leaves) * (parts.gradients - parts.widened) + waiting * parts.widened + last


def _heaviest(sizes: tuple[int, ...], ranks: int) -> int:
    """Return the bytes of the rank that owns most, where whole matrices are dealt out, the largest first."""
    loads = [0] * ranks
    for size, owner in zip(sizes, assign_owners([float(size) for size in sizes], ranks), strict=True):
        loads[owner] += size
    return max(loads)
