"""Quick answers about what was measured of learning beside norms: directions, entropies, updates, digests."""

from __future__ import annotations

from dataclasses import dataclass

from cosmati.ledger.derived.opened import DerivedLedger
from cosmati.ledger.derived.views import make_views


@dataclass(frozen=True, slots=True)
class ClassLearning:
    """What was measured of a class in a region, over the steps that stand.

    Attributes:
        class_name: The class.
        region: The region.
        num_directions: Gradients of its microbatches whose direction was logged.
        along_update: Mean cosine of these with what the same step's update took away, as their sketches estimate it:
            1 where the region was moved down the class's gradient alone. None where no such step has both.
        num_entropies: Microbatches whose entropy was logged.
        first_entropy: Mean over the first such step's, in nats; None without any.
        last_entropy: Over the last one's.
    """

    class_name: str
    region: str
    num_directions: int
    along_update: float | None
    num_entropies: int
    first_entropy: float | None
    last_entropy: float | None


@dataclass(frozen=True, slots=True)
class RegionMoves:
    """What was measured of a region's parameters, over the steps that stand.

    Attributes:
        region: The region.
        num_updates: Steps whose update was logged.
        mean_update: Mean norm of these; None without any.
        num_digests: Steps with digests before and after.
        broken_after: Steps after which the next one, also with digests, didn't find what they had left: something else
            has changed the parameters in between.
    """

    region: str
    num_updates: int
    mean_update: float | None
    num_digests: int
    broken_after: tuple[int, ...]


_DIRECTIONS = """
    SELECT class, region, count(*), avg(-list_cosine_similarity(d.direction, u.direction))
    FROM directions d LEFT JOIN (SELECT * FROM updates WHERE direction IS NOT NULL) u USING (entry, region)
    WHERE d.stands GROUP BY ALL
"""
_ENTROPIES = """
    SELECT class, region, count(*), avg(entropy) FILTER (step = first), avg(entropy) FILTER (step = last)
    FROM (SELECT *, min(step) OVER w AS first, max(step) OVER w AS last
          FROM entropies WHERE stands WINDOW w AS (PARTITION BY class, region))
    GROUP BY ALL
"""
_UPDATES = "SELECT region, count(norm), avg(norm), count(after) FROM updates WHERE stands GROUP BY ALL"
_BROKEN = """
    SELECT a.region, a.step FROM updates a JOIN updates b ON b.region = a.region AND b.step = a.step + 1
    WHERE a.stands AND b.stands AND a.policy_epoch = b.policy_epoch AND a.after <> b.before ORDER BY ALL
"""


def learning(derived: DerivedLedger) -> tuple[ClassLearning, ...]:
    """Return what was measured of each class in each region, where anything was."""
    make_views(derived)
    directions = {(row[0], row[1]): row[2:] for row in derived.rows(_DIRECTIONS)}
    entropies = {(row[0], row[1]): row[2:] for row in derived.rows(_ENTROPIES)}
    return tuple(
        ClassLearning(name, region, *directions.get((name, region), (0, None)), *entropies.get((name, region), _NONE))
        for name in derived.classes
        for region in derived.regions
        if (name, region) in {*directions, *entropies}
    )


_NONE = (0, None, None)


def region_moves(derived: DerivedLedger) -> tuple[RegionMoves, ...]:
    """Return what was measured of each region's parameters, where anything was."""
    make_views(derived)
    broken = derived.rows(_BROKEN)
    found = {
        region: RegionMoves(region, updates, mean, digests, tuple(step for name, step in broken if name == region))
        for region, updates, mean, digests in derived.rows(_UPDATES)
    }
    return tuple(found[region] for region in derived.regions if region in found)
