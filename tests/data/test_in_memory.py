"""The in-memory source: exactly once, pure microbatches, exact proportions, the same order for every reader."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.batch import TOMBSTONE
from cosmati.core.source import Source
from cosmati.data.in_memory import InMemory, InMemoryTail
from cosmati.errors import DataError

pytestmark = pytest.mark.long


def source(num_rows: int, rows_per_step: int, classes: list[int] | None = None, tail: InMemoryTail = "pad") -> InMemory:
    ids = torch.arange(num_rows) * 7
    class_ids = None if classes is None else torch.tensor([classes[i % len(classes)] for i in range(num_rows)])
    return InMemory((ids.double(), ids), rows_per_step, class_ids, ("a", "b", "c"), ids, tail=tail)


@given(
    st.integers(1, 200),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
def test_padded_epochs_visit_each_row_exactly_once(
    rows: int, v: int, each: int, pure: bool, classes: list[int]
) -> None:
    data = source(rows, v * each, classes)
    order = data.order(seed=1, num_microbatches=v, route_pure=pure)
    for epoch in range(2):
        seen: list[int] = []
        for step in range(order.steps_per_epoch):
            for index in range(v):
                batch = order.microbatch(epoch * order.steps_per_epoch + step, index)
                assert batch.num_rows == each
                ids = batch.lineage.row_ids
                # Content, ids and classes travel together; a tombstone's content is zero.
                assert torch.equal(batch.input.long(), ids.clamp(min=0))
                real = ids[ids != TOMBSTONE]
                seen += real.tolist()
                if pure and len(real):
                    assert batch.lineage.class_ids[ids != TOMBSTONE].unique().tolist() == [batch.class_id]
                assert order.class_id(epoch * order.steps_per_epoch + step, index) == batch.class_id
        assert sorted(seen) == [7 * i for i in range(rows)]


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 2, 4]))
def test_classes_keep_their_proportion_in_every_prefix(first: int, second: int, v: int) -> None:
    data = InMemory(torch.arange(first + second), v, torch.tensor([0] * first + [1] * second), ("a", "b"), tail="pad")
    order = data.order(seed=0, num_microbatches=v, route_pure=True)
    count = 0
    for position in range(first + second):
        count += order.class_id(*divmod(position, v)) == 0
        assert abs(count - (position + 1) * first / (first + second)) <= 1


def test_epochs_differ_and_seeds_differ_and_nothing_else_does() -> None:
    data = source(64, 16)
    assert isinstance(data, Source)

    def visit(seed: int, v: int, epoch: int) -> list[int]:
        order = data.order(seed=seed, num_microbatches=v, route_pure=False)
        steps = range(epoch * 4, epoch * 4 + 4)
        return [i for s in steps for m in range(v) for i in order.microbatch(s, m).lineage.row_ids.tolist()]

    assert visit(0, 1, 0) == visit(0, 4, 0)
    assert visit(0, 1, 0) != visit(0, 1, 1)
    assert visit(0, 1, 0) != visit(1, 1, 0)


def test_classes_that_are_not_offered_are_absent() -> None:
    order = source(60, 4, [0, 1, 2]).order(seed=0, num_microbatches=2, route_pure=True, classes={0, 2})
    classes = {order.class_id(s, m) for s in range(order.steps_per_epoch) for m in range(2)}
    assert classes == {0, 2}


def test_drop_leaves_out_what_fills_no_step() -> None:
    order = source(70, 16, tail="drop").order(seed=0, num_microbatches=4, route_pure=False)
    assert order.steps_per_epoch == 4
    ids = [i for s in range(4) for m in range(4) for i in order.microbatch(s, m).lineage.row_ids.tolist()]
    assert len(set(ids)) == 64


def test_bad_sources_are_refused_with_the_mend() -> None:
    rows = torch.arange(8)
    with pytest.raises(DataError, match="distinct"):
        InMemory(rows, 2, row_ids=torch.zeros(8, dtype=torch.int64))
    with pytest.raises(DataError, match="one id a row"):
        InMemory(rows, 2, class_ids=torch.zeros(7, dtype=torch.int64))
    with pytest.raises(DataError, match="class names"):
        InMemory(rows, 2, class_ids=torch.full((8,), 3))
    with pytest.raises(DataError, match="can't be split"):
        InMemory(rows, 6).order(seed=0, num_microbatches=4, route_pure=False)
    with pytest.raises(DataError, match="don't fill one step"):
        InMemory(rows, 16).order(seed=0, num_microbatches=1, route_pure=False)


def test_digest_follows_content_and_classes() -> None:
    assert source(8, 2).digest == source(8, 2).digest
    assert source(8, 2, [0, 1]).digest != source(8, 2, [1, 0]).digest


def test_strings_and_arrays_go_with_their_rows_and_are_in_the_digest() -> None:
    words = [f"word {i}" for i in range(10)]

    def source(**changed: object) -> InMemory:
        return InMemory(
            {"text": words, "x": torch.arange(10), "n": np.arange(10), "name": "a"} | changed, 4, tail="pad"
        )

    order = source().order(seed=1, num_microbatches=2, route_pure=False)
    for step in range(order.steps_per_epoch):
        for index in range(2):
            data = order.microbatch(step, index).data
            ids = order.microbatch(step, index).lineage.row_ids.tolist()
            assert data["text"] == ["" if row == TOMBSTONE else words[row] for row in ids]
            assert data["n"].tolist() == [max(row, 0) for row in ids] == data["x"].tolist()
            assert data["name"] == "a"
    digest = source().digest
    assert digest == source().digest
    assert digest not in {source(text=words[::-1]).digest, source(n=np.arange(10) + 1).digest, source(name="b").digest}
    with pytest.raises(DataError, match=r"have no digest\. .*is a builtins\.object"):
        _ = source(name=object()).digest
    scalar = InMemory((torch.arange(4), torch.tensor(2.0)), 2)
    assert scalar.digest != InMemory((torch.arange(4), torch.tensor(3.0)), 2).digest


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("classes", [[0, 1], [2, 0, 1, 0, 0], [1]])
def test_sorted_steps_have_the_same_microbatches_by_class(tail: InMemoryTail, classes: list[int]) -> None:
    dealt = source(94, 16, classes, tail)
    by_class = dataclasses.replace(dealt, sort_by_class=True)
    orders = [one.order(seed=3, num_microbatches=8, route_pure=True) for one in (dealt, by_class)]
    for step in range(2 * orders[0].steps_per_epoch):
        found = [
            [(o.class_id(step, i), o.microbatch(step, i).lineage.row_ids.tolist()) for i in range(8)] for o in orders
        ]
        assert found[1] == sorted(found[0], key=lambda told: told[0] or 0)


def test_mixed_microbatches_stay_as_they_are_dealt() -> None:
    dealt = source(96, 16, [0, 1])
    by_class = dataclasses.replace(dealt, sort_by_class=True)
    rows = [
        [
            one.order(seed=3, num_microbatches=8, route_pure=False).microbatch(2, i).lineage.row_ids.tolist()
            for i in range(8)
        ]
        for one in (dealt, by_class)
    ]
    assert rows[0] == rows[1]
