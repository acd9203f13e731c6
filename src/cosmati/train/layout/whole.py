"""Every rank holds every parameter.

Autograd adds the second leaf of each pair into the first one's memory, as it would in plain accumulation: the same
pair of the tree, the same bits, and no leaf in memory beside it. Gradients are laid out as their parameters are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import attrgetter
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cosmati.core.meetings import may_meet
from cosmati.core.pieces import Pieces
from cosmati.core.state import load_model_tensors, model_tensors, parameter_root
from cosmati.errors import PlanError
from cosmati.routing.cells import RegionWeights
from cosmati.routing.regions import Regions
from cosmati.train.bare_calls import run_backward
from cosmati.train.direction_sketch import WIDTH, DirectionSketch
from cosmati.train.layout.admission import Admission
from cosmati.train.layout.exchange import RankSum
from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.pair_sum import PairSum, clear
from cosmati.train.layout.piece import Bucket, alignment_of, evenly, in_buckets
from cosmati.train.layout.rounded import rounded
from cosmati.train.layout.span import HeldSpan
from cosmati.train.layout.tree import divide, leaf_norm
from cosmati.train.ranks import Ranks

BUCKET_ELEMENTS = 1 << 20
"""Gradients are exchanged so many at a time, 4 MiB: in messages of 1 MiB a small step takes 4 % more processor time."""

_WIDE = (torch.float32, torch.float64)
_GRADIENT = attrgetter("grad")


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
        self.arrives_once = False
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


class WholeStep:
    """One pass over a step's microbatches."""

    def __init__(
        self,
        layout: Whole,
        routes: Sequence[RegionWeights],
        learns: frozenset[int],
        *,
        measure: bool,
        sketch: DirectionSketch | None = None,
    ) -> None:
        self.layout = layout
        self.measures, self.sketch = measure, sketch
        self._admissions = [layout.admission(weights, learns) for weights in routes]
        self._sum = layout.new_sum(len(routes))
        self.in_backward: WholeSlot | None = None
        # Norms need every gradient's arrival, and the first step of a run looks whether each arrives once.
        attenuated = frozenset[int]().union(*(a.attenuation for a in self._admissions))
        looks = measure or sketch is not None
        watched = attenuated if layout.arrives_once and not looks else learns
        self._handles: list[RemovableHandle] = [
            layout.tensors[index].register_hook(self._arrival_of(index)) for index in watched - layout.narrow
        ]
        # Buckets that leave early would come between collectives of the user's own, on other ranks in another order.
        if isinstance(self._sum, RankSum) and layout.arrives_once and not layout.ranks.has_met:
            self._handles += [
                layout.tensors[index].register_post_accumulate_grad_hook(self._end_of(self._sum, index))
                for index in learns - layout.narrow
            ]

    def slot(self, microbatch: int) -> WholeSlot:
        """Return the slot of this rank's next microbatch."""
        return WholeSlot(self, self._admissions[microbatch])

    def _arrival_of(self, index: int) -> Callable[[Tensor | None], Tensor | None]:
        """Attenuate and measure a gradient as it arrives, before it's summed.

        A loss may differentiate by parameters itself (a gradient penalty): that is none of ours. A function of the
        user's own may return None for a gradient, which autograd hands to hooks.
        """

        def arrive(gradient: Tensor | None) -> Tensor | None:
            slot = self.in_backward
            return None if slot is None or gradient is None else slot.arrived(index, gradient)

        return arrive

    def _end_of(self, total: RankSum, index: int) -> Callable[[Tensor], None]:
        """Say of the last leaf that a gradient of it is there."""

        def end(_: Tensor) -> None:
            if self.in_backward is not None:
                total.arrived(index)

        return end

    def begin(self, slot: WholeSlot, indices: frozenset[int], *, is_final: bool) -> None:
        """Take note that a slot's backward pass begins, for which parameters, and whether it isn't run anew."""
        self.in_backward = slot
        if isinstance(self._sum, RankSum) and self._sum.is_at_last and is_final and may_meet():
            self._sum.expect(indices)

    def close(self) -> None:
        """Take the hooks away, with what each backward pass would go on asking where none is left."""
        for handle in self._handles:
            handle.remove()
        for tensor in self.layout.tensors if self._handles else ():
            if tensor._backward_hooks is not None and not tensor._backward_hooks:  # noqa: SLF001
                tensor._backward_hooks = None  # noqa: SLF001
        if isinstance(self._sum, RankSum):
            self._sum.close()

    def lend(self) -> None:
        """Make the parameters' gradients ready for a leaf, and for nothing that a loss has left there by itself."""
        if not self.layout.has_warned and {*map(_GRADIENT, self.layout.tensors)} - {None}:
            self.layout.has_warned = True
            warnings.warn(
                "The loss has left gradients behind, by a backward of its own. With several microbatches they aren't "
                "weighed, and are no part of the step: return what they're of as part of the loss, or use "
                "torch.autograd.grad.",
                stacklevel=2,
            )
        self._sum.lend()

    def fold(self, widened: Mapping[int, Tensor]) -> None:
        """Take the leaf that stands in the parameters' gradients, and the part of it that was brought to float32."""
        self._sum.fold(widened)

    def root(self, denominators: Tensor | None) -> Pieces:
        """Return the sum of all V leaves over each region's denominator."""
        root = self._sum.root()
        self.layout.arrives_once = True
        if denominators is not None:
            divide(root, self.layout.members, denominators)
        return self.layout.gradients(
            {p.name: gradient for p, gradient in zip(self.layout.parameters, root, strict=True) if gradient is not None}
        )


