"""What an order is worth before anything is read: how well it shuffles, and what a cache would download.

These figures help to choose `window_rows`; nothing here decides the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cosmati.data.order.interleave import Ints
from cosmati.data.order.shards import ShardOrder
from cosmati.errors import DataError

_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """How an order compares with a full shuffle of all rows; each figure stands beside what that would give.

    Attributes:
        displacement: mean distance of a row from where it was written, as a share of all rows. Shuffling shards alone
            can bring it to a full shuffle's: look at the neighbours too.
        displacement_of_full_shuffle: about 1/3.
        same_shard: share of neighbours in the order that are of one shard.
        same_shard_of_full_shuffle: about 1 / number of shards.
        num_pairs: neighbours that were looked at, evenly spread.
    """

    displacement: float
    displacement_of_full_shuffle: float
    same_shard: float
    same_shard_of_full_shuffle: float
    num_pairs: int


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the caches of all ranks go through.

    Attributes:
        downloads: of each rank, with least-recently-used eviction.
        distinct: shards that each rank reads: `downloads` can't be below.
        peak: most shards at once that a rank has begun and not finished: a cache that knew the future would download
            each shard once with room for these; one that evicts the least recently used may need more.
        num_rows: how many rows were gone through, over all ranks.
    """

    downloads: tuple[int, ...]
    distinct: tuple[int, ...]
    peak: int
    num_rows: int


def shuffle_quality(order: ShardOrder, *, epoch: int = 0, max_pairs: int = 1 << 18) -> ShuffleQuality:
    """Compare one epoch of an order with a full shuffle.

    Args:
        order: of one source.
        epoch: which.
        max_pairs: neighbours to look at; all of them, where there are no more.

    Raises:
        DataError: there are fewer than two rows, or `max_pairs` is below 1.
    """
    shard_rows, total = order.shard_rows, order.num_rows
    if total < 2 or max_pairs < 1:
        raise DataError(
            f"{total} rows and max_pairs={max_pairs}: there is nothing to compare. Give 2 rows and 1 pair, or more."
        )
    num_pairs = min(total - 1, max_pairs)
    first_of_shard = np.cumsum(shard_rows) - shard_rows
    distance = same = 0
    for low in range(0, num_pairs, _CHUNK):
        picked = np.arange(low, min(low + _CHUNK, num_pairs))
        # As positions * (total - 1) // num_pairs, without the product.
        positions = picked * ((total - 1) // num_pairs) + picked * ((total - 1) % num_pairs) // num_pairs
        shards, rows = order.locate(epoch, positions)
        after, _ = order.locate(epoch, positions + 1)
        distance += int(np.abs(first_of_shard[shards] + rows - positions).sum())
        same += int(np.count_nonzero(shards == after))
    pairs_of_one_shard = sum(n * (n - 1) for n in shard_rows.tolist())
    return ShuffleQuality(
        displacement=distance / (num_pairs * total),
        displacement_of_full_shuffle=(total * total - 1) / (3 * total * total),
        same_shard=same / num_pairs,
        same_shard_of_full_shuffle=pairs_of_one_shard / (total * (total - 1)),
        num_pairs=num_pairs,
    )


def simulate_cache(
    order: ShardOrder, *, world: int, cache_shards: int, epoch: int = 0, max_rows: int = 1 << 20
) -> CacheUse:
    """Go through an epoch as ranks would, each with a cache of its own, without reading anything.

    Rank r of W reads the positions r, r + W, r + 2W and so on. For ranks that share a cache, let `world` be the number
    of caches.

    Args:
        order: of one source.
        world: number of ranks.
        cache_shards: how many shards a cache holds.
        epoch: which.
        max_rows: the epoch's first rows that are gone through, over all ranks; memory is for the shards only.

    Raises:
        DataError: an argument is below 1.
    """
    if min(world, cache_shards, max_rows) < 1:
        msg = f"{world} ranks, caches of {cache_shards} shards, {max_rows} rows: give 1 or more of each."
        raise DataError(msg)
    num_rows = min(order.num_rows, max_rows)
    ranks = [_rank(order, epoch, range(rank, num_rows, world), cache_shards) for rank in range(world)]
    downloads, distinct, peaks = zip(*ranks, strict=True)
    return CacheUse(downloads, distinct, max(peaks), num_rows)


def _rank(order: ShardOrder, epoch: int, positions: range, cache_shards: int) -> tuple[int, int, int]:
    """Return downloads, distinct shards and peak of one rank."""
    first = np.full(len(order.shard_rows), -1)
    last = np.full(len(order.shard_rows), -1)
    held: dict[int, None] = {}
    downloads = 0
    for start, shards in _visits(order, epoch, positions):
        found, at = np.unique(shards, return_index=True)
        first[found] = np.where(first[found] < 0, start + at, first[found])
        found, at = np.unique(shards[::-1], return_index=True)
        last[found] = start + len(shards) - 1 - at
        for shard in shards[np.diff(shards, prepend=-1) != 0].tolist():
            if shard in held:
                del held[shard]
            else:
                downloads += 1
                if len(held) == cache_shards:
                    del held[next(iter(held))]
            held[shard] = None  # a dictionary keeps the order of insertion: the first is the least recently used
    used = first >= 0
    begun, ended = np.sort(first[used]), np.sort(last[used])
    # When the n-th shard is begun, n are, less those that were finished before.
    open_at_once = np.arange(1, len(begun) + 1) - np.searchsorted(ended, begun)
    return downloads, len(begun), int(open_at_once.max(initial=0))


def _visits(order: ShardOrder, epoch: int, positions: range) -> Iterator[tuple[int, Ints]]:
    for low in range(0, len(positions), _CHUNK):
        chunk = positions[low : low + _CHUNK]
        yield low, order.locate(epoch, np.arange(chunk.start, chunk.stop, chunk.step))[0]
