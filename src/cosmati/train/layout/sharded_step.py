"""One pass over a step's microbatches where each rank holds a part of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmati.core.batch import iterate_tensors
from cosmati.core.pieces import Pieces
from cosmati.core.state import tensor_root
from cosmati.errors import PlanError
from cosmati.routing.cells import RegionWeights
from cosmati.train.direction_sketch import WIDTH, DirectionSketch
from cosmati.train.layout.nested import runs_within
from cosmati.train.layout.regrouped import is_node_of_fsdp, regrouped
from cosmati.train.layout.shard_groups import ShardGroup, sum_of_replicas
from cosmati.train.layout.tree import Tree, leaf_norm

if TYPE_CHECKING:
    from cosmati.train.layout.sharded import Sharded

GroupParts = dict[int, Tensor]
"""This rank's parts of the groups' gradients, by the group's number."""


def add_nodes(left: GroupParts, right: GroupParts) -> GroupParts:
    """Add two nodes, in place of the left one; what is absent in one is taken from the other."""
    both = sorted(left.keys() & right.keys())
    if both:
        torch._foreach_add_([left[key] for key in both], [right[key] for key in both])
    return {**right, **left}


class Arrivals:
    """Hooks on what FSDP2 gathers: they see gathered parameters, and their gradients before these are summed.

    Args:
        layout: whose groups.
    """

    def __init__(self, layout: Sharded) -> None:
        self.slot: ShardedSlot | None = None
        self.gathered: dict[str, nn.Parameter] = {}
        self._layout = layout
        self._versions: dict[str, int] = {}
        self._at_first: dict[str, bytes] = {}
        self._inputs: list[tuple[int, Tensor]] = []
        self._has_looked = False
        for group in layout.groups:
            # FSDP2's own hooks, which gather and let go, come before the one and after the other.
            group.module.register_forward_pre_hook(partial(self._before, group), with_kwargs=True)
            group.module.register_forward_hook(partial(self._after, group), prepend=True)

    def _before(self, group: ShardGroup, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Take note of a group's parameters as they are gathered, and of where its backward ends.

        Raises:
            PlanError: the forward pass has frozen one.
        """
        if self.slot is None:
            return
        for name in group.names:
            parameter = self._layout.model_parameter(name)
            if name not in self._versions:
                self._at_first[name] = _content(parameter)
            self._versions[name] = parameter._version  # noqa: SLF001
        if not torch.is_grad_enabled():
            return
        self.slot.run.add(group.number)
        for name in group.trained:
            parameter = self._layout.model_parameter(name)
            if not parameter.requires_grad:
                raise _frozen(name)
            if self.gathered.get(name) is not parameter:
                assert not isinstance(parameter, DTensor), "gathered"
                self.gathered[name] = parameter
                parameter.register_hook(partial(self._arrived, self._layout.index_of[name]))
        for tensor in iterate_tensors((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._leaves, group))
                if not self._has_looked and is_node_of_fsdp(tensor):
                    self._inputs.append((group.number, tensor))

    def _after(self, group: ShardGroup, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401
        """Refuse what writes to gathered weights, which would be lost. Writes past autograd are seen at first only.

        Raises:
            PlanError: a forward pass has changed a parameter.
        """
        if self.slot is None:
            return
        for name in group.names:
            parameter, at_first = self._layout.model_parameter(name), self._at_first.pop(name, None)
            is_changed = parameter._version != self._versions.get(name)  # noqa: SLF001
            if is_changed or (at_first is not None and _content(parameter) != at_first):
                msg = (
                    f"The forward pass changes {name}, and sharding='full' gathers it for the pass alone: what is "
                    "written there is lost. Change it by the optimizer or a method, or use another sharding."
                )
                raise PlanError(msg)

    def look(self, objective: Tensor) -> None:
        """Refuse, in a run's first microbatch, what FSDP2 would sum in another order.

        Raises:
            PlanError: a block reads an input several times, and others read it too; or a function runs a backward
                pass within its own.
        """
        if self._has_looked:
            return
        if runs_within(objective):
            msg = (
                "A function of the model runs a backward pass within its own (a reentrant checkpoint, a reversible "
                "layer), and sharding='full' doesn't see what it reaches. With torch.utils.checkpoint, pass "
                "use_reentrant=False (transformers: gradient_checkpointing_kwargs={'use_reentrant': False}); or use "
                "another sharding."
            )
            raise PlanError(msg)
        found = sorted(regrouped(objective, self._inputs))
        self._has_looked, self._inputs = True, []
        if found:
            msg = (
                f"The block of {self._layout.groups[found[0]].names[0]} reads an input several times, and others read "
                "it too: under sharding='full' its gradients are added in another order, to other bits. Let the block "
                "read it once (x = x.view_as(x) first), or use another sharding."
            )
            raise PlanError(msg)

    def _arrived(self, index: int, gradient: Tensor | None) -> Tensor | None:
        return None if self.slot is None or gradient is None else self.slot.arrived(index, gradient)

    def _leaves(self, group: ShardGroup, _gradient: Tensor) -> None:
        """End a group's backward.

        Raises:
            PlanError: it's none of the trainer's: FSDP2 lets weights go in it that the trainer's own still needs.
        """
        if self.slot is None:
            return
        if not self.slot.in_backward:
            msg = (
                "The loss differentiates through the model by itself (torch.autograd.grad, for a gradient penalty or "
                "forces), and under sharding='full' weights are let go as that ends. Use another sharding."
            )
            raise PlanError(msg)
        self.slot.fill(group)


def _frozen(name: str) -> PlanError:
    return PlanError(
        f"{name} trained, and the forward pass has frozen it. Freeze it before the Trainer is made, or with "
        "LayerFreezing."
    )


def _content(parameter: nn.Parameter) -> bytes:
    """Return the digest of a gathered parameter: of a copy, since what NumPy looks at can't be let go."""
    return tensor_root("", parameter.detach().clone())


class ShardedStep:
    """One pass over a step's microbatches."""

    def __init__(
        self,
        layout: Sharded,
        routes: Sequence[RegionWeights],
        learns: frozenset[int],
        *,
        measure: bool,
        sketch: DirectionSketch | None = None,
    ) -> None:
        self.layout = layout
        self.measures, self.sketch = measure, sketch
        first = layout.ranks.rank - layout.shards.rank
        self._slots = [slot[first : first + layout.shards.world] for slot in layout.ranks.slots(len(routes))]
        self._tree: Tree[GroupParts] = Tree(add_nodes)
        self._node: GroupParts = {}
        self.present = torch.zeros(len(layout.parameters), dtype=torch.uint8, device=layout.device)
        self._factors = [
            {p.index: weights[p.region] for p in layout.parameters if p.index in learns and weights[p.region] != 0}
            for weights in routes
        ]

    def slot(self, microbatch: int) -> ShardedSlot:
        """Return the slot of this rank's next microbatch."""
        together = next(slot for slot in self._slots if microbatch in slot)
        union = frozenset[int]().union(*(self._factors[m].keys() for m in together))
        return ShardedSlot(self, self._factors[microbatch], union)

    def take(self, group: ShardGroup, part: Tensor) -> None:
        """Take this rank's part of a group's gradients, summed over the slot's ranks.

        Raises:
            PlanError: it has come before: they come in parts.
        """
        if group.number in self._node:
            msg = (
                f"The gradients of {group.names[0]} and its block arrive in parts: backward runs within backward, or "
                "several times. With torch.utils.checkpoint, pass use_reentrant=False; with sharding='full', let a "
                "loss call no backward of its own."
            )
            raise PlanError(msg)
        self._node[group.number] = part

    def fold(self) -> None:
        """Hand the slot's leaves on."""
        self._tree.push(self._node)
        self._node = {}
        self.layout.clear()

    @property
    def is_finite(self) -> bool:
        """Nobody has looked."""
        return False

    def root(self, denominators: Tensor | None) -> Pieces:
        """Return this rank's rows of the sum of all V leaves over each region's denominator."""
        layout = self.layout
        root, found = self._tree.root(), dict[str, Tensor]()
        dist.all_reduce(self.present, op=dist.ReduceOp.MAX)
        seen = self.present.tolist()
        for group in layout.groups:
            if any(seen[layout.index_of[name]] for name in group.trained):
                part = root.get(group.number)
                summed = sum_of_replicas(layout.nothing(group) if part is None else part, layout.replicas)
                found |= group.gradients_in(summed, layout.shards.rank)
        taught = {p.name: found[p.name] for p in layout.parameters if seen[p.index]}
        if denominators is not None:
            taught = self._divided(taught, denominators)
        return layout.weights().having(taught)

    def _divided(self, root: Mapping[str, Tensor], denominators: Tensor) -> dict[str, Tensor]:
        """Divide in place. A region whose teachers have no weight (no labels, say) has no gradient: it rests."""
        left = dict(root)
        for region, (exact, rounded) in enumerate(zip(denominators, denominators.float(), strict=True)):
            names = [p.name for p in self.layout.parameters if p.region == region and p.name in root]
            if rounded == 0.0:
                left = {name: gradient for name, gradient in left.items() if name not in names}
                continue
            own = [left[name] for name in names]
            divisor = exact if own and own[0].dtype is torch.float64 else rounded
            if own and (divisor is exact or rounded != 1.0):
                torch._foreach_div_(own, divisor)
        return left


class ShardedSlot:
    """One microbatch of this rank (see `Slot`).

    All ranks of a slot differentiate for the union of what its microbatches may teach, so that all sum the same blocks
    in the same order. What this rank's microbatch may not teach becomes -0.0, which changes no sum.

    Args:
        step: the pass.
        factors: what this microbatch may teach, by index, and how much.
        union: indices of what any of the slot's microbatches may teach.
    """

    def __init__(self, step: ShardedStep, factors: Mapping[int, float], union: frozenset[int]) -> None:
        self.norms: list[Tensor] = []
        self.sketches: list[Tensor] = []
        self.run: set[int] = set()
        self.in_backward = False
        self._step, self._layout = step, step.layout
        self._factors, self._union = factors, union
        self._seen: dict[int, Tensor | None] = {}
        self._sketched: dict[int, Tensor] = {}
        self._arrived: set[int] = set()
        self._filled: set[int] = set()
        self._company: AbstractContextManager[None] | None = None

    def __enter__(self) -> Self:
        self._company = self._layout.lockstep.together(self._union)
        self._company.__enter__()
        self._layout.arrivals.slot = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Keep other ranks company until all have run their microbatch, and hand the leaf on."""
        assert self._company is not None, "entered"
        self._layout.arrivals.slot = None
        self._company.__exit__(kind, error, traceback)
        if kind is None:
            self._step.fold()
            if self._step.measures:
                self.norms = self._regional_norms()
            if self._step.sketch is not None:
                self.sketches = self._regional_sketches()

    def backward(self, objective: Tensor, *, is_final: bool = True) -> None:
        """Differentiate the objective for what any microbatch of the slot may teach.

        Raises:
            PlanError: a block or the loss has frozen some of it in mid-pass.
        """
        gathered = self._layout.arrivals.gathered
        parameters, groups = self._layout.parameters, [g for g in self._layout.groups if g.number in self.run]
        names = {name for group in groups for name in group.trained}
        asked = [name for i in sorted(self._union) if (name := parameters[i].name) in names]
        tensors = [gathered[name] for name in asked]
        for name, tensor in zip(asked, tensors, strict=True):
            if not tensor.requires_grad:
                raise _frozen(name)
        if not tensors or not objective.requires_grad:
            return
        self._layout.arrivals.look(objective)
        # FSDP2 sums what is left over when backward ends: what has no gradient is filled before, so this is asked
        # for first. Of an alias, because the model may have returned the objective itself, with FSDP2's hook on it.
        begun = objective.view_as(objective)
        begun.register_hook(lambda _: _when_backward_ends(partial(self._fill_all, groups)))
        self.in_backward = True
        try:
            torch.autograd.backward(begun, inputs=tensors)
        finally:
            self.in_backward = False

    def _fill_all(self, groups: Sequence[ShardGroup]) -> None:
        for group in groups:
            self.fill(group)

    def fill(self, group: ShardGroup) -> None:
        """Give -0.0 to what has no gradient in this microbatch, before the group's are summed: all ranks send alike."""
        indices = [self._layout.index_of[name] for name in group.trained]
        if group.number in self._filled or not self._union.intersection(indices):
            return
        self._filled.add(group.number)
        for name in group.trained:
            gathered = self._layout.arrivals.gathered[name]
            if gathered.grad is None:
                gathered.grad = torch.full(gathered.shape, -0.0, dtype=gathered.dtype, device=gathered.device)

    def arrived(self, index: int, gradient: Tensor) -> Tensor | None:
        """Take note of a gradient; return what is summed, None where it stays as it is.

        Raises:
            PlanError: it is sparse, or comes in parts, or late.
        """
        name = self._layout.parameters[index].name
        if gradient.layout is not torch.strided:
            msg = f"The gradient of {name} is sparse, and several microbatches are summed dense. Use sparse=False."
            raise PlanError(msg)
        if index in self._arrived or self._layout.group_of[name] in self._filled:
            msg = (
                f"The gradient of {name} arrives in parts, or after those of its block: the block runs several times "
                "in a microbatch, or outside of its forward, or backward runs within backward. Run it once, and "
                "torch.utils.checkpoint with use_reentrant=False; or use another sharding."
            )
            raise PlanError(msg)
        self._arrived.add(index)
        rho = self._factors.get(index, 0.0)
        if rho == 0:
            return torch.full_like(gradient, -0.0)
        kept = gradient * rho if rho != 1 else gradient
        self._step.present[index] = 1
        self._seen[index] = leaf_norm(kept) if self._step.measures else None
        if self._step.sketch is not None:
            self._sketched[index] = self._step.sketch.of(name, kept)
        return kept if rho != 1 else None

    def _regional_norms(self) -> list[Tensor]:
        """Return the leaf's norm in each region, of whole parameters in the model's order."""
        nothing = torch.tensor(torch.nan, dtype=torch.float64, device=self._layout.device)
        found = [[n for i in members if (n := self._seen.get(i)) is not None] for members in self._layout.members]
        return [torch.linalg.vector_norm(torch.stack(norms)).double() if norms else nothing for norms in found]

    def _regional_sketches(self) -> list[Tensor]:
        """Return the leaf's sketch in each region: the sum of its parameters', in the model's order."""
        nothing = torch.full((WIDTH,), torch.nan, device=self._layout.device)
        found = [[self._sketched[i] for i in members if i in self._sketched] for members in self._layout.members]
        return [reduce(torch.add, sketches) if sketches else nothing for sketches in found]


def _when_backward_ends(do: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(do)  # noqa: SLF001
