"""Guards of the layouts that a second one stands behind, each by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.errors import PlanError
from cosmati.train.layout.piece import alignment_of
from cosmati.train.layout.sharded_step import ShardedSlot, ShardedStep

GROUP: Any = SimpleNamespace(number=3, names=("block.weight",))


def test_a_block_s_sum_comes_once() -> None:
    step = object.__new__(ShardedStep)
    step._node = {}
    step.take(GROUP, torch.ones(2))
    with pytest.raises(PlanError, match=r"block\.weight and its block arrive in parts"):
        step.take(GROUP, torch.ones(2))


def test_no_gradient_comes_after_its_block_s_sum() -> None:
    slot: Any = object.__new__(ShardedSlot)
    slot._layout = SimpleNamespace(parameters=[SimpleNamespace(name="block.weight")], group_of={"block.weight": 3})
    slot._arrived, slot._filled, slot._factors = set(), {3}, {}
    with pytest.raises(PlanError, match="arrives in parts, or after those of its block"):
        slot.arrived(0, torch.ones(2))
    slot._filled = set()
    assert torch.equal(slot.arrived(0, torch.ones(2)), torch.tensor([-0.0, -0.0]))
    with pytest.raises(PlanError, match="arrives in parts"):
        slot.arrived(0, torch.ones(2))


def test_pieces_begin_at_64_bytes_of_the_narrowest() -> None:
    assert alignment_of([torch.zeros(3, dtype=torch.float64), torch.zeros(3)]) == 16
    assert alignment_of([torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)]) == 32
