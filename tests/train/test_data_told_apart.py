"""Data that differ are told apart, whatever their batches' parts are called and however a loader is asked for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cosmati.core.batch import Batch
from cosmati.core.lineage import Lineage
from cosmati.errors import PlanError
from cosmati.train.identity import _content_digest, _describe_loader
from cosmati.train.sharding import _refuse_overlaps

ZEROS, ONES = torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize("name", ["rest", "rest/", "rows", "classes", "x"])
@pytest.mark.parametrize("has_lineage", [False, True])
def test_a_part_counts_whatever_it_is_called(name: str, *, has_lineage: bool) -> None:
    def digest(value: torch.Tensor) -> str:
        data: Any = {name: value, "rest": ONES} if name != "rest" else {name: value}
        lineage = Lineage(torch.arange(2), torch.zeros(2, dtype=torch.int64))
        return _content_digest([Batch(data, lineage) if has_lineage else data])

    assert digest(ZEROS) == digest(ZEROS.clone()) != digest(ONES)


def test_the_rest_of_a_batch_counts_beside_a_part_of_that_name() -> None:
    assert _content_digest([{"rest": ZEROS, "n": 1}]) != _content_digest([{"rest": ZEROS, "n": 2}])


def test_batches_that_were_listed_are_part_of_what_a_loader_is() -> None:
    rows = TensorDataset(torch.arange(6))
    facts = [
        dict(_describe_loader(DataLoader(rows, batch_sampler=own))) for own in ([[0, 1], [2, 3]], [[5, 1], [2, 3]])
    ]
    assert facts[0] != facts[1]
    assert facts[0] == dict(_describe_loader(DataLoader(rows, batch_sampler=[[0, 1], [2, 3]])))
    assert "batch_sampler" not in dict(_describe_loader(DataLoader(rows, batch_size=2)))


def test_a_parameter_in_a_buffers_memory_is_found_behind_another_view() -> None:
    memory = torch.zeros(100)
    model = nn.Module()
    model.register_buffer("whole", memory)
    model.register_buffer("part", memory[10:20])
    model.weight = nn.Parameter(memory[50:60])
    with pytest.raises(PlanError, match="whole is a view of weight"):
        _refuse_overlaps(model, "full")
    _refuse_overlaps(model, "optimizer")
    model.other = nn.Parameter(memory[40:70])
    with pytest.raises(PlanError, match="other and weight share memory"):
        _refuse_overlaps(model, "optimizer")
