"""How far a step has moved each region, and what its parameters' digest is, against sums over all their numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmati.core.pieces import Pieces
from cosmati.core.state import parameter_root
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.region_changes import region_digests, update_since

REGIONS = {"a": 1, "b": 0, "c": 1, "d": 2}


def weights(seed: int) -> Pieces:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2, 2), "d": ()}
    return Pieces({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, REGIONS)


def layout(now: Pieces) -> Any:
    return SimpleNamespace(weights=lambda: now)


@pytest.mark.parametrize("has_sketch", [False, True])
def test_each_regions_move_is_that_of_all_its_parameters(has_sketch: bool) -> None:
    before, now = weights(0), weights(1)
    sketch = DirectionSketch(3) if has_sketch else None
    found = update_since(layout(now), before, sketch)
    for region in range(3):
        own = [name for name in REGIONS if REGIONS[name] == region]
        moved = [(now.tensors[name] - before.tensors[name]).double() for name in own]
        expected = math.sqrt(sum(float(one.square().sum()) for one in moved))
        assert float(found.norms[region]) == pytest.approx(expected, rel=1e-6)
        if found.sketches is not None:
            parts = [DirectionSketch(3).of(name, now.tensors[name] - before.tensors[name]) for name in own]
            assert torch.equal(found.sketches[region], sum(parts[1:], parts[0]))
    assert (found.sketches is not None) == has_sketch
    assert found.by_name == {"update_norms": found.norms, "update_sketches": found.sketches}
    assert len(found.norms) == 3


def test_a_digest_is_of_a_regions_own_parameters() -> None:
    now = weights(0)
    found = region_digests(layout(now))
    expected = [
        parameter_root({name: now.tensors[name] for name in REGIONS if REGIONS[name] == region}) for region in range(3)
    ]
    assert list(found) == expected
    now.tensors["c"].add_(1)  # type: ignore[union-attr]
    assert [one == other for one, other in zip(region_digests(layout(now)), found, strict=True)] == [True, False, True]
