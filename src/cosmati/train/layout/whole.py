"""Every rank holds every parameter.

Autograd adds the second leaf of each pair into the first one's memory, as it would in plain accumulation: the same
pair of the tree, the same bits, and no leaf in memory beside it. Gradients are laid out as their parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn

from cosmati.core.pieces import Pieces
from cosmati.core.state import load_model_tensors, model_tensors, parameter_root
from cosmati.routing.cells import RegionWeights
from cosmati.routing.regions import Regions
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.layout.admission import Admission
from cosmati.train.layout.exchange import RankSum
from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.pair_sum import PairSum, clear
from cosmati.train.layout.piece import Bucket, alignment_of, evenly, in_buckets
from cosmati.train.layout.rounded import rounded
from cosmati.train.layout.span import HeldSpan
from cosmati.train.layout.whole_step import WholeStep
from cosmati.train.ranks import Ranks

BUCKET_ELEMENTS = 1 << 20
"""Gradients are exchanged so many at a time, 4 MiB: in messages of 1 MiB a small step takes 4 % more processor time."""

_WIDE = (torch.float32, torch.float64)


class Whole:
    """The layout of a model that each rank holds whole (see `Layout`).

    Args:
        model: after surgery, on its device.
        regions: of its trainable parameters.
        ranks: the data-parallel ranks.
        num_microbatches: V.
        rounds: passes read weights rounded to bfloat16.
    """

    is_cut = False

    def __init__(
        self, model: nn.Module, regions: Regions, ranks: Ranks, num_microbatches: int, *, rounds: bool = False
    ) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.parameters = tuple(
            Parameter(index, name, regions.region_of[name], parameter) for index, (name, parameter) in enumerate(named)
        )
        self.mine = ranks.mine(num_microbatches)
        self.num_regions = len(regions.names)
        self.members = [[p.index for p in self.parameters if p.region == r] for r in range(self.num_regions)]
        self.tensors = [p.tensor for p in self.parameters]
        self.narrow = frozenset(
            p.index for p in self.parameters if p.tensor.is_floating_point() and p.tensor.dtype not in _WIDE
        )
        self.ranks, self._model = ranks, model
        self._rounded = [p for p in model.parameters() if rounds and p.is_floating_point()]
        self._weights = Pieces({p.name: p.tensor for p in self.parameters}, {p.name: p.region for p in self.parameters})
        self.admission = lru_cache(maxsize=256)(self._admission)
        self.looked, self.nests = set[int](), False
        self.has_warned = False
        self._buckets = self._planned() if ranks.has_replicas else ()

    def _planned(self) -> tuple[Bucket, ...]:
        """Return in which buckets gradients are exchanged."""
        sizes, alignment = [tensor.numel() for tensor in self.tensors], alignment_of(self.tensors)
        world = self.ranks.num_replicas
        return tuple(evenly(group, sizes, world, alignment) for group in in_buckets(sizes, BUCKET_ELEMENTS))

    def new_sum(self, num_microbatches: int) -> PairSum | RankSum:
        """Return the tree over a step's leaves."""
        if not self.ranks.has_replicas:
            return PairSum(self.tensors)
        return RankSum(self.ranks, self.tensors, num_microbatches, self._buckets)

    def pieces(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters."""
        return [(p.name, p.tensor) for p in self.parameters]

    def weights(self) -> Pieces:
        """Return the parameters as methods see them."""
        return self._weights

    def gradients(self, tensors: Mapping[str, Tensor]) -> Pieces:
        """Return gradients as methods see them."""
        return self._weights.having(tensors)

    def gather(self, rows: Tensor) -> Tensor:
        """Bring what each rank has of its microbatches into microbatch order."""
        return self.ranks.gather(rows)

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
        clear(self.tensors)
        step = WholeStep(self, routes, learns, measure=measure, sketch=sketch)
        try:
            with rounded(self._rounded):
                yield step
        finally:
            step.close()
            clear(self.tensors)

    def _admission(self, weights: RegionWeights, learns: frozenset[int]) -> Admission:
        chosen = [p for p in self.parameters if p.index in learns and weights[p.region] != 0]
        return Admission(
            [p.tensor for p in chosen],
            frozenset(p.index for p in chosen),
            {p.index: weights[p.region] for p in chosen if weights[p.region] != 1},
        )

    def commit(self, root: Pieces, learns: Collection[int], step: Callable[[], None]) -> frozenset[str]:
        """Put gradients in place and let the optimizers step."""
        moved = []
        for parameter in map(self.parameters.__getitem__, learns):
            gradient = root.tensors.get(parameter.name)
            if gradient is not None:
                moved.append(parameter.name)
                if parameter.index in self.narrow:
                    gradient = gradient.to(parameter.tensor.dtype)
            parameter.tensor.grad = gradient
        step()
        return frozenset(moved)

    @contextmanager
    def perturbed(self, offsets: Pieces) -> Iterator[None]:
        """Add offsets to parameters for a while."""
        with self._kept(offsets.names):
            with torch.no_grad():
                for name, offset in offsets.tensors.items():
                    self._weights.tensors[name].add_(offset)
            yield

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Put other values in place of parameters for a while."""
        with self._kept(values):
            with torch.no_grad():
                for name, value in values.items():
                    self._weights.tensors[name].copy_(value)
            yield

    @contextmanager
    def _kept(self, names: Collection[str]) -> Iterator[None]:
        kept = {name: self._weights.tensors[name].detach().clone() for name in names}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    self._weights.tensors[name].copy_(value)

    def save(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers by name."""
        yield from model_tensors(self._model).items()

    def held(self) -> dict[str, HeldSpan]:
        """Return parameters and persistent buffers, whole."""
        return {name: HeldSpan.of(value) for name, value in self.save()}

    def held_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, HeldSpan]:
        """Return state, whole."""
        return {key: HeldSpan.of(value) for key, value in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take whole parameters and buffers."""
        load_model_tensors(self._model, tensors, resumes=True)

    def whole_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return state as it is: each rank has it whole."""
        return dict(tensors)

    def own_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return state as it is."""
        return dict(tensors)

    def digest(self) -> bytes:
        """Return the Merkle root over parameters and buffers."""
        return parameter_root(dict(self.save()))
