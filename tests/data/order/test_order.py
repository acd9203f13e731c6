"""The order against brute force: each row once, exact proportions, random access equal to reading in sequence."""

from __future__ import annotations

import hashlib
import pickle
import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.core.batch import TOMBSTONE
from cosmati.data.order.interleave import Interleave, PhasedInterleave, Stretch
from cosmati.data.order.mixture import Group, Mixture
from cosmati.data.order.plan import RoutePlan, Tail
from cosmati.data.order.shards import ShardOrder
from cosmati.errors import DataError


@pytest.mark.long
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(lambda rows: sum(rows) > 0),
    st.integers(0, 99),
    st.integers(1, 60),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([1, 2]),
)
def test_a_source_is_visited_once_an_epoch(
    rows: list[int], seed: int, window: int, shuffle: bool, epoch: int, version: int
) -> None:
    order = ShardOrder(np.asarray(rows), seed=seed, window_rows=window, shuffle=shuffle, version=version)
    everything = np.arange(sum(rows))
    shards, places = order.locate(epoch, everything)
    written = [(shard, row) for shard, n in enumerate(rows) for row in range(n)]
    visited = list(zip(shards.tolist(), places.tolist(), strict=True))
    assert sorted(visited) == written
    assert shuffle or visited == written
    one_by_one = [order.locate(epoch, np.asarray([i])) for i in everything]
    assert visited == [(int(s[0]), int(r[0])) for s, r in one_by_one]


def test_rows_stay_within_their_window_and_shards_of_says_what_is_needed() -> None:
    rows = np.asarray([10, 10, 0, 10, 10, 10, 10])
    order = ShardOrder(rows, seed=3, window_rows=20, version=1)
    shards, _ = order.locate(1, np.arange(60))
    for start in range(0, 60, 20):
        assert len(set(shards[start : start + 20].tolist())) == 2
    for start, stop in ((0, 1), (5, 25), (19, 41), (0, 60), (7, 7)):
        needed = order.shards_of(1, start, stop).tolist()
        assert set(shards[start:stop].tolist()) <= set(needed)
        assert 2 not in needed
        assert len(needed) <= 2 * (1 + (stop - 1) // 20 - start // 20) or start == stop


@pytest.mark.parametrize(("epoch", "ends"), [(0, [10, 30, 70, 150, 230, 310, 390, 400]), (1, [80, 160, 240, 320, 400])])
def test_windows_widen_from_one_shard_in_the_first_epoch(epoch: int, ends: list[int]) -> None:
    order = ShardOrder(np.full(40, 10), seed=3, window_rows=80)
    shards, _ = order.locate(epoch, np.arange(400))
    for start, end in zip([0, *ends], ends, strict=False):
        inside = shards[start:end].tolist()
        assert len(set(inside)) == (end - start) // 10, "a window is whole shards"
        assert sorted(inside) != inside or len(set(inside)) == 1, "and its rows are shuffled"
        assert set(order.shards_of(epoch, start, start + 1).tolist()) == set(inside)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(lambda rows: sum(rows) > 0),
    st.integers(1, 200),
    st.integers(0, 9),
)
def test_windows_are_those_of_a_loop_over_shards(rows: list[int], window: int, seed: int) -> None:
    order, epoch = ShardOrder(np.asarray(rows), seed=seed, window_rows=window), 0
    in_order = order.shards_of(epoch, 0, sum(rows)).tolist()
    windows: list[list[int]] = []
    width, stop, start = rows[in_order[0]], 0, 0
    for shard in in_order:
        while start >= stop:
            # The next window; one that no shard starts in has no rows.
            windows.append([])
            stop += width
            width = min(2 * width, window)
        windows[-1].append(shard)
        start += rows[shard]
    shards, _ = order.locate(epoch, np.arange(sum(rows)))
    position = 0
    for inside in windows:
        length = sum(rows[shard] for shard in inside)
        assert Counter(shards[position : position + length].tolist()) == Counter(
            {shard: rows[shard] for shard in inside}
        )
        position += length


