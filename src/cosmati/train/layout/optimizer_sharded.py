"""Every rank holds every parameter, and steps its own pieces of them: optimizer state is there once, not on each rank.

A step sends what a ring sends: gradients go to the ranks that own their pieces, and parameters come back from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cosmati.core.pieces import Pieces
from cosmati.optim.piecewise import demands_of
from cosmati.optim.sharing import Sharing
from cosmati.optim.stepping import GroupedOptimizer
from cosmati.routing.regions import Regions
from cosmati.train.layout.exchange import RankSum
from cosmati.train.layout.in_replicas import InReplicas, Parts
from cosmati.train.layout.owned import OwnedCut
from cosmati.train.layout.pair_sum import PairSum
from cosmati.train.layout.piece import alignment_of, by_owner, cut, in_buckets, memory, strides_of
from cosmati.train.layout.span import HeldSpan, parameter_in
from cosmati.train.layout.whole import BUCKET_ELEMENTS
from cosmati.train.ranks import Ranks


class OptimizerSharded(InReplicas):
    """The layout of a model whose optimizers are shared out over several ranks (see `Layout`).

    Optimizers are built over whole parameters, whose names, shapes and groups they go by. `rehome` gives them pieces.

    Args:
        model: after surgery, on its device.
        regions: of its trainable parameters.
        ranks: the data-parallel ranks, more than one.
        num_microbatches: V.
        parts: what a replica's ranks share; None where it has one rank.
        rounds: passes read weights rounded to bfloat16.
    """

    is_cut = True

    def __init__(
        self,
        model: nn.Module,
        regions: Regions,
        ranks: Ranks,
        num_microbatches: int,
        parts: Parts | None = None,
        *,
        rounds: bool = False,
    ) -> None:
        super().__init__(model, regions, ranks, num_microbatches, parts, rounds=rounds)
        self._held: dict[int, nn.Parameter] = {p.index: p.tensor for p in self.parameters}
        self._cut = OwnedCut(ranks, self.parameters, ())

    def rehome(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let each optimizer hold this rank's pieces in place of whole parameters.

        Raises:
            PlanError: one can't.
        """
        index = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        demands = [demands_of(optimizer) for optimizer in optimizers]
        may_be_cut = [{index[id(p)] for p in own.divisible if id(p) in index} for own in demands]
        held = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
        divisible = {
            i
            for i, tensor in enumerate(self.tensors)
            if all(i in own for own, of in zip(may_be_cut, held, strict=True) if id(tensor) in of)
            and tensor.stride() == strides_of(tensor)
        }
        together = [[index[id(p)] for p in unit if id(p) in index] for own in demands for unit in own.together]
        sizes, alignment = [tensor.numel() for tensor in self.tensors], alignment_of(self.tensors)
        pieces = cut(sizes, divisible, together, self.ranks.world, alignment)
        if self.ranks.degree == 1:
            groups = in_buckets(sizes, BUCKET_ELEMENTS)
            self._buckets = tuple(by_owner(group, pieces, self.ranks.world, alignment) for group in groups)
        self._cut = OwnedCut(self.ranks, self.parameters, pieces)
        self._held = {}
        for parameter in self.parameters:
            own = self._cut.own(parameter.name)
            if own is not None:
                is_all = self._cut.is_whole(parameter.name)
                flat = memory(parameter.tensor.detach(), parameter.tensor)[own.start : own.stop]
                self._held[parameter.index] = parameter.tensor if is_all else nn.Parameter(flat)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                places = [index.get(id(p)) for p in group["params"]]
                group["params"] = [self._held[i] for i in places if i is not None and i in self._held]
            if isinstance(optimizer, GroupedOptimizer):
                optimizer.sharing = Sharing()
            optimizer.__dict__["holds_pieces"] = True  # for who looks at an optimizer from outside

    def pieces(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and this rank's pieces."""
        return [(p.name, self._held[p.index]) for p in self.parameters if p.index in self._held]

    def gradients(self, tensors: Mapping[str, Tensor]) -> Pieces:
        """Return this rank's pieces of gradients; with replicas of several ranks they come whole."""
        if self.ranks.degree > 1:
            tensors = {name: self._cut.piece(name, whole) for name, whole in self.put_together(tensors).items()}
        return Pieces(tensors, self._weights.regions, self._cut)

    def new_sum(self, num_microbatches: int) -> PairSum | RankSum:
        """Return the tree over a step's leaves, of which each rank keeps its share where it's a replica by itself."""
        if self.ranks.degree > 1:
            return super().new_sum(num_microbatches)
        return RankSum(self.ranks, self.tensors, num_microbatches, self._buckets, keeps_share=True)

    def commit(self, root: Pieces, learns: Collection[int], step: Callable[[], None]) -> frozenset[str]:
        """Put gradients in place, let the optimizers step, and bring each parameter to all ranks."""
        moved = []
        for parameter in map(self.parameters.__getitem__, sorted(learns)):
            gradient, held = root.tensors.get(parameter.name), self._held.get(parameter.index)
            if gradient is not None:
                moved.append(parameter.name)
            if held is not None:
                held.grad = None if gradient is None else gradient.to(held.dtype)
        step()
        self._cut.spread(moved)
        return frozenset(moved)

    @contextmanager
    def perturbed(self, offsets: Pieces) -> Iterator[None]:
        """Add offsets to whole parameters for a while."""
        with super().perturbed(self._weights.having(self._cut.wholes(offsets.tensors))):
            yield

    def whole_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return state whole: a method's is."""
        return self._cut.whole_state(tensors) if of_optimizers else dict(tensors)

    def held(self) -> dict[str, HeldSpan]:
        """Return trainable parameters, which all ranks hold alike, and on the first rank the rest."""
        trains = {p.name for p in self.parameters}
        return {name: one for name, one in super().held().items() if self.ranks.rank == 0 or name in trains}

    def held_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, HeldSpan]:
        """Return this rank's pieces of an optimizer's state; a method's is like the parameters that it's of."""
        if of_optimizers:
            return self._cut.held_state(tensors)
        trains = {p.name for p in self.parameters}
        return {
            key: HeldSpan.of(value)
            for key, value in tensors.items()
            if self.ranks.rank == 0 or parameter_in(key, trains) is not None
        }

    def own_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return this rank's part of an optimizer's state, or all of a method's."""
        return self._cut.own_state(tensors) if of_optimizers else dict(tensors)
