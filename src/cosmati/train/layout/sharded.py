"""Every rank holds a part of every parameter, of its gradient and of its optimizer's state: FSDP2, block by block.

A block's weights are gathered as forward or backward comes to it, and its gradients summed as backward leaves it: each
slot's leaves over the ranks, in tree order, then slot by slot on the parts that ranks keep. So ranks run strided
microbatches: the tree's low levels lie across ranks. Where groups of ranks each hold a copy (replicas of shards), a
group runs consecutive ones, so what it sums is a subtree, and groups add theirs once a step. The bits are those of
`Whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmati.core.pieces import Pieces
from cosmati.core.state import distinct_tensors, load_model_tensors
from cosmati.errors import CheckpointError, PlanError
from cosmati.routing.cells import RegionWeights
from cosmati.routing.regions import Regions
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.lockstep import Lockstep
from cosmati.train.layout.rounded import gather_weights
from cosmati.train.layout.shard_cut import RowCut
from cosmati.train.layout.shard_groups import (
    GroupGather,
    ShardGroup,
    TreeReduceScatter,
    shard,
    split,
    tree_reduce_scatter,
    tune,
)
from cosmati.train.layout.shard_state import ShardState
from cosmati.train.layout.sharded_step import Arrivals, ShardedStep
from cosmati.train.layout.shares import Shares, root_over
from cosmati.train.layout.span import HeldSpan
from cosmati.train.ranks import Ranks


class Sharded:
    """The layout of a model that is cut over the ranks (see `Layout`). It wraps the model's blocks, and the model.

    Args:
        model: after surgery, on its device; the same on every rank.
        regions: of its trainable parameters.
        ranks: the data-parallel ranks, two at least.
        num_microbatches: V.
        num_shards: ranks that hold one copy together, a divisor of their number, two at least; None for all.
        rounds: passes read weights rounded to bfloat16, and they're sent so.

    Attributes:
        shards: those that hold a copy together with this rank.
        replicas: those that hold what this rank holds.
        lockstep: of those that hold a copy together.
    """

    is_cut = True

    def __init__(
        self,
        model: nn.Module,
        regions: Regions,
        ranks: Ranks,
        num_microbatches: int,
        num_shards: int | None = None,
        *,
        rounds: bool = False,
    ) -> None:
        self._may_round = rounds
        self.ranks, self._model, self._shares = ranks, model, Shares(ranks)
        num_shards = num_shards or ranks.world
        ranks.share_out(num_microbatches, is_strided=True, num_together=num_shards)
        self.mine = ranks.mine(num_microbatches)
        self.device = next(model.parameters()).device
        self.shards, self.replicas = split(ranks, num_shards, self.device)
        self.groups = shard(model, self.shards, self.device)
        named: dict[str, Any] = dict(model.named_parameters())
        self._owners = {name: _owner(model, name) for name in named}
        # The pieces' memory is FSDP2's own: what is written there is what it gathers.
        self._locals = {name: parameter.detach().to_local() for name, parameter in named.items()}
        self.cut = RowCut({name: rows for group in self.groups for name, rows in group.rows.items()}, self.shards)
        learning = [(name, parameter) for name, parameter in named.items() if parameter.requires_grad]
        self.parameters = tuple(
            Parameter(index, name, regions.region_of[name], parameter)
            for index, (name, parameter) in enumerate(learning)
        )
        self.members = [[p.index for p in self.parameters if p.region == r] for r in range(len(regions.names))]
        self._held = {p.name: nn.Parameter(self._locals[p.name]) for p in self.parameters}
        self._staged: dict[str, nn.Parameter] = {}
        self._state = ShardState(self.cut, self.shards, self._staged.keys())
        self._weights = Pieces(
            {p.name: self._locals[p.name] for p in self.parameters},
            {p.name: p.region for p in self.parameters},
            self.cut,
        )
        self.index_of = {p.name: p.index for p in self.parameters}
        self.group_of = {name: group.number for group in self.groups for name in group.names}
        self.lockstep = Lockstep(self.shards, self._accompany, self.device)
        self.arrivals = Arrivals(self)
        self._step: ShardedStep | None = None
        for group in self.groups:
            tune(
                group,
                GroupGather(group, self.lockstep, self._rounds),
                TreeReduceScatter(group, self.lockstep, self._take),
            )

    def pieces(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and what optimizers are built on: this rank's rows, or whole matrices (see `stage`)."""
        return [(p.name, self._held[p.name]) for p in self.parameters]

    def stage(self, names: Iterable[str]) -> None:
        """Have optimizers work on whole parameters, each on its owner's rank; others hold its shape, and no memory."""
        for name in names:
            shape = self.cut.rows[name].shape
            is_own = self.cut.owner_of[name] == self.shards.rank
            like = self._locals[name]
            # Ones, because some optimizers refuse what begins at 0. Each commit brings the values.
            data = like.new_ones(shape) if is_own else like.new_ones(()).expand(shape)
            self._held[name] = self._staged[name] = nn.Parameter(data)

    def weights(self) -> Pieces:
        """Return this rank's rows of the trainable parameters; they follow every commit."""
        return self._weights

    def model_parameter(self, name: str) -> nn.Parameter:
        """Return a parameter as the model has it now: gathered or not."""
        module, attribute = self._owners[name]
        return getattr(module, attribute)  # type: ignore[no-any-return]

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
    ) -> Iterator[ShardedStep]:
        """Open a pass over the step's microbatches.

        Raises:
            PlanError: somebody has put another parameter in the place of one: FSDP2 would put its own back.
        """
        for parameter in self.parameters:
            now, gathered = self.model_parameter(parameter.name), self.arrivals.gathered.get(parameter.name)
            if now is not parameter.tensor and now is not gathered:
                msg = (
                    f"The model isn't what was planned: {parameter.name} is another tensor. Change the model before "
                    "the Trainer is made, or go on in a new Trainer: RunConfig(load_weights=...)."
                )
                raise PlanError(msg)
        self._step = ShardedStep(self, routes, learns, measure=measure, sketch=sketch)
        try:
            yield self._step
        finally:
            self._step = None
            self.clear()

    def clear(self) -> None:
        """Leave no gradient behind: FSDP2 would add the next microbatch's to it, from left to right."""
        for parameter in self.parameters:
            parameter.tensor.grad = None

    def commit(self, root: Pieces, learns: Collection[int], step: Callable[[], None]) -> frozenset[str]:
        """Put gradients in place and let the optimizers step."""
        names = [self.parameters[index].name for index in sorted(learns)]
        moved = [name for name in names if name in root]
        whole = [name for name in moved if name in self._staged]
        if whole:
            for held, given in ((True, root.tensors), (False, self._locals)):
                for name, value in self.cut.collected({name: given[name] for name in whole}).items():
                    if held:
                        self._staged[name].grad = value
                    else:
                        self._staged[name].detach().copy_(value)
        for name in names:
            if name not in self._staged:
                self._held[name].grad = root.tensors.get(name)
        step()
        if whole:
            own = {name: self._staged[name].detach() for name in whole if self.cut.owner_of[name] == self.shards.rank}
            for name, rows in self.cut.handed_out(own, whole, self._locals[whole[0]]).items():
                self._locals[name].copy_(rows)
        return frozenset(moved)

    @contextmanager
    def perturbed(self, offsets: Pieces) -> Iterator[None]:
        """Add offsets to parameters for a while."""
        with self._kept(offsets.names):
            for name, offset in offsets.tensors.items():
                self._locals[name].add_(offset)
            yield

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Put other values in place of this rank's rows for a while."""
        with self._kept(values):
            for name, value in values.items():
                self._locals[name].copy_(value)
            yield

    @contextmanager
    def _kept(self, names: Collection[str]) -> Iterator[None]:
        kept = {name: self._locals[name].clone() for name in names}
        try:
            yield
        finally:
            for name, value in kept.items():
                self._locals[name].copy_(value)

    def save(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters and persistent buffers by name, gathered one by one. Every rank has to ask for all."""
        buffers = self._buffers()
        for name in self._model.state_dict():
            own = name.replace("_orig_mod.", "")
            if name in self._locals:
                yield own, self.cut.whole(name, self._locals[name])
            elif own in buffers:
                yield own, buffers[own]

    def held(self) -> dict[str, HeldSpan]:
        """Return this rank's rows of parameters, and on the first rank buffers."""
        buffers = self._buffers()
        found: dict[str, HeldSpan] = {}
        for name in self._model.state_dict():
            own = name.replace("_orig_mod.", "")
            if name in self._locals:
                rows = self.cut.rows[name]
                found[own] = HeldSpan(self._locals[name], rows.shape, rows.of(self.shards.rank).start * rows.row_size)
            elif own in buffers and self.ranks.rank == 0:
                found[own] = HeldSpan.of(buffers[own])
        return found

    def held_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, HeldSpan]:
        """Return what this rank holds of the state of optimizers or methods."""
        return self._state.held(tensors, of_optimizers=of_optimizers)

    def _buffers(self) -> dict[str, Tensor]:
        state = self._model.state_dict()
        return distinct_tensors({name: value for name, value in state.items() if not isinstance(value, DTensor)})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take whole parameters and buffers.

        Raises:
            CheckpointError: they don't fit the model.
        """
        names = {name.replace("_orig_mod.", ""): name for name in self._locals}
        wrong = [f"{own} is missing" for own in names.keys() - tensors.keys()]
        for own in names.keys() & tensors.keys():
            was = (tensors[own].dtype, tuple(tensors[own].shape))
            now = (self._locals[names[own]].dtype, self.cut.rows[names[own]].shape)
            if was != now:
                wrong.append(f"{own} is {now[0]} {now[1]}, and was {was[0]} {was[1]}")
        if wrong:
            raise CheckpointError(f"The checkpoint's weights don't fit the model: {'; '.join(sorted(wrong)[:5])}.")
        others = {name: value for name, value in tensors.items() if name not in names}
        load_model_tensors(self._model, others, resumes=True, own=self._buffers())
        for own, name in names.items():
            self._locals[name].copy_(self.cut.piece(name, tensors[own]))

    def whole_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return state of optimizers or methods whole, gathered tensor by tensor."""
        return self._state.gathered(tensors, of_optimizers=of_optimizers)

    def own_state(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return what this rank keeps of whole state."""
        return self._state.own(tensors, of_optimizers=of_optimizers)

    def digest(self) -> bytes:
        """Return the Merkle root over parameters and buffers: each rank hashes its share of the chunks."""
        roots = self._shares.roots({f"model/{name}": span for name, span in self.held().items()})
        return root_over(roots, roots)

    def _take(self, group: ShardGroup, part: Tensor) -> None:
        """Take this rank's part of a group's summed gradients."""
        if self._step is not None:
            self._step.take(group, part)

    def _rounds(self) -> bool:
        """Return whether weights are sent in bfloat16: for a step's passes, not for an evaluation."""
        return self._may_round and self._step is not None

    def nothing(self, group: ShardGroup) -> Tensor:
        """Return this rank's part of a group's gradients where there are none: adding it changes no sum."""
        # -0.0 is what leaves every float as it is when added.
        like: Tensor = next(iter(self._locals.values()))
        return like.new_full((group.num_summed,), -0.0)

    def _accompany(self, exchange: int) -> Callable[[], None]:
        """Take part in an exchange that this rank doesn't run itself; return what takes its outcome."""
        group = self.groups[exchange // 2]
        if exchange % 2:
            part = self.nothing(group)
            tree_reduce_scatter(part, part.repeat(self.shards.world), self.shards.group)
            return partial(self._take, group, part)
        own = group.gathered_from(self._locals)
        gathered = own.new_empty(self.shards.world * own.numel())
        gather_weights(gathered, own, self.shards.group, rounds=self._rounds())
        return lambda: None


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a parameter, and under which name: to look the path up takes longer than the rest."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
