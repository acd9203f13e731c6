"""Batches of any nest, with their lineage."""

import pickle
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cosmati.core.batch import (
    TOMBSTONE,
    Batch,
    Lineage,
    bury,
    count_rows,
    count_rows_and_tokens,
    first_tensor,
    iterate_tensors,
    kind_of_input,
    map_tensors,
)
from cosmati.errors import BatchError


@dataclass
class Images:
    image: Tensor
    label: Tensor


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def nests() -> list[object]:
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    return [
        (x, y),
        [x, y],
        {"input_ids": x, "labels": y},
        Images(x, y),
        Pair(x, y),
        {"x": x, "more": {"deep": (y,)}, "target": y},
    ]


@pytest.mark.parametrize("data", nests(), ids=lambda data: type(data).__name__)
def test_every_nest_is_read_selected_and_replaced(data: object) -> None:
    batch = Batch(data, Lineage.of_rows(100, 6), 3)
    assert count_rows(data) == batch.num_rows == 6
    part = batch.select(torch.tensor([4, 1]))
    assert part.lineage.row_ids.tolist() == [104, 101]
    assert part.class_id == 3
    assert torch.equal(part.input, batch.input[[4, 1]])
    assert torch.equal(part.target, batch.target[[4, 1]])
    changed = batch.replace(input=batch.input * 2)
    assert torch.equal(changed.input, batch.input * 2)
    assert type(map_tensors(lambda t: t, data)) is type(data)
    assert torch.equal(batch.input, next(iterate_tensors(data)))


