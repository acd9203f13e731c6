"""The order of streamed rows, as pure functions of seed and position.

permutation.py   a keyed bijection without a table
shards.py        a source's rows: shards permuted, rows permuted within windows of shards
interleave.py    groups in exact proportion, with random access
mixture.py       position -> source, epoch, index: repeats, curricula
plan.py          step and microbatch -> rows: route-pure, tails
quality.py       how well an order shuffles, and what its caches would download
"""

from cosmati.data.order.interleave import Interleave, PhasedInterleave, Stretch
from cosmati.data.order.mixture import Group, Mixture
from cosmati.data.order.permutation import permute
from cosmati.data.order.plan import PlannedRows, RoutePlan, Tail
from cosmati.data.order.quality import CacheUse, ShuffleQuality, shuffle_quality, simulate_cache
from cosmati.data.order.shards import ShardOrder

__all__ = [
    "CacheUse",
    "Group",
    "Interleave",
    "Mixture",
    "PhasedInterleave",
    "PlannedRows",
    "RoutePlan",
    "ShardOrder",
    "ShuffleQuality",
    "Stretch",
    "Tail",
    "permute",
    "shuffle_quality",
    "simulate_cache",
]