def test_epochs_differ_and_a_mixed_batch_of_epochs_reads_as_each() -> None:
    order = ShardOrder(np.asarray([50, 50]), seed=0, window_rows=100)
    first, second = (np.stack(order.locate(epoch, np.arange(100))) for epoch in (0, 1))
    assert not np.array_equal(first, second)
    both = np.stack(order.locate(np.asarray([0, 1, 1, 0]), np.asarray([5, 5, 6, 6])))
    assert np.array_equal(both, np.stack([first[:, 5], second[:, 5], second[:, 6], first[:, 6]], axis=1))
    assert np.array_equal(np.stack(order.locate(np.int64(1), np.arange(100))), second)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(order))
    assert np.array_equal(np.stack(again.locate(1, np.arange(100))), second)


@given(st.data(), st.integers(0, 3), st.sampled_from([1, 2]))
@settings(max_examples=40, deadline=None)
def test_rows_in_turn_and_rows_apart_are_located_alike(data: st.DataObject, epoch: int, version: int) -> None:
    rows = data.draw(st.lists(st.integers(0, 1500), min_size=1, max_size=6).filter(any))
    order = ShardOrder(np.asarray(rows), seed=5, window_rows=data.draw(st.integers(1, 4000)), version=version)
    start = data.draw(st.integers(0, sum(rows) - 1))
    stop = data.draw(st.integers(start + 1, sum(rows)))
    shards, places = order.locate(epoch, np.arange(start, stop))
    backwards = order.locate(epoch, np.arange(start, stop)[::-1])
    assert np.array_equal(shards, backwards[0][::-1])
    assert np.array_equal(places, backwards[1][::-1])
    shards[:], places[:] = -1, -1  # what is handed out is the caller's
    assert np.array_equal(order.locate(epoch, np.arange(start, stop))[0], backwards[0][::-1])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("index", [-1, 10, 2**40])
def test_an_index_that_is_not_of_the_source_is_refused(index: int, shuffle: bool) -> None:
    order = ShardOrder(np.asarray([5, 5]), seed=0, window_rows=10, shuffle=shuffle)
    with pytest.raises(DataError, match="below 10"):
        order.locate(0, np.asarray([3, index]))


