"""What models and losses may hold that can't be read, or only at a cost: a run goes on, and promises what it can."""

from __future__ import annotations

import random
import weakref
from collections import ChainMap, OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati import RunConfig, Trainer
from cosmati.core.plan import Promise
from cosmati.optim import SGD
from cosmati.train.values import _bits, content_of, read

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


class Lazy(Mapping[int, Tensor]):
    """Rows of a file, read when they're asked for; of one there's none."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __len__(self) -> int:
        return 5000

    def __iter__(self) -> Iterator[int]:
        return iter(range(5000))

    def __getitem__(self, index: int) -> Tensor:
        self.num_reads += 1
        raise FileNotFoundError(index)


class LazyDict(dict[str, int]):
    """Likewise, of a dict's kind."""

    num_reads = 0

    def items(self) -> Any:
        self.num_reads += 1
        raise FileNotFoundError


class Kept(MutableMapping[str, float]):
    """A mapping of the user's own, which keeps all in a dict."""

    def __init__(self) -> None:
        self.store: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.store)

    def __iter__(self) -> Iterator[str]:
        return iter(self.store)

    def __getitem__(self, key: str) -> float:
        return self.store[key]

    def __setitem__(self, key: str, value: float) -> None:
        self.store[key] = value

    def __delitem__(self, key: str) -> None:
        del self.store[key]


def released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


def nested(layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


class Holding(nn.Module):
    def __init__(self, thing: object) -> None:
        super().__init__()
        self.layer, self.thing = nn.Linear(4, 3), thing

    def forward(self, rows: Tensor) -> Tensor:
        assert self.thing is not None
        return self.layer(rows)


def mean_square(model: nn.Module, data: Any, thing: object = 0) -> Tensor:
    assert thing is not None
    return nn.functional.mse_loss(model(data[0]), data[1])


def trained(folder: Path, thing: object, where: str, change: Callable[[], object] = int) -> Trainer:
    torch.manual_seed(0)

    def loss(model: nn.Module, data: Any, held: object = thing if where == "loss" else 0) -> Tensor:
        change()
        return mean_square(model, data, held)

    model = Holding(thing if where == "model" else 0)
    data = [(torch.randn(8, 4), torch.randn(8, 3)) for _ in range(2)]
    config = RunConfig(budget="3ba", num_microbatches=2, num_threads=1, run_folder=folder)
    trainer = Trainer(model, loss, data, optimizers=[SGD(lr=0.1)], config=config)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("where", ["model", "loss"])
@pytest.mark.parametrize("make", [Lazy, LazyDict])
def test_a_mapping_that_reads_when_it_is_asked_is_left_alone(tmp_path: Path, make: Any, where: str) -> None:
    thing = make()
    trainer = trained(tmp_path, thing, where)
    assert thing.num_reads == 0 or isinstance(thing, dict), "Python asks a dict for its items to copy it"
    assert trainer.plan.holds(Promise.RESUME)
    assert trainer.plan.holds(Promise.ELASTIC)


@pytest.mark.parametrize("where", ["model", "loss"])
@pytest.mark.parametrize("make", [random.SystemRandom, released])
def test_what_cannot_be_read_is_named(tmp_path: Path, make: Callable[[], object], where: str) -> None:
    trainer = trained(tmp_path, make(), where)
    assert not trainer.plan.holds(Promise.RESUME)
    assert {"model": "thing", "loss": "default 0"}[where] in str(trainer.plan)
    assert "more could change unseen than is compared: what can be read" in str(trainer.plan)


@pytest.mark.parametrize("where", ["model", "loss"])
@pytest.mark.parametrize("make", [nested, partial(nested, torch.jagged), lambda: np.ma.masked])
def test_tensors_and_arrays_of_unusual_kinds_are_read(tmp_path: Path, make: Callable[[], object], where: str) -> None:
    assert trained(tmp_path, make(), where).plan.holds(Promise.RESUME)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_that_changes_is_seen(layout: torch.layout) -> None:
    tensor = nested(layout)
    before, is_whole = read(tensor)
    assert is_whole
    assert content_of(tensor) == before
    tensor.unbind()[1].data.mul_(2)
    assert content_of(tensor) != before


def test_a_mapping_of_ones_own_is_followed_by_what_it_keeps(tmp_path: Path) -> None:
    kept = Kept()
    changed = trained(tmp_path / "one", kept, "loss", lambda: kept.update(mean=len(kept.store) + kept.get("mean", 0)))
    assert not changed.plan.holds(Promise.RESUME)
    assert "store" in str(changed.plan)
    assert trained(tmp_path / "two", Kept(), "loss").plan.holds(Promise.RESUME)


class Row:
    """Can be referred to weakly."""


@pytest.mark.parametrize(
    "make",
    [dict, OrderedDict, UserDict, ChainMap, weakref.WeakValueDictionary, lambda: MappingProxyType({"first": Row})],
)
def test_mappings_of_pythons_own_are_compared(make: Callable[[], Any]) -> None:
    mapping, row = make(), Row()
    before = content_of(mapping)
    if isinstance(mapping, MappingProxyType):
        mapping = MappingProxyType({"first": row})
    else:
        mapping["first"] = row
    assert content_of(mapping) != before
    assert content_of(mapping) == content_of(mapping)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
@pytest.mark.parametrize("size", [(1 << 16) + 1, 4096 * 37, 4096 * 37 + 5])
def test_large_tensors_are_compared_by_the_sums_of_4096_parts_of_their_bits(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    kept = tensor.numpy() if dtype is not torch.bfloat16 else tensor.view(torch.int16).numpy()
    bits = kept.view({1: "u1", 2: "i2", 4: "i4", 8: "i8"}[tensor.element_size()]).astype("i8")
    whole = size - size % 4096
    expected = [*(sum(map(int, part)) for part in bits[:whole].reshape(4096, -1)), *map(int, bits[whole:])]
    wrapped = [(value + 2**63) % 2**64 - 2**63 for value in expected]
    assert torch.frombuffer(bytearray(_bits(tensor)[2]), dtype=torch.int64).tolist() == wrapped
    before = _bits(tensor)
    tensor[size - 1] = 0 if tensor[size - 1] else 1
    assert _bits(tensor) != before


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_compared_by_what_they_hold(layout: torch.layout) -> None:
    """Not by what they are in this process: ranks compare theirs."""
    edges = torch.eye(4).roll(1, 0)
    one, other = edges.to_sparse(layout=layout), edges.to_sparse(layout=layout)
    assert content_of(one) == content_of(other) != content_of(edges)
    assert content_of(one) != content_of((edges * 2).to_sparse(layout=layout))
    assert content_of(one) != content_of(edges.T.to_sparse(layout=layout))
    assert content_of(one) != content_of(edges[:, :3].to_sparse(layout=layout))
    was = content_of(other)
    other.mul_(2)
    assert content_of(other) != was
