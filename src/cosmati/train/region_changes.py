"""What a step does to each region's parameters: how far it moves them, where to, and their digests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cosmati.core.pieces import Pieces
from cosmati.core.state import parameter_root
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.layout.layout import Layout


class RegionUpdate(NamedTuple):
    """The parameters' change in a step by region: weight decay is in it, and whatever else the optimizer does.

    Attributes:
        norms: of it, [regions].
        sketches: of it, float32 [regions, 16]; None where nobody asked.
    """

    norms: Tensor
    sketches: Tensor | None = None

    @property
    def by_name(self) -> dict[str, Tensor | None]:
        """As a step's outcome has them."""
        return {"update_norms": self.norms, "update_sketches": self.sketches}


def update_since(layout: Layout, before: Pieces, sketch: DirectionSketch | None = None) -> RegionUpdate:
    """Return the parameters' change by region.

    Args:
        layout: where they are now.
        before: copies of them as they were.
        sketch: sketches its direction; None for the norms alone.
    """
    change = layout.weights().map(lambda weight, earlier: weight.detach() - earlier, before)
    # Of all regions at once, so that narrow parameters' norms are brought to the type of the widest.
    norms = torch.stack(change.cut.norms(change.tensors))
    members: dict[int, list[int]] = {}
    for index, name in enumerate(change.names):
        members.setdefault(change.regions[name], []).append(index)
    found = torch.stack([torch.linalg.vector_norm(norms[members[region]]) for region in sorted(members)])
    if sketch is None:
        return RegionUpdate(found)
    sketches: dict[int, Tensor] = {}
    for name in change.names:  # in the model's order: so they're added
        region, own = change.regions[name], sketch.of(name, change.whole(name))
        sketches[region] = own if region not in sketches else sketches[region] + own
    return RegionUpdate(found, torch.stack([sketches[region] for region in sorted(sketches)]))


class RegionDigests(NamedTuple):
    """Digests of each region's parameters, as a step found them and as it left them: no salt is in them."""

    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


def region_digests(layout: Layout) -> tuple[bytes, ...]:
    """Return the Merkle root (`parameter_root`) over each region's parameters, 32 bytes each. Every rank has to ask."""
    weights = layout.weights()
    members: dict[int, dict[str, Tensor]] = {}
    for name in weights.names:
        members.setdefault(weights.regions[name], {})[name] = weights.whole(name)
    return tuple(parameter_root(members[region]) for region in sorted(members))
