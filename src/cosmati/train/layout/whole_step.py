"""One pass over a step's microbatches where every rank holds every parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cosmati.core.meetings import may_meet
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.routing.cells import RegionWeights
from cosmati.train.bare_calls import run_backward
from cosmati.train.direction_sketch import WIDTH, DirectionSketch
from cosmati.train.layout.admission import Admission
from cosmati.train.layout.exchange import RankSum
from cosmati.train.layout.nested import runs_within
from cosmati.train.layout.pair_sum import clear
from cosmati.train.layout.tree import divide, leaf_norm

if TYPE_CHECKING:
    from cosmati.train.layout.whole import Whole

_GRADIENT = attrgetter("grad")
_TRAINS = attrgetter("requires_grad")
_AFTER_GRADIENT = attrgetter("_post_accumulate_grad_hooks")
_FAR_BELOW_INFINITY = 1e30


def _hooked(
    register: Callable[[Tensor, Callable[[Tensor], Any]], RemovableHandle],
    tensor: Tensor,
    hook: Callable[[Tensor], Any],
) -> RemovableHandle:
    """Hook a parameter, also where another sub-step's loss has frozen what this one's will thaw: hooks stay."""
    trains, tensor.requires_grad = tensor.requires_grad, True
    handle = register(tensor, hook)
    tensor.requires_grad = trains
    return handle


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
        self.is_finite = False
        self.in_backward: WholeSlot | None = None
        self.reached = set[int]()
        # Norms need every gradient's arrival, and a run's first pass to each looks whether it arrives once.
        attenuated = frozenset[int]().union(*(a.attenuation for a in self._admissions))
        looks = measure or sketch is not None
        watched = learns if looks else attenuated | (learns - layout.looked)
        self._handles: list[RemovableHandle] = [
            _hooked(Tensor.register_hook, layout.tensors[index], self._arrival_of(index))
            for index in watched - layout.narrow
        ]
        # Buckets that leave early would come between collectives of the user's own, on other ranks in another order;
        # and a hook of the user's own may still change gradients that others have.
        has_hooks = any(map(_AFTER_GRADIENT, layout.tensors))
        if isinstance(self._sum, RankSum) and not layout.ranks.has_met and not has_hooks:
            self._handles += [
                _hooked(
                    Tensor.register_post_accumulate_grad_hook, layout.tensors[index], self._end_of(self._sum, index)
                )
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
            if slot is None or gradient is None or not slot.learns_from(index):
                return None
            return slot.arrived(index, gradient)

        return arrive

    def _end_of(self, total: RankSum, index: int) -> Callable[[Tensor], None]:
        """Say of the last leaf that a gradient of it is there.

        A layer that is used within a reentrant checkpoint from some step on has a further part of its gradient then.
        """

        def end(_: Tensor) -> None:
            if self.in_backward is not None and self.in_backward.learns_from(index) and not total.arrived(index):
                raise self.in_parts(index)

        return end

    def in_parts(self, index: int) -> PlanError:
        """Return the refusal of a gradient that arrives in parts."""
        return PlanError(
            f"The gradient of {self.layout.parameters[index].name} arrives in parts: backward runs within backward. "
            "With torch.utils.checkpoint, pass use_reentrant=False."
        )

    def frozen(self, indices: Iterable[int]) -> PlanError:
        """Return the refusal of a loss, or a forward pass, that leaves frozen what it's to teach."""
        parameters = [self.layout.parameters[index] for index in sorted(indices)]
        name = next(one.name for one in parameters if not one.tensor.requires_grad)
        return PlanError(
            f"{name} trained, and doesn't now: a loss has frozen it, or the forward pass, and what teaches it leaves "
            "it so. Thaw it there, or freeze with LayerFreezing."
        )

    def begin(self, slot: WholeSlot, indices: frozenset[int], *, is_final: bool) -> None:
        """Take note that a slot's backward pass begins, for which parameters, and whether it isn't run anew."""
        self.in_backward = slot
        is_sure = is_final and indices <= self.layout.looked
        if isinstance(self._sum, RankSum) and self._sum.is_at_last and is_sure and may_meet():
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
        self.layout.looked |= self.reached
        divisors = []
        if denominators is not None:
            divide(root, self.layout.members, denominators)
            divisors = denominators.tolist()
        # Ranks of one replica know of their own parts only.
        if isinstance(self._sum, RankSum) and self.layout.ranks.degree == 1:
            # Both the sum and its quotients have to be.
            by = 1.0, *(abs(value) for value in divisors if value)
            self.is_finite = all(self._sum.bound < _FAR_BELOW_INFINITY * value for value in by)
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
        nearer the input learns. A function that runs a pass within would be pruned with all that its pass reaches: then
        everything is computed, and what is denied isn't kept.

        Raises:
            PlanError: what may learn has been frozen since: autograd would leave it out without a word.
        """
        tensors, indices, attenuation = self._admission
        layout = self._step.layout
        if not all(map(_TRAINS, tensors)):
            raise self._step.frozen(indices)
        if not tensors or not objective.requires_grad:
            return
        self._step.lend()
        self._is_lent = True
        asks_for_all = len(tensors) == len(layout.tensors)
        layout.nests = layout.nests or (not indices <= layout.looked and runs_within(objective))
        # What is aside meanwhile can't be sent early.
        self._step.begin(self, indices, is_final=is_final and (asks_for_all or not layout.nests))
        try:
            with self._denied_aside() if layout.nests and not asks_for_all else nullcontext():
                run_backward(objective, () if asks_for_all or layout.nests else tensors)
        finally:
            self._step.in_backward = None
        self._step.reached |= indices
        for index in layout.narrow & indices:
            gradient = layout.tensors[index].grad
            if gradient is not None:
                layout.tensors[index].grad = None
                wide = gradient.float()
                self.arrived(index, wide.mul_(attenuation[index]) if index in attenuation else wide, is_whole=True)
                self._widened[index] = wide

    def learns_from(self, index: int) -> bool:
        """Say whether a parameter may learn from this microbatch."""
        return index in self._admission.indices

    @contextmanager
    def _denied_aside(self) -> Iterator[None]:
        """Keep what waits for the leaf of denied parameters from a pass that reaches these too."""
        tensors = self._step.layout.tensors
        denied = [tensors[index] for index in range(len(tensors)) if not self.learns_from(index)]
        kept = [tensor.grad for tensor in denied]
        clear(denied)
        try:
            yield
        finally:
            for tensor, gradient in zip(denied, kept, strict=True):
                tensor.grad = gradient

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
            raise self._step.in_parts(index)
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
