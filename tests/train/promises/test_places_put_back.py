"""What models and losses hold beside parameters that train comes back, in place: others may hold the same objects."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cosmati.train import held
from cosmati.train.held import remember

BIG = 64
"""Bytes, for what is taken as too large to be copied."""


def test_containers_and_arrays_come_back_in_place() -> None:
    kept = SimpleNamespace(
        listed=[1, [2, 3]],
        mapped={"a": 1, "b": {"c": [2]}},
        unique={1, 2},
        queue=deque([1, 2], maxlen=4),
        data=bytearray(b"ab"),
        numbers=array("i", [1, 2]),
        floats=np.arange(3.0),
        tensor=torch.arange(3.0),
        pair=([5], np.ones(1)),
    )
    before = dict(vars(kept))
    inner = kept.listed[1], kept.mapped["b"], kept.mapped["b"]["c"], *kept.pair
    put_back = remember({"loss": kept})
    for _ in range(2):
        kept.listed[1].append(4)
        kept.listed.append(1)
        kept.mapped["b"]["c"][0] = 7
        kept.mapped["b"]["d"] = kept.mapped["z"] = 1
        del kept.mapped["a"]
        kept.unique ^= {1, 8}
        kept.queue.extend([3, 4, 5])
        kept.data += b"c"
        kept.data[0] = 0
        kept.numbers.append(3)
        kept.floats += 1
        kept.tensor.data.add_(1)
        kept.pair[0].clear()
        kept.pair[1][:] = 9
        kept.listed, kept.late = None, 3
        put_back()
        assert all(getattr(kept, name) is value for name, value in before.items())
        assert kept.listed == [1, [2, 3]]
        assert kept.mapped == {"b": {"c": [2]}, "a": 1}
        assert (kept.unique, kept.queue, kept.data, kept.numbers.tolist()) == (
            {1, 2},
            deque([1, 2]),
            bytearray(b"ab"),
            [1, 2],
        )
        assert kept.floats.tolist() == kept.tensor.tolist() == [0, 1, 2]
        assert (kept.pair[0], kept.pair[1].tolist()) == ([5], [1.0])
        assert (kept.listed[1], kept.mapped["b"], kept.mapped["b"]["c"], *kept.pair) == inner


def test_what_a_model_did_not_have_is_taken_away() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    put_back = remember({"": model})
    layer = model[1]
    model.late = nn.Linear(2, 2)
    layer.seen, layer.cache = 3, [1]
    layer.register_buffer("drift", torch.zeros(2))
    layer.weight.note = layer.running_mean.note = 1
    assert layer.running_var is not None
    layer.running_var.fill_(7)
    layer.num_batches_tracked = None
    put_back()
    assert [name for name, _ in model.named_modules()] == ["", "0", "1"]
    assert not {"seen", "cache"} & {*vars(layer)}
    assert [*layer._buffers] == ["running_mean", "running_var", "num_batches_tracked"]
    assert not vars(layer.weight)
    assert not vars(layer.running_mean)
    assert layer.running_var.tolist() == [1, 1]
    assert layer.num_batches_tracked is not None


def test_a_buffer_of_none_stays_one() -> None:
    model = nn.BatchNorm1d(2, track_running_stats=False)
    put_back = remember({"": model})
    model.register_buffer("running_mean", torch.zeros(2))
    put_back()
    assert model.running_mean is None


def test_only_parameters_that_train_in_a_model_stay_as_they_are() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    model.teachers = [nn.Linear(2, 2)]
    teacher = nn.Linear(2, 2)
    tensors = [model[0].weight, model[1].weight, model.teachers[0].weight, teacher.weight]
    before = [one.detach().clone() for one in tensors]
    put_back = remember({"": model, "loss": lambda: teacher})
    for one in tensors:
        one.data.add_(1)
    put_back()
    back = [torch.equal(one, copied) for one, copied in zip(tensors, before, strict=True)]
    assert back == [False, True, True, True]
    assert all(one.requires_grad == (index != 1) for index, one in enumerate(tensors))


@pytest.mark.parametrize(("num_bytes", "is_back"), [((1 << 30) - 24, True), ((1 << 30) - 23, False)])
def test_large_models_of_which_little_trains_are_not_copied(num_bytes: int, is_back: bool) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    model: Any = nn.Sequential(nn.Linear(9, 2), frozen)
    body = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    model.register_parameter("body", nn.Parameter(body, requires_grad=False))
    model.register_buffer("seen", torch.zeros(2))
    before = frozen.weight.clone()
    put_back = remember({"": model})
    frozen.weight.data.add_(1)
    model.seen.add_(1)
    put_back()
    assert torch.equal(frozen.weight, before) == is_back
    assert model.seen.tolist() == [0, 0]


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_what_is_too_large_is_left_as_it_is(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_MAX_STATE_BYTES", BIG)
    kept = SimpleNamespace(small=make(BIG // 4, dtype=make(1).dtype)[: BIG // make(1).itemsize], large=make(BIG))
    put_back = remember({"loss": kept})
    kept.small += 1
    kept.large += 1
    put_back()
    assert kept.small.max() == 0
    assert kept.large.min() == 1


def test_of_long_containers_the_items_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_ITEMS", 2)
    kept = SimpleNamespace(short=[[1], [2]], long=[[1], [2], [3]])
    put_back = remember({"loss": kept})
    for one in (kept.short, kept.long):
        one[0].append(9)
        one.append(4)
    put_back()
    assert (kept.short, kept.long) == ([[1], [2]], [[1, 9], [2], [3]])


def test_what_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    readonly, text = np.zeros(3), tmp_path / "numbers.npy"
    readonly.flags.writeable = False
    np.save(text, np.zeros(3))
    file = np.load(text, mmap_mode="r+")
    sparse, wide = torch.eye(2).to_sparse(), torch.zeros(1).expand(3)
    put_back = remember({"loss": SimpleNamespace(all=[readonly, file, sparse, wide])})
    file += 1
    sparse._values().fill_(4)
    put_back()
    assert file.tolist() == [1, 1, 1]  # A file is data.
    assert sparse.to_dense().diagonal().tolist() == [4, 4]
    assert readonly.tolist() == wide.tolist() == [0, 0, 0]


def test_containers_of_ones_own_kind_are_not_rewritten() -> None:
    class Journal(list[int]):
        """May do anything when it's written to."""

    kept = SimpleNamespace(journal=Journal([1]), ordered=OrderedDict(a=[1]))
    put_back = remember({"loss": kept})
    kept.journal.append(2)
    kept.ordered["a"].append(2)
    kept.ordered["b"] = 3
    put_back()
    assert (kept.journal, kept.ordered) == ([1, 2], {"a": [1], "b": 3})


def test_a_circle_of_containers_comes_back() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    put_back = remember({"loss": SimpleNamespace(circle=circle)})
    circle.clear()
    put_back()
    assert circle[0] == 1
    assert circle[1] is circle


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_script_s_own_tensors_come_back() -> None:
    model = torch.jit.script(nn.BatchNorm1d(2))
    mean = model.running_mean.clone()
    put_back = remember({"": model})
    model.running_mean.add_(1)
    put_back()
    assert torch.equal(model.running_mean, mean)


def test_nothing_that_is_put_back_is_part_of_a_graph() -> None:
    model = nn.BatchNorm1d(2)
    put_back = remember({"": model, "loss": SimpleNamespace(weights=nn.Parameter(torch.ones(2)))})
    put_back()
    assert model.running_mean is not None
    assert model.running_mean.grad_fn is None
