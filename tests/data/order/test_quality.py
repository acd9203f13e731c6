"""Figures about an order against brute force: each pair of neighbours, each row of each rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.data.order import ShardOrder, shuffle_quality, simulate_cache
from cosmati.errors import DataError

shard_rows = st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(lambda rows: sum(rows) > 1)


@pytest.mark.long
@given(shard_rows, st.integers(1, 60), st.booleans(), st.integers(0, 2))
def test_quality_equals_a_count_over_all_neighbours(rows: list[int], window: int, shuffle: bool, epoch: int) -> None:
    order = ShardOrder(np.asarray(rows), seed=3, window_rows=window, shuffle=shuffle)
    total = sum(rows)
    written = [(shard, row) for shard, n in enumerate(rows) for row in range(n)]
    shards, places = order.locate(epoch, np.arange(total))
    visited = list(zip(shards.tolist(), places.tolist(), strict=True))
    distances = [abs(written.index(visit) - position) for position, visit in enumerate(visited[:-1])]
    quality = shuffle_quality(order, epoch=epoch)
    assert quality.displacement == pytest.approx(sum(distances) / len(distances) / total)
    assert quality.same_shard == sum(a[0] == b[0] for a, b in pairwise(visited)) / (total - 1)
    assert quality.num_pairs == total - 1
    # A full shuffle: all ordered pairs of distinct rows are neighbours alike, all places alike.
    pairs = [(a, b) for a in written for b in written if a != b]
    assert quality.same_shard_of_full_shuffle == pytest.approx(sum(a[0] == b[0] for a, b in pairs) / len(pairs))
    apart = [abs(i - j) for i in range(total) for j in range(total)]
    assert quality.displacement_of_full_shuffle == pytest.approx(sum(apart) / len(apart) / total)


def test_wider_windows_shuffle_better_and_the_widest_as_well_as_can_be() -> None:
    found = [
        shuffle_quality(ShardOrder(np.full(50, 400), seed=1, window_rows=window, version=1))
        for window in (400, 1600, 6400, 20_000)
    ]
    shares = [quality.same_shard for quality in found]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert shares[1] == pytest.approx(1 / 4, abs=0.03)
    assert shares[-1] == pytest.approx(found[-1].same_shard_of_full_shuffle, abs=0.005)
    assert found[-1].displacement == pytest.approx(found[-1].displacement_of_full_shuffle, abs=0.01)
    unshuffled = shuffle_quality(ShardOrder(np.full(50, 400), seed=1, shuffle=False))
    assert unshuffled.displacement == 0
    assert unshuffled.same_shard == pytest.approx(1 - 49 / 19_999)


def test_a_sample_is_near_the_whole() -> None:
    order = ShardOrder(np.full(40, 500), seed=2, window_rows=3000)
    whole, sample = shuffle_quality(order), shuffle_quality(order, max_pairs=4000)
    assert (whole.num_pairs, sample.num_pairs) == (19_999, 4000)
    assert sample.same_shard == pytest.approx(whole.same_shard, abs=0.03)
    assert sample.displacement == pytest.approx(whole.displacement, abs=0.02)
    assert shuffle_quality(ShardOrder(np.full(100_000, 40_000), seed=2), max_pairs=10).num_pairs == 10


def brute_force(order: ShardOrder, epoch: int, world: int, cache_shards: int) -> tuple[list[int], list[int], int]:
    downloads, distinct, peak = [], [], 0
    for rank in range(world):
        visits = [int(order.locate(epoch, np.asarray([p]))[0][0]) for p in range(rank, order.num_rows, world)]
        cache: list[int] = []
        count = 0
        for shard in visits:
            count += shard not in cache
            cache = [*(held for held in cache if held != shard), shard][-cache_shards:]
        downloads.append(count)
        distinct.append(len(set(visits)))
        for now in range(len(visits)):
            peak = max(peak, len({shard for shard in visits[: now + 1] if shard in visits[now:]}))
    return downloads, distinct, peak


@settings(max_examples=60, deadline=None)
@given(shard_rows, st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2))
def test_a_cache_goes_through_what_one_of_lists_does(
    rows: list[int], window: int, world: int, cache_shards: int, epoch: int
) -> None:
    order = ShardOrder(np.asarray(rows), seed=4, window_rows=window)
    use = simulate_cache(order, world=world, cache_shards=cache_shards, epoch=epoch)
    downloads, distinct, peak = brute_force(order, epoch, world, cache_shards)
    assert (list(use.downloads), list(use.distinct), use.peak) == (downloads, distinct, peak)
    assert use.num_rows == sum(rows)


def test_long_epochs_are_gone_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    order = ShardOrder(np.full(30, 20), seed=4, window_rows=100)
    whole, quality = simulate_cache(order, world=3, cache_shards=3), shuffle_quality(order)
    monkeypatch.setattr("cosmati.data.order.quality._CHUNK", 7)
    assert simulate_cache(order, world=3, cache_shards=3) == whole
    assert shuffle_quality(order) == quality


def test_a_cache_of_a_window_downloads_each_shard_once_and_a_smaller_one_more_often() -> None:
    order = ShardOrder(np.full(40, 100), seed=0, window_rows=500, version=1)
    enough, small = (simulate_cache(order, world=2, cache_shards=shards) for shards in (10, 3))
    assert enough.downloads == enough.distinct == (40, 40)
    assert enough.peak <= 5
    assert min(small.downloads) > 300
    first = simulate_cache(order, world=2, cache_shards=10, max_rows=500)
    assert (first.num_rows, first.downloads, first.peak) == (500, (5, 5), 5)


def test_questions_about_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="nothing to compare"):
        shuffle_quality(ShardOrder(np.asarray([1]), seed=0))
    with pytest.raises(DataError, match="1 or more"):
        simulate_cache(ShardOrder(np.asarray([5]), seed=0), world=0, cache_shards=1)
    assert simulate_cache(ShardOrder(np.asarray([0]), seed=0), world=2, cache_shards=1).downloads == (0, 0)