@pytest.mark.usefixtures("alone")
def test_a_hundred_thousand_shards_take_memory_for_shards_only() -> None:
    tracemalloc.start()
    order = ShardOrder(np.full(100_000, 4000), seed=0)
    order.locate(0, np.arange(256))
    order.locate(0, np.asarray([399_999_999]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


weights = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(lambda values: sum(values) > 0)


@pytest.mark.long
@given(weights, st.integers(1, 3))
def test_an_interleave_is_exact_over_a_period_and_fair_at_every_prefix(values: list[int], periods: int) -> None:
    dealt = Interleave(values)
    total = sum(values)
    groups, counts = dealt.locate(np.arange(total * periods))
    seen = [0] * len(values)
    for n, (group, count) in enumerate(zip(groups.tolist(), counts.tolist(), strict=True)):
        assert count == seen[group]
        seen[group] += 1
        assert dealt.counts(n + 1) == seen
        depth = max(1, (len(values) - 1).bit_length())
        assert all(abs(s - v * (n + 1) / total) <= depth for s, v in zip(seen, values, strict=True))
    assert seen == [value * periods for value in values]


def test_an_interleave_of_huge_weights_is_exact() -> None:
    dealt = Interleave([10**11 + 3, 7, 10**12 + 39])
    position = 10**12 + 123_456_789
    before = dealt.counts(position)
    assert sum(before) == position
    groups, counts = dealt.locate(np.asarray([position]))
    assert int(counts[0]) == before[int(groups[0])]


@settings(max_examples=30)
@given(st.lists(st.integers(2**62, 2**70), min_size=1, max_size=4), st.integers(0, 2**61))
def test_weights_beyond_64_bits_are_exact(values: list[int], start: int) -> None:
    dealt = Interleave(values)
    groups, counts = dealt.locate(np.arange(start, start + 9))
    seen = dealt.counts(start)
    for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
        assert count == seen[group]
        seen[group] += 1
    assert seen == dealt.counts(start + 9)


@pytest.mark.parametrize("values", [[], [0, 0], [3, -1]])
def test_an_interleave_of_nothing_is_refused(values: list[int]) -> None:
    with pytest.raises(DataError, match="not all 0"):
        Interleave(values)


def test_phases_go_on_where_the_last_one_left() -> None:
    dealt = PhasedInterleave([Stretch(10, (1, 0)), Stretch(25, (1, 2)), Stretch(None, (0, 1))])
    groups, counts = dealt.locate(np.arange(40))
    for group in (0, 1):
        own = counts[groups == group]
        assert np.array_equal(own, np.arange(len(own)))
    assert Counter(groups[10:25].tolist()) == {0: 5, 1: 10}
    assert set(groups[:10].tolist()) == {0}
    assert set(groups[25:].tolist()) == {1}


def test_a_repeat_of_two_and_a_half_is_exact() -> None:
    mixture = Mixture([Group(rows=10), Group(rows=4, repeat=Fraction(5, 2))])
    assert mixture.num_rows == 20
    sources, epochs, indices = mixture.locate(np.arange(40))
    visits = Counter(zip(sources.tolist(), epochs.tolist(), indices.tolist(), strict=True))
    assert set(visits.values()) == {1}
    assert {(s, e) for s, e, _ in visits} == {(0, 0), (0, 1)} | {(1, e) for e in range(5)}
    assert len(visits) == 40


def test_bad_mixtures_are_refused() -> None:
    with pytest.raises(DataError, match="nothing to visit"):
        Mixture([Group(rows=0), Group(rows=3, repeat=Fraction(0))])
    with pytest.raises(DataError, match="negative"):
        Mixture([Group(rows=3, repeat=Fraction(-1))])
    with pytest.raises(DataError, match="rising positions"):
        Mixture([Group(rows=3)], [Stretch(5, (1,)), Stretch(5, (1,)), Stretch(None, (1,))])
    with pytest.raises(DataError, match="not all 0"):
        Mixture([Group(rows=3), Group(rows=2)], [Stretch(None, (0, 0))])
    with pytest.raises(DataError, match="0 to sources without rows"):
        Mixture([Group(rows=3), Group(rows=0)], [Stretch(None, (1, 1))])
    with pytest.raises(DataError, match="rising positions"):
        Mixture([Group(rows=3)], [Stretch(-5, (1,)), Stretch(None, (1,))])
    with pytest.raises(DataError, match="2 weights, and there are 1 sources"):
        Mixture([Group(rows=3)], [Stretch(None, (1, 1))])


def microbatches(plan: RoutePlan, steps: int) -> list[tuple[int | None, list[tuple[int, int, int]]]]:
    found = []
    for step in range(steps):
        for index in range(plan.num_microbatches):
            rows = plan.microbatch(step, index)
            assert rows.class_id == plan.class_of(step, index)
            assert len(rows.sources) == plan.rows
            triples = zip(rows.sources.tolist(), rows.epochs.tolist(), rows.indices.tolist(), strict=True)
            found.append((rows.class_id, list(triples)))
    return found


@pytest.mark.long
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), min_size=1, max_size=5).filter(
        lambda pairs: sum(n for n, _ in pairs) > 0
    ),
    st.integers(1, 7),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_padded_epochs_visit_each_row_exactly_once(
    pairs: list[tuple[int, int]], rows: int, num_microbatches: int, route_pure: bool
) -> None:
    groups = [Group(rows=n, class_id=c) for n, c in pairs]
    plan = RoutePlan(groups, rows=rows, num_microbatches=num_microbatches, route_pure=route_pure, tail="pad")
    for epoch in range(2):
        seen: Counter[tuple[int, int]] = Counter()
        for step in range(plan.steps_per_epoch):
            at = epoch * plan.steps_per_epoch + step
            for index in range(num_microbatches):
                piece = plan.microbatch(at, index)
                real = piece.sources != TOMBSTONE
                seen.update(zip(piece.sources[real].tolist(), piece.indices[real].tolist(), strict=True))
                assert set(piece.epochs[real].tolist()) <= {epoch}
                if route_pure:
                    assert {groups[s].class_id for s in piece.sources[real].tolist()} <= {piece.class_id}
        assert seen == Counter({(s, i): 1 for s, g in enumerate(groups) for i in range(g.rows)})