@pytest.mark.long
@given(st.lists(st.integers(0, 5), min_size=6, max_size=6), st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_lineage_follows_mixing_and_selection(partners: list[int], chosen: list[int]) -> None:
    ids = torch.arange(6) * 10
    data = ids.double()
    batch = Batch((data, data), Lineage(ids, torch.zeros(6, dtype=torch.int64)))
    mixed = batch.lineage.mix(torch.tensor(partners)).select(torch.tensor(chosen))
    assert mixed.parents is not None
    assert mixed.parents.tolist() == [[10 * i, 10 * partners[i]] for i in chosen]
    assert mixed.row_ids.tolist() == [10 * i for i in chosen]


def test_tombstones_are_not_present() -> None:
    lineage = Lineage(torch.tensor([3, TOMBSTONE]), torch.zeros(2, dtype=torch.int64))
    batch = Batch(torch.ones(2, 4), lineage)
    assert batch.present is not None
    assert batch.present.tolist() == [True, False]
    assert batch.select(slice(0, 1)).present is None


def test_a_batch_without_rows_or_fields_is_refused() -> None:
    with pytest.raises(BatchError, match="share their first dimension"):
        count_rows((torch.ones(3), torch.ones(4)))
    with pytest.raises(BatchError, match="No input"):
        _ = Batch({"pixels": torch.ones(2)}, Lineage.of_rows(0, 2)).input


def test_what_the_input_looks_like() -> None:
    images, features, tokens = torch.zeros(5, 3, 2, 2), torch.zeros(5, 7), torch.zeros(5, 7, dtype=torch.int64)
    kinds = [kind_of_input((data, torch.zeros(5))) for data in (images, features, tokens, torch.zeros(5, 2, 2))]
    assert kinds == ["images", "features", "tokens", None]
    counts = [count_rows_and_tokens({"x": data, "y": tokens}) for data in (images, features, tokens, torch.tensor(3.0))]
    assert counts == [(5, 5), (5, 5), (5, 35), (5, 35)], "a scalar has no rows, and the next tensor is asked"
    assert count_rows_and_tokens({"temperature": torch.tensor(3.0)}) == (1, 1)
    assert Batch((tokens, tokens), Lineage.of_rows(0, 5)).num_tokens == 35
    assert count_rows((tokens, torch.tensor(3.0))) == 5, "a scalar has no rows"


@pytest.mark.parametrize("data", nests(), ids=lambda data: type(data).__name__)
def test_the_first_tensor_is_the_first_of_all(data: object) -> None:
    assert first_tensor(data) is next(iterate_tensors(data))
    assert len(list(iterate_tensors(data))) == (3 if isinstance(data, dict) and "more" in data else 2)
    assert map_tensors(torch.neg, 7) == 7, "what is no tensor stays"


@pytest.mark.parametrize(
    "lineage",
    [
        Lineage.of_rows(100, 3),
        Lineage(torch.tensor([4, TOMBSTONE]), torch.tensor([1, 0])),
        Lineage(torch.arange(2), torch.ones(2).long(), torch.arange(4).view(2, 2), torch.arange(64).byte().view(2, 32)),
    ],
    ids=["numbered", "plain", "whole"],
)
def test_lineage_is_pickled_whole(lineage: Lineage) -> None:
    again = pickle.loads(pickle.dumps(lineage))
    for name in ("row_ids", "class_ids", "parents", "digests"):
        one, other = getattr(lineage, name), getattr(again, name)
        assert (one is None and other is None) or (torch.equal(one, other) and one.dtype == other.dtype), name


def test_selection_takes_everything_along_and_a_mixed_row_is_the_first_parents() -> None:
    digests = torch.arange(4 * 32).view(4, 32).byte()
    whole = Lineage(torch.arange(4) + 10, torch.arange(4), None, digests).mix(torch.tensor([3, 2, 1, 0]))
    assert whole.class_ids.tolist() == [0, 1, 2, 3]
    part = whole.select(slice(1, 3))
    assert (part.row_ids.tolist(), part.class_ids.tolist()) == ([11, 12], [1, 2])
    assert part.parents is not None
    assert part.parents.tolist() == [[11, 12], [12, 11]]
    assert part.digests is not None
    assert torch.equal(part.digests, digests[1:3])
    twice = part.mix(torch.tensor([1, 1]))
    assert twice.parents is not None
    assert twice.parents.tolist() == [[11, 12, 12, 11], [12, 11, 12, 11]]


def test_a_buried_row_is_zero_and_the_others_are_untouched() -> None:
    digests = torch.full((3, 32), 9, dtype=torch.uint8)
    lineage = Lineage(torch.tensor([5, 6, 7]), torch.tensor([1, 1, 2]), None, digests)
    data = {"x": torch.ones(3, 2, 2), "y": torch.tensor([3, 4, 5])}
    buried = bury(Batch(data, lineage, 1), torch.tensor([False, True, False]))
    assert buried.lineage.row_ids.tolist() == [5, TOMBSTONE, 7]
    assert buried.lineage.class_ids.tolist() == [1, 1, 2]
    assert buried.class_id == 1
    assert buried.data["x"].flatten(1).sum(1).tolist() == [4, 0, 4]
    assert buried.data["y"].tolist() == [3, 0, 5]
    assert buried.lineage.digests is not None
    assert buried.lineage.digests[:, 0].tolist() == [9, 0, 9]
    assert data["y"].tolist() == [3, 4, 5], "the batch itself is a value"
    assert bury(Batch(data, Lineage.of_rows(0, 3)), torch.tensor([True, False, False])).lineage.digests is None


def test_every_name_of_a_field_is_read() -> None:
    for x, y in (("x", "y"), ("image", "label"), ("input_ids", "labels"), ("inputs", "targets"), ("tokens", "target")):
        batch = Batch({y: torch.ones(2), x: torch.zeros(2)}, Lineage.of_rows(0, 2))
        assert (float(batch.input.sum()), float(batch.target.sum())) == (0, 2)
        changed = batch.replace(target=torch.full((2,), 5.0))
        assert (float(changed.input.sum()), float(changed.target.sum())) == (0, 10)
    with pytest.raises(BatchError, match="No target"):
        _ = Batch((torch.ones(2),), Lineage.of_rows(0, 2)).target
    with pytest.raises(BatchError, match="found lengths"):
        count_rows({"name": "nothing"})


def test_a_new_lineage_takes_the_old_ones_place() -> None:
    batch = Batch((torch.ones(2), torch.ones(2)), Lineage.of_rows(0, 2), 4)
    other = Lineage.of_rows(50, 2)
    assert batch.replace(lineage=other).lineage is other
    assert batch.replace(input=torch.zeros(2)).lineage is batch.lineage
    assert batch.replace(lineage=other).class_id == 4
    moved = batch.to(torch.device("meta"))
    assert (moved.input.device.type, moved.lineage is batch.lineage, moved.class_id) == ("meta", True, 4)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e5m2, torch.bool, torch.bfloat16])
def test_content_of_any_type_goes(dtype: torch.dtype) -> None:
    """Tokens are unsigned numbers of 16 bits, as packs are written."""
    rows = torch.ones(3, 2).to(dtype)
    buried = bury(Batch(rows, Lineage.of_rows(0, 3)), torch.tensor([False, True, False])).data
    assert buried.dtype == dtype
    assert buried.to(torch.float32).tolist() == [[1, 1], [0, 0], [1, 1]]
    assert rows.to(torch.float32).tolist() == [[1, 1]] * 3, "the batch that was given stays"
