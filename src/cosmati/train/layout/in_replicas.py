"""Every rank holds every parameter, and the ranks of a replica compute parts of each microbatch.

A rank has the gradients of its own parts of a parameter. They're put together once a step, after the sum over
microbatches, which moves each element by itself. Where somebody asks for norms or directions of each microbatch's
gradient, they're put together in each backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cosmati.core.pieces import Pieces
from cosmati.core.virtual_shards import VirtualShards
from cosmati.routing.cells import RegionWeights
from cosmati.routing.regions import Regions
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.layout.whole import Whole
from cosmati.train.layout.whole_step import WholeStep
from cosmati.train.ranks import Ranks


class Parts(NamedTuple):
    """What a replica's ranks share.

    Attributes:
        peers: these ranks.
        cut: names of the parameters that are cut, and the dimension along which each is.
        shards: that the model was told of.
        compute: has the model compute parts, or the whole where it's given None.
        alone: the parts in which one process computes the same bits; None where it computes whole products, and others.
    """

    peers: ReplicaPeers
    cut: Mapping[str, int]
    shards: VirtualShards
    compute: Callable[[VirtualShards | None], object]
    alone: VirtualShards | None


class InReplicas(Whole):
    """The layout of a model that each rank holds whole and computes a part of (see `Layout`).

    Args:
        model: after surgery, on its device.
        regions: of its trainable parameters.
        ranks: of the run, in replicas of several.
        num_microbatches: V.
        parts: what a replica's ranks share; None where it has one rank.
        rounds: passes read weights rounded to bfloat16.

    Attributes:
        parts: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        regions: Regions,
        ranks: Ranks,
        num_microbatches: int,
        parts: Parts | None,
        *,
        rounds: bool = False,
    ) -> None:
        super().__init__(model, regions, ranks, num_microbatches, rounds=rounds)
        self.parts = parts
        self._is_put_off = False

    @contextmanager
    def step(
        self,
        routes: Sequence[RegionWeights],
        learns: frozenset[int],
        *,
        measure: bool,
        sketch: DirectionSketch | None = None,
    ) -> Iterator[WholeStep]:
        """Open a pass over the step's microbatches."""
        with super().step(routes, learns, measure=measure, sketch=sketch) as step:
            if self.parts is None or measure or sketch is not None:
                yield step
                return
            peers, cut = self.parts.peers, self.parts.cut
            with peers.putting_off({id(p.tensor): cut[p.name] for p in self.parameters if p.name in cut}):
                self._is_put_off = True
                try:
                    yield step
                finally:
                    self._is_put_off = False

    def gradients(self, tensors: Mapping[str, Tensor]) -> Pieces:
        """Return gradients as methods see them."""
        return super().gradients(self.put_together(tensors))

    def put_together(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole gradients, of which this rank has its own parts where the others were put off."""
        if self.parts is None or not self._is_put_off:
            return tensors
        peers, cut = self.parts.peers, self.parts.cut
        own = {
            name: tensors[name].chunk(peers.degree, dim)[peers.place] for name, dim in cut.items() if name in tensors
        }
        if not own:
            return tensors
        kinds = {tensor.dtype for tensor in own.values()}
        assert len(kinds) == 1, "gradients are summed in one type"
        sizes = [tensor.numel() for tensor in own.values()]
        flats = [flat.split(sizes) for flat in peers.everyone(torch.cat([tensor.flatten() for tensor in own.values()]))]
        return {**tensors} | {
            name: torch.cat([flat.view(tensor.shape) for flat in pieces], cut[name])
            for (name, tensor), pieces in zip(own.items(), zip(*flats, strict=True), strict=True)
        }