@pytest.mark.parametrize("route_pure", [False, True])
def test_carried_streams_lose_nothing_and_starve_nobody(route_pure: bool) -> None:
    groups = [Group(rows=97, class_id=0), Group(rows=3, class_id=1), Group(rows=20, class_id=0)]
    plan = RoutePlan(groups, rows=5, num_microbatches=4, route_pure=route_pure, tail="carry")
    assert plan.steps_per_epoch == 6
    seen: Counter[tuple[int, int, int]] = Counter()
    by_class: Counter[int | None] = Counter()
    for class_id, triples in microbatches(plan, 300):
        seen.update(triples)
        by_class[class_id] += 1
    assert set(seen.values()) == {1}
    visits = Counter(s for s, _, _ in seen)
    # 1,200 microbatches of 5 rows are 50 epochs of 120 rows.
    assert all(abs(visits[s] - 50 * g.rows) <= 20 for s, g in enumerate(groups))
    if route_pure:
        assert abs(by_class[1] - 30) <= 1
    for source, group in enumerate(groups):
        places = sorted((e, i) for s, e, i in seen if s == source)
        assert places == [divmod(n, group.rows) for n in range(len(places))]


def test_dropped_tails_differ_from_epoch_to_epoch() -> None:
    plan = RoutePlan([Group(rows=10)], rows=3, num_microbatches=2, route_pure=False, tail="drop")
    assert plan.steps_per_epoch == 1
    first, second = (plan.microbatch(step, 0) for step in (0, 1))
    assert (first.epochs.tolist(), second.epochs.tolist()) == ([0] * 3, [1] * 3)
    with pytest.raises(DataError, match="tail='carry' or 'pad'"):
        RoutePlan([Group(rows=5)], rows=3, num_microbatches=2, route_pure=False, tail="drop")


def visits_of_rank(plan: RoutePlan, order: ShardOrder, rank: int, world: int) -> Counter[tuple[int, int]]:
    """What one rank reads in an epoch, its microbatches asked for from the last to the first."""
    seen: Counter[tuple[int, int]] = Counter()
    for number in reversed(range(rank, plan.steps_per_epoch * plan.num_microbatches, world)):
        piece = plan.microbatch(*divmod(number, plan.num_microbatches))
        real = piece.sources != TOMBSTONE
        shards, rows = order.locate(piece.epochs[real], piece.indices[real])
        seen.update(zip(shards.tolist(), rows.tolist(), strict=True))
    return seen


@pytest.mark.parametrize("num_rows", [1, 2, 7, 97, 1000])
@pytest.mark.parametrize("world", range(1, 10))
def test_all_ranks_together_visit_each_row_once(world: int, num_rows: int) -> None:
    shard_rows = np.diff(np.minimum(np.arange(0, num_rows + 13, 13), num_rows))
    together: Counter[tuple[int, int]] = Counter()
    for rank in range(world):
        # Each rank makes its own plan and order, as its own process would.
        plan = RoutePlan([Group(rows=num_rows)], rows=4, num_microbatches=8, route_pure=False, tail="pad")
        together += visits_of_rank(plan, ShardOrder(shard_rows, seed=5, window_rows=40), rank, world)
    assert together == Counter({(shard, row): 1 for shard, n in enumerate(shard_rows.tolist()) for row in range(n)})


def test_a_source_without_rows_has_nothing_to_locate() -> None:
    shards, rows = ShardOrder(np.empty(0, np.int64), seed=0).locate(0, np.empty(0, np.int64))
    assert shards.tolist() == rows.tolist() == []
    with pytest.raises(DataError, match="nothing to visit"):
        RoutePlan([Group(rows=0)], rows=4, num_microbatches=1, route_pure=True)