class WholeSlot:
    """One microbatch of this rank (see `Slot`)."""

    def __init__(self, step: WholeStep, admission: Admission) -> None:
        self.norms: list[Tensor] = []
        self.sketches: list[Tensor] = []
        self._step = step
        self._admission = admission
        self._seen: dict[int, Tensor | None] = {}
        self._sketched: dict[int, Tensor] = {}
        self._widened: dict[int, Tensor] = {}
        self._is_lent = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hand the leaf on."""
        if kind is None:
            if not self._is_lent:
                self._step.lend()
            self._step.fold(self._widened)
            if self._step.measures:
                self.norms = self._regional_norms()
            if self._step.sketch is not None:
                self.sketches = self._regional_sketches()

    def backward(self, objective: Tensor, *, is_final: bool = True) -> None:
        """Differentiate the objective for what may learn from it.

        Autograd prunes what isn't asked for: a denied weight gradient isn't computed, and the pass stops where nothing
        nearer the input learns.
        """
        tensors, indices, attenuation = self._admission
        layout = self._step.layout
        if not tensors or not objective.requires_grad:
            return
        self._step.lend()
        self._is_lent = True
        self._step.begin(self, indices, is_final=is_final)
        try:
            run_backward(objective, () if len(tensors) == len(layout.tensors) else tensors)
        finally:
            self._step.in_backward = None
        for index in layout.narrow & indices:
            gradient = layout.tensors[index].grad
            if gradient is not None:
                layout.tensors[index].grad = None
                wide = gradient.float()
                self.arrived(index, wide.mul_(attenuation[index]) if index in attenuation else wide, is_whole=True)
                self._widened[index] = wide

    def arrived(self, index: int, gradient: Tensor, *, is_whole: bool = False) -> Tensor | None:
        """Take note of a gradient; return it attenuated, None where it stays as it is.

        Raises:
            PlanError: it is sparse, or comes in parts: their sum would depend on the number of ranks, and no part's
                norm is the whole.
        """
        if gradient.layout is not torch.strided:
            msg = (
                f"The gradient of {self._step.layout.parameters[index].name} is sparse, and several microbatches are "
                "summed dense. Use sparse=False, or num_microbatches=1 without a policy."
            )
            raise PlanError(msg)
        if index in self._seen:
            msg = (
                f"The gradient of {self._step.layout.parameters[index].name} arrives in parts: backward runs within "
                "backward. With torch.utils.checkpoint, pass use_reentrant=False."
            )
            raise PlanError(msg)
        rho = 1.0 if is_whole else self._admission.attenuation.get(index, 1.0)
        if rho != 1:
            gradient = gradient * rho
        self._seen[index] = leaf_norm(gradient) if self._step.measures else None
        if self._step.sketch is not None:
            self._sketched[index] = self._step.sketch.of(self._step.layout.parameters[index].name, gradient)
        return gradient if rho != 1 else None

    def _regional_norms(self) -> list[Tensor]:
        """Return the leaf's norm in each region, of whole parameters in the model's order."""
        nothing = torch.tensor(torch.nan, dtype=torch.float64, device=self._step.layout.tensors[0].device)
        found = [
            [norm for i in members if (norm := self._seen.get(i)) is not None] for members in self._step.layout.members
        ]
        return [torch.linalg.vector_norm(torch.stack(norms)).double() if norms else nothing for norms in found]

    def _regional_sketches(self) -> list[Tensor]:
        """Return the leaf's sketch in each region: the sum of its parameters', in the model's order."""
        nothing = torch.full((WIDTH,), torch.nan, device=self._step.layout.tensors[0].device)
        found = [[self._sketched[i] for i in members if i in self._sketched] for members in self._step.layout.members]
        return [reduce(torch.add, sketches) if sketches else nothing for sketches in found]
