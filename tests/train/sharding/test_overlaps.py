"""Parameters that lie in one another's memory can't each have a piece; buffers that do stay behind where weights go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cosmati.errors import PlanError
from cosmati.train.sharding import _refuse_overlaps


def model(**tensors: torch.Tensor) -> nn.Module:
    made = nn.Module()
    for name, tensor in tensors.items():
        if name.startswith("buffer"):
            made.register_buffer(name, tensor)
        else:
            setattr(made, name, nn.Parameter(tensor))
    return made


MEMORY = torch.zeros(16)


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.zeros(4), "b": torch.zeros(4)},
        {"a": MEMORY[:4], "b": MEMORY[4:8]},
        {"a": MEMORY[4:8], "b": MEMORY[:4]},
        {"a": MEMORY[:8:2], "b": MEMORY[7:9]},
        {"a": torch.zeros(0), "b": torch.zeros(0)},
        {"a": MEMORY[:4], "buffer": MEMORY[4:]},
        {"buffer1": MEMORY[:8], "buffer2": MEMORY[4:]},
    ],
)
def test_what_lies_apart_may_be_sharded(tensors: dict[str, torch.Tensor], sharding: str) -> None:
    _refuse_overlaps(model(**tensors), sharding)


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
@pytest.mark.parametrize(
    "tensors",
    [
        {"a": MEMORY[:4], "b": MEMORY[3:8]},
        {"a": MEMORY[:8:2], "b": MEMORY[6:9]},
        {"a": MEMORY[:4], "b": MEMORY[:4]},
        {"a": MEMORY.view(4, 4)[:, :2], "b": MEMORY[12:14]},
        {"c": torch.zeros(3), "a": MEMORY[:16], "b": MEMORY[5:6]},
    ],
)
def test_parameters_that_share_memory_are_refused(tensors: dict[str, torch.Tensor], sharding: str) -> None:
    with pytest.raises(PlanError, match=r"(a and b|b and a) share memory, and are two parameters"):
        _refuse_overlaps(model(**tensors), sharding)


def test_a_buffer_in_a_parameters_memory_is_refused_where_weights_are_cut() -> None:
    made = model(weight=MEMORY[:8], buffer=MEMORY[6:])
    _refuse_overlaps(made, "optimizer")
    with pytest.raises(PlanError, match="buffer is a view of weight, whose memory sharding='full' cuts"):
        _refuse_overlaps(made, "full")
    shared = nn.Module()
    shared.a, shared.b = nn.Linear(2, 2), nn.Linear(2, 2)
    shared.b.weight = shared.a.weight
    _refuse_overlaps(shared, "full")
