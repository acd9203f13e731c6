"""Batches of any nest, with their lineage."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cosmati.core.batch import TOMBSTONE, Batch, Lineage, count_rows, iterate_tensors, map_tensors
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
