"""Deferred rows come again where their class is admitted: the order against what a policy has to give, by counting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.core.batch import Batch, Lineage
from cosmati.routing.deferral import DeferredOrder
from cosmati.routing.policy import CompiledPolicy, Decision, Phase
from cosmati.routing.regions import Regions

REGIONS = Regions(("all",), (("w",),), (("all",),))


class Listed:
    """Microbatches whose classes are listed for an epoch; a row is its place in the source."""

    def __init__(self, classes: Sequence[int], num_microbatches: int) -> None:
        self.classes, self.num = classes, num_microbatches
        self.steps_per_epoch, self.rows_per_step = len(classes) // num_microbatches, num_microbatches

    def class_id(self, step: int, index: int) -> int:
        return self.classes[(step * self.num + index) % len(self.classes)]

    def microbatch(self, step: int, index: int) -> Batch:
        row, own = torch.tensor([step * self.num + index]), self.class_id(step, index)
        return Batch(row, Lineage(row, torch.tensor([own])), own)


def policy(spans: Sequence[int], decisions: Sequence[Sequence[Decision]]) -> CompiledPolicy:
    """A policy by class and phase; spans are lengths in steps."""
    starts = [sum(spans[:i]) for i in range(len(spans))]
    phases = tuple(Phase(f"p{i}", s, s + n) for i, (s, n) in enumerate(zip(starts, spans, strict=True)))
    weight = tuple(tuple((float(d == "admit"),) for d in row) for row in decisions)
    names = tuple(f"c{i}" for i in range(len(decisions)))
    return CompiledPolicy(names, REGIONS, phases, weight, tuple(map(tuple, decisions)), bytes(32), bytes(32))


def visited(order: DeferredOrder, num_steps: int, num: int) -> list[tuple[int, int]]:
    """Row and class at each position of the run."""
    found = []
    for step in range(num_steps):
        for index in range(num):
            batch = order.microbatch(step, index)
            assert batch.class_id == order.class_id(step, index)
            found.append((int(batch.data), int(batch.lineage.class_ids)))
    return found


def test_each_row_is_visited_once_though_its_class_waits_for_half_of_the_run() -> None:
    classes = [0, 1, 0, 0] * 8
    order = DeferredOrder(Listed(classes, 2), policy([8, 8], [["admit"] * 2, ["defer", "admit"]]), (0, 1), 2)
    found = visited(order, 16, 2)
    assert sorted(row for row, _ in found) == list(range(32))
    assert not order.never_offered
    assert {own for _, own in found[:16]} == {0}
    # What has waited takes every other position, the oldest first, until it's used up.
    waited = [row for row in range(found[15][0]) if row not in {row for row, _ in found[:16]}]
    assert [found[16 + 2 * i][0] for i in range(len(waited))] == waited == [1, 5, 9, 13, 17]
    assert (order.steps_per_epoch, order.rows_per_step) == (16, 2)


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    classes, decisions = [0, 1, 1] * 4, [["admit"] * 2, ["defer", "admit"]]
    short, long = (DeferredOrder(Listed(classes, 2), policy([4, n], decisions), (0, 1), 2) for n in (3, 30))
    assert visited(short, 7, 2) == visited(long, 34, 2)[:14]
    assert short.never_offered[1] > long.never_offered[1] == 0


def test_what_the_run_has_no_room_for_is_counted() -> None:
    classes = [1, 1, 1, 0]
    order = DeferredOrder(Listed(classes, 1), policy([6, 2], [["admit"] * 2, ["defer", "admit"]]), (0, 1), 1)
    found = visited(order, 8, 1)
    assert [own for _, own in found[:6]] == [0] * 6
    assert order.never_offered == {1: 18 - sum(row < 24 for row, _ in found[6:])}


def test_where_nothing_can_be_offered_a_step_rests_and_its_rows_come_again() -> None:
    order = DeferredOrder(Listed([0, 0], 1), policy([2, 4], [["defer", "admit"]]), (0,), 1)
    rows = [row for row, _ in visited(order, 6, 1)]
    assert rows[:2] == [0, 1]
    assert sorted(rows[2:]) == [0, 1, 2, 3]


@settings(deadline=None, max_examples=60)
@given(
    classes=st.lists(st.integers(0, 2), min_size=4, max_size=12),
    spans=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_no_row_is_offered_while_its_class_is_deferred_nor_twice(
    classes: list[int], spans: list[int], num: int, data: st.DataObject
) -> None:
    classes = classes * num  # steps of an epoch are whole
    kinds = st.sampled_from(["admit", "defer"])
    decisions = [[data.draw(kinds) for _ in spans] for _ in range(3)]
    compiled = policy(spans, decisions)
    order = DeferredOrder(Listed(classes, num), compiled, (0, 1, 2), num)
    offered: list[int] = []
    for at, (row, own) in enumerate(visited(order, sum(spans), num)):
        phase = compiled.phase_at(at // num)
        if decisions[own][phase] == "admit":
            offered.append(row)
        else:
            assert all(decisions[c][phase] == "defer" for c in set(classes))
    assert len(set(offered)) == len(offered)
    # What came from the source was offered or is reported: no row is lost in between.
    if offered:
        last = max(offered)
        lost = Counter(classes[row % len(classes)] for row in set(range(last + 1)) - set(offered))
        assert all(order.never_offered[own] >= number for own, number in lost.items())


def test_the_same_classes_give_the_same_order() -> None:
    made = [
        visited(
            DeferredOrder(Listed([0, 1, 1, 0], 2), policy([3, 3], [["defer", "admit"], ["admit"] * 2]), (0, 1), 2), 6, 2
        )
        for _ in range(2)
    ]
    assert made[0] == made[1]