@pytest.mark.parametrize("tail", ["carry", "pad"])
def test_a_class_visited_less_than_once_an_epoch_still_comes(tail: Tail) -> None:
    # 3 rows visited a fifth of a time each: 3 visits in 5 epochs, beside 15 of the other class.
    groups = [Group(rows=3, class_id=0, repeat=Fraction(1, 5)), Group(rows=3, class_id=1)]
    plan = RoutePlan(groups, rows=1, num_microbatches=1, route_pure=True, tail=tail)
    steps = 5 * plan.steps_per_epoch if tail == "pad" else 18
    pieces = [plan.microbatch(step, 0) for step in range(steps)]
    visits = [(int(p.sources[0]), int(p.indices[0])) for p in pieces if p.sources[0] != TOMBSTONE]
    assert Counter(visits) == {(0, i): 1 for i in range(3)} | {(1, i): 5 for i in range(3)}


@pytest.mark.parametrize("tail", ["carry", "pad"])
def test_fractional_repeats_keep_their_proportion_over_epochs(tail: Tail) -> None:
    groups = [Group(rows=3, class_id=0, repeat=Fraction(5, 2)), Group(rows=10, class_id=1)]
    plan = RoutePlan(groups, rows=1, num_microbatches=1, route_pure=True, tail=tail)
    steps = 4 * plan.steps_per_epoch if tail == "pad" else 70
    pieces = [plan.microbatch(step, 0) for step in range(steps)]
    real = [(int(p.sources[0]), int(p.epochs[0]), int(p.indices[0])) for p in pieces if p.sources[0] != TOMBSTONE]
    assert len(set(real)) == len(real) == 70  # four epochs of 7.5 + 10 visits, none lost and none twice
    assert Counter(source for source, _, _ in real) == {0: 30, 1: 40}


@pytest.mark.parametrize(("rows", "num_microbatches", "tail"), [(0, 1, "carry"), (1, 0, "pad"), (1, 1, "wrap")])
def test_plans_of_nothing_are_refused(rows: int, num_microbatches: int, tail: Tail) -> None:
    with pytest.raises(DataError, match="can't be planned"):
        RoutePlan([Group(rows=5)], rows=rows, num_microbatches=num_microbatches, route_pure=False, tail=tail)


@pytest.mark.parametrize("tail", ["carry", "pad", "drop"])
def test_sorted_steps_have_the_same_microbatches_by_class_and_band(tail: Tail) -> None:
    groups = [Group(rows=90, class_id=1), Group(rows=31, class_id=0, band=1), Group(rows=57, class_id=0)]
    phases = [Stretch(70, (3, 1, 1)), Stretch(None, (1, 2, 1))] if tail == "carry" else None
    dealt, by_class = (
        RoutePlan(
            groups, rows=3, num_microbatches=8, route_pure=True, tail=tail, phases=phases, sort_by_class=is_sorted
        )
        for is_sorted in (False, True)
    )
    were_mixed = False
    for step in range(3 * dealt.steps_per_epoch):
        bands = [(dealt.class_of(step, i), dealt.band_of(step, i), i) for i in range(8)]
        were_mixed |= bands != sorted(bands)
        for index, (class_id, band, place) in enumerate(sorted(bands)):
            assert (by_class.class_of(step, index), by_class.band_of(step, index)) == (class_id, band)
            assert str(by_class.microbatch(step, index)) == str(dealt.microbatch(step, place))
    assert were_mixed


@pytest.mark.parametrize("sort_by_class", [False, True])
def test_microbatches_of_tombstones_take_the_class_of_the_last_real_one(sort_by_class: bool) -> None:
    groups = [Group(rows=4, class_id=0), Group(rows=3, class_id=1)]
    plan, dealt = (
        RoutePlan(groups, rows=2, num_microbatches=8, route_pure=True, tail="pad", sort_by_class=is_sorted)
        for is_sorted in (sort_by_class, False)
    )
    assert plan.steps_per_epoch == 1
    assert dealt.class_of(0, 0) != dealt.class_of(0, 3)
    empty = [one.class_id for i in range(8) if (one := plan.microbatch(0, i)).sources.max() == TOMBSTONE]
    assert empty == [dealt.class_of(0, 3)] * 4


