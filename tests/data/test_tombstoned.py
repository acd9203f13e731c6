"""Tombstones in place of rows: what isn't gone stays as it was, and nothing of what is gone is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.batch import TOMBSTONE, Batch
from cosmati.core.labels import IGNORED
from cosmati.core.source import Order, ReadsAhead, ResizesImages, Source, TellsBands
from cosmati.data.in_memory import InMemory
from cosmati.data.tombstoned import Tombstoned
from cosmati.errors import DataError
from tests.train.packs.samples import documents, source

pytestmark = pytest.mark.long

CLASSES = ("a", "b", "c")
DATA = (torch.arange(1.0, 25).view(24, 1), torch.arange(24))
ROWS = InMemory(DATA, 6, torch.arange(24) % 3, CLASSES)


def batches(data: Source, *, route_pure: bool = True) -> list[Batch]:
    order = data.order(seed=1, num_microbatches=2, route_pure=route_pure)
    return [order.microbatch(step, index) for step in range(8) for index in range(2)]


@given(st.sets(st.sampled_from(CLASSES)), st.sets(st.integers(0, 23)), st.booleans())
def test_what_isnt_gone_stays_where_it_was(classes: set[str], rows: set[int], route_pure: bool) -> None:
    before = batches(ROWS, route_pure=route_pure)
    after = batches(Tombstoned(ROWS, classes, rows), route_pure=route_pure)
    for one, two in zip(before, after, strict=True):
        assert one.class_id == two.class_id
        for place, (row, class_id) in enumerate(zip(one.lineage.row_ids.tolist(), one.lineage.class_ids, strict=True)):
            is_gone = row in rows or CLASSES[class_id] in classes
            assert two.lineage.row_ids[place] == (TOMBSTONE if is_gone else row)
            assert [float(part[place]) for part in two.data] == [0.0 if is_gone else float(p[row]) for p in DATA]


@given(st.sets(st.sampled_from([0, 1, 2])), st.sets(st.integers(0, 23)))
def test_documents_of_packs(classes: set[int], rows: set[int]) -> None:
    packs = source(documents())
    names = [packs.class_names[index] for index in classes]
    for one, two in zip(batches(packs), batches(Tombstoned(packs, names, rows)), strict=True):
        tokens, ids = one.lineage.token_class_ids, one.lineage.token_row_ids
        assert tokens is not None
        assert ids is not None
        gone = torch.isin(tokens, torch.tensor(sorted(classes))) | torch.isin(ids, torch.tensor(sorted(rows)))
        assert torch.equal(two.data["input"], one.data["input"].where(~gone, 0))
        assert torch.equal(two.data["target"], one.data["target"].where(~gone, IGNORED))
        assert torch.equal(two.data["documents"], one.data["documents"])
        found, own = two.lineage.token_row_ids, two.lineage.token_class_ids
        assert found is not None
        assert own is not None
        assert torch.equal(found, ids.where(~gone, TOMBSTONE))
        assert torch.equal(own, tokens), "a pack's road follows from its classes"


def test_it_is_another_source_and_names_what_it_lacks() -> None:
    digests = [d.digest for d in (ROWS, Tombstoned(ROWS), Tombstoned(ROWS, ["a"]), Tombstoned(ROWS, rows=[1]))]
    assert len(set(digests)) == 4
    assert Tombstoned(ROWS, {"a", "b"}, {2, 1}).digest == Tombstoned(ROWS, ["b", "a"], [1, 2]).digest
    assert isinstance(Tombstoned(ROWS), Source)
    assert Tombstoned(ROWS).kinds == ((0, 0), (1, 0), (2, 0))
    for wrong in (["d"], "a"):
        with pytest.raises(DataError, match=r"Give a list of its names: \['a', 'b', 'c'\]"):
            Tombstoned(ROWS, wrong)


class Reads:
    """An order that reads ahead, has bands, and resizes images."""

    steps_per_epoch, rows_per_step, image_size = 4, 6, (8, 8)

    def __init__(self) -> None:
        self.told: list[Any] = []
        self._order = ROWS.order(seed=1, num_microbatches=2, route_pure=True)

    def microbatch(self, step: int, index: int) -> Batch:
        return self._order.microbatch(step, index)

    def class_id(self, step: int, index: int) -> int | None:
        return self._order.class_id(step, index)

    def band(self, step: int, index: int) -> int:
        return step

    def expect(self, step: int, indices: Sequence[int]) -> None:
        self.told.append((step, indices))

    def resize(self, size_at: Callable[[int], tuple[int, int]]) -> None:
        self.told.append(size_at(0))


def test_what_an_order_can_do_beside_goes_through() -> None:
    inner = Reads()

    class Sourced:
        class_names, digest, kinds = CLASSES, "d", ((0, 1), (2, 0))

        def order(self, **_: Any) -> Order:
            return inner

    data = Tombstoned(Sourced(), ["a"])
    order = data.order(seed=0, num_microbatches=2, route_pure=True)
    assert data.kinds == ((0, 1), (2, 0))
    assert isinstance(order, TellsBands | ReadsAhead | ResizesImages)
    assert (order.band(3, 0), order.image_size) == (3, (8, 8))
    order.expect(2, [0])
    order.resize(lambda _: (4, 4))
    assert inner.told == [(2, [0]), (4, 4)]
    plain = Tombstoned(ROWS).order(seed=0, num_microbatches=2, route_pure=True)
    assert (plain.band(3, 0), plain.image_size) == (0, None)
    plain.expect(0, [0])
    plain.resize(lambda _: (4, 4))


def test_a_key_keeps_the_digest_from_being_guessed() -> None:
    """Who knows the data can try out which single row is gone, unless the digest is keyed."""
    digests = [Tombstoned(ROWS, rows=[1], key=key).digest for key in (b"", b"a" * 32, b"b" * 32)]
    guesses = {Tombstoned(ROWS, rows=[row]).digest for row in range(24)}
    assert [digest in guesses for digest in digests] == [True, False, False]
    assert len({*digests, Tombstoned(ROWS, rows=[2], key=b"a" * 32).digest}) == 4
    assert "aaaa" not in repr(Tombstoned(ROWS, rows=[1], key=b"a" * 32))
