"""What a worker hands over arrives as it was, in one piece of memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cosmati.core.batch import Batch, Lineage
from cosmati.data.loader import StreamingLoader
from cosmati.data.parcel import Parcel, in_worker, out_of_worker
from cosmati.data.streaming import StreamingDataset
from tests.data.shard_files import write_source

pytestmark = pytest.mark.long

DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.float64]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    raw = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(len(shape)))
    return raw.to(dtype)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6))
def test_any_tensors_arrive_as_they_were(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    content = {f"{n}": tensor_of(dtype, tuple(shape)) for n, (dtype, shape) in enumerate(kinds)}
    found = Parcel(content).unpack()
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_a_batch_arrives_whole() -> None:
    shared = torch.arange(12.0).view(3, 4)
    data = {"x": shared.t(), "same": [shared, shared], "names": ["a", "b"], "expanded": torch.ones(1).expand(5)}
    data |= {"parameter": nn.Parameter(torch.ones(2)), "big": torch.ones(1 << 15)}
    batch = Batch(data, Lineage(torch.arange(3), torch.zeros(3, dtype=torch.int64)), 0, 2)
    found = Parcel(batch).unpack()
    assert (found.class_id, found.band, found.data["names"]) == (0, 2, ["a", "b"])
    assert torch.equal(found.lineage.row_ids, batch.lineage.row_ids)
    for name in ("x", "expanded", "parameter", "big"):
        assert torch.equal(found.data[name], data[name])
    assert found.data["same"][0] is found.data["same"][1], "one tensor stays one"
    assert isinstance(found.data["parameter"], nn.Parameter)


def test_small_tensors_do_not_keep_the_large_ones() -> None:
    found = Parcel({"ids": torch.arange(4), "rows": torch.ones(1 << 20)}).unpack()
    assert found["ids"].untyped_storage().nbytes() == 32
    assert found["rows"].untyped_storage().nbytes() >= 4 << 20


class Many(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> object:
        return in_worker([torch.full((1 << 15,), float(number)) for _ in range(40)])


def as_it_is(items: list[Any]) -> Any:
    return items[0]


def test_many_tensors_take_one_descriptor() -> None:
    def count() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before, kept = count(), []
    for number, parcel in enumerate(DataLoader(Many(), collate_fn=as_it_is, num_workers=1)):
        assert isinstance(parcel, Parcel)
        tensors = out_of_worker(parcel)
        assert all(bool((tensor == number).all()) for tensor in tensors)
        kept += tensors
    assert len(kept) == 240
    assert count() - before <= 6 + 4, "one for each batch, and what the loader itself has open"


def test_nothing_is_packed_where_nothing_crosses() -> None:
    content = [torch.ones(3)]
    assert in_worker(content) is content
    assert out_of_worker(content) is content


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_give_what_the_process_itself_gives(tmp_path: Path, context: str) -> None:
    data = StreamingDataset(write_source(tmp_path, [7, 5]), columns=("number", "tokens"))
    expected = list(StreamingLoader(data, 5))
    found = list(StreamingLoader(data, 5, num_workers=1, multiprocessing_context=context))
    assert len(found) == len(expected) == 3
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.lineage.row_ids, other.lineage.row_ids)
        assert all(torch.equal(a, b) for a, b in zip(one.data, other.data, strict=True))