def test_a_plan_of_mixed_microbatches_has_nothing_to_sort() -> None:
    groups = [Group(rows=40, class_id=1), Group(rows=24, class_id=0)]
    plans = [
        RoutePlan(groups, rows=2, num_microbatches=4, route_pure=False, sort_by_class=one) for one in (False, True)
    ]
    assert microbatches(plans[0], 8) == microbatches(plans[1], 8)


GOLDEN: dict[tuple[int, Tail], str] = {
    (1, "carry"): "f93c657051f2ef446abccae378b6c4e46d02bdb05d2383fab60562ba5ed9b3b3",
    (1, "pad"): "dbf69b855385290a250e868ad4bea467764be2684f755762b5350aa28a451f82",
    (1, "drop"): "3b574bb1bfcfc6cba73cd64f26e8fafe9645f453018a93afa3334845bb52ea3e",
    (2, "carry"): "9992bd98ab230bfe70de15499ce1e4eb1f1ff18f7d65012bc28a42d814cc6b2d",
    (2, "pad"): "427d055fddd08a80b019867f0940d5ef57203fb8410c4c71ec80e3078d2a110b",
    (2, "drop"): "9f74504c22bccc8f934a11cddc439fe92a31ffbb25cc6e016a567fa4e02d8059",
}


@pytest.mark.parametrize(("version", "tail"), list(GOLDEN))
def test_the_order_never_changes(version: int, tail: Tail) -> None:
    groups = [Group(rows=1009, class_id=2), Group(rows=31, class_id=0), Group(rows=300, class_id=2)]
    orders = [
        ShardOrder(np.full(-(-g.rows // 50), 50)[: g.rows], seed=7, window_rows=128, version=version) for g in groups
    ]
    plan = RoutePlan(groups, rows=6, num_microbatches=4, route_pure=True, tail=tail)
    digest = hashlib.sha256()
    for step in range(150):
        for index in range(4):
            rows = plan.microbatch(step, index)
            digest.update(f"{rows.class_id}".encode())
            for source, epoch, place in zip(rows.sources, rows.epochs, rows.indices, strict=True):
                if source != TOMBSTONE:
                    shard, row = orders[source].locate(int(epoch), np.asarray([place]))
                    digest.update(f" {source} {shard[0]} {row[0]}".encode())
    assert digest.hexdigest() == GOLDEN[version, tail]


def sha256(*arrays: np.ndarray) -> str:
    """Of the numbers, whatever the machine's byte order."""
    return hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()


@pytest.mark.parametrize(
    ("version", "digest"),
    [
        (1, "2ca4ba01e3385a97e63258fda216e8f1b5392f6a80730c5f04758726ffb781b6"),
        (2, "1e62e1f6706eb6ee6aa75cc3946e71dcfcd63e0fc5333b58318ba0ad64adf690"),
    ],
)
def test_the_order_of_a_source_never_changes(version: int, digest: str) -> None:
    order = ShardOrder(np.arange(40) % 9, seed=11, window_rows=30, version=version)
    parts = [part for epoch in range(3) for part in order.locate(epoch, np.arange(order.num_rows))]
    assert sha256(*parts) == digest


def test_the_parts_of_the_order_never_change() -> None:
    assert (
        sha256(*Interleave([5, 0, 17, 3, 11]).locate(np.arange(100)))
        == "07f3c745420a744d5de911250097350868a0f0ec023063869c391f68818b2331"
    )
    mixture = Mixture(
        [Group(rows=10), Group(rows=4, repeat=Fraction(5, 2)), Group(rows=9)],
        [Stretch(30, (1, 2, 0)), Stretch(None, (3, 1, 2))],
    )
    assert sha256(*mixture.locate(np.arange(120))) == "e41e7f3589a6f341e349921a8a67982de3b0635d603415659aeaa257cc8f772c"
