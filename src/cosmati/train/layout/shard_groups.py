"""Groups of parameters that FSDP2 gathers, and whose gradients it sums, together: blocks, and what is outside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from cosmati.train.layout.blocks import blocks_in
from cosmati.train.layout.lockstep import Lockstep
from cosmati.train.layout.rounded import gather_weights
from cosmati.train.layout.shard_cut import RowsCut
from cosmati.train.layout.tree import Tree
from cosmati.train.ranks import Ranks, all_gather


@dataclass(frozen=True)
class ShardGroup:
    """Parameters that are gathered together.

    Attributes:
        number: among the groups.
        module: that FSDP2 has wrapped.
        names: of all its parameters, in FSDP2's order.
        trained: of those that learn.
        rows: how each is cut.
    """

    number: int
    module: nn.Module
    names: tuple[str, ...]
    trained: tuple[str, ...]
    rows: Mapping[str, RowsCut]

    def gathered_from(self, pieces: Mapping[str, Tensor]) -> Tensor:
        """Return what this rank gives when the group is gathered, flat."""
        first = pieces[self.names[0]]
        flat = first.new_zeros(sum(self.rows[name].padded for name in self.names))
        start = 0
        for name in self.names:
            own = pieces[name].reshape(-1)
            flat[start : start + own.numel()].copy_(own)
            start += self.rows[name].padded
        return flat

    @property
    def num_summed(self) -> int:
        """Elements of this rank's part of the gradients' sum."""
        return sum(self.rows[name].padded for name in self.trained)

    def gradients_in(self, flat: Tensor, rank: int) -> dict[str, Tensor]:
        """Return this rank's pieces of the gradients, views of the part that was summed."""
        found, start = {}, 0
        for name in self.trained:
            cut = self.rows[name]
            found[name] = flat[start : start + cut.num_elements(rank)].view(cut.piece_shape(rank))
            start += cut.padded
        return found


def split(ranks: Ranks, num_shards: int, device: torch.device) -> tuple[Ranks, Ranks]:
    """Return this rank's place among those that hold one copy together, and among those that hold what it holds.

    Args:
        ranks: all of them.
        num_shards: consecutive ranks that hold a copy, which divides their number.
        device: of the model.
    """
    if num_shards == ranks.world:
        return ranks, Ranks.alone()
    mesh = init_device_mesh(device.type, (ranks.world // num_shards, num_shards), mesh_dim_names=("replica", "shard"))
    return Ranks.in_group(mesh.get_group("shard")), Ranks.in_group(mesh.get_group("replica"))


def shard(model: nn.Module, ranks: Ranks, device: torch.device) -> list[ShardGroup]:
    """Cut a model over the ranks that hold a copy together, block by block, and return the groups."""
    named = dict(model.named_parameters())
    blocks = blocks_in(model)
    rows = {name: RowsCut(tuple(p.shape), ranks.world) for name, p in named.items()}
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    group = ranks.group or dist.group.WORLD
    assert group is not None, "several ranks are a group"
    mesh = DeviceMesh.from_group(group, device.type)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    # The outermost too: what stays gathered after an evaluation would be trained on as it was then.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[ShardGroup] = []
    for module in (*blocks, model):
        if names := _names_in_order(module, name_of):
            learning = tuple(name for name in names if name in trained)
            groups.append(ShardGroup(len(groups), module, names, learning, {n: rows[n] for n in names}))
    return groups


def _names_in_order(module: nn.Module, name_of: Mapping[int, str]) -> tuple[str, ...]:
    """Return names of what FSDP2 gathers with a module, in its order: children's parameters before a module's own."""
    assert isinstance(module, FSDPModule), "wrapped"
    group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001
    return tuple(name_of[id(one.sharded_param)] for one in group.fsdp_params) if group is not None else ()


class _Allocated:
    """Takes memory as FSDP2 does by itself."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class GroupGather(_Allocated):
    """Gathers a group's parameters, in lockstep. The form is FSDP2's.

    Args:
        group: of parameters.
        lockstep: of all ranks.
        rounds: whether weights are sent in bfloat16 now.
    """

    def __init__(self, group: ShardGroup, lockstep: Lockstep, rounds: Callable[[], bool]) -> None:
        self._number = 2 * group.number
        self._lockstep = lockstep
        self._rounds = rounds

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather equal parts of all ranks."""
        self._lockstep.begin(self._number)
        gather_weights(output_tensor, input_tensor, group, rounds=self._rounds())


class TreeReduceScatter(_Allocated):
    """Sums a group's gradients over the ranks in tree order, each rank a part, in lockstep. The form is FSDP2's.

    Args:
        group: of parameters.
        lockstep: of all ranks.
        take: takes this rank's part of the sum.
    """

    def __init__(self, group: ShardGroup, lockstep: Lockstep, take: Callable[[ShardGroup, Tensor], None]) -> None:
        self._group = group
        self._lockstep = lockstep
        self._take = take

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum equal parts of all ranks, and keep this rank's."""
        assert output_tensor.numel() == self._group.num_summed, "what has no gradient is filled"
        self._lockstep.begin(2 * self._group.number + 1)
        tree_reduce_scatter(output_tensor, input_tensor, group)
        self._take(self._group, output_tensor)


def tree_reduce_scatter(output: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum each rank's part of a flat tensor over the ranks: data moves by all-to-all, additions are in tree order."""
    parts = torch.empty_like(flat)
    dist.all_to_all_single(parts, flat, group=group)
    across: Tree[Tensor] = Tree(lambda left, right: left.add_(right))
    for part in parts.view(-1, output.numel()):
        across.push(part)
    output.copy_(across.root())


def sum_of_replicas(part: Tensor, replicas: Ranks) -> Tensor:
    """Return the sum of what replicas have of one part of the gradients: each has summed a subtree of the step.

    It's sent as a ring sends it: each adds a piece of all parts, in tree order, and the pieces are gathered.

    Args:
        part: this rank's.
        replicas: ranks that hold the same part.
    """
    if replicas.world == 1:
        return part
    piece = part.new_empty(-(-part.numel() // replicas.world))
    flat = part.new_zeros(replicas.world * piece.numel())
    flat[: part.numel()].copy_(part)
    tree_reduce_scatter(piece, flat, replicas.group)
    all_gather(flat, piece, group=replicas.group)
    return flat[: part.numel()]


def tune(group: ShardGroup, gather: GroupGather, reduce: TreeReduceScatter) -> None:
    """Have FSDP2 gather and sum a group so: sums as they are, never means, and without the collectives' own order."""
    module = group.module
    assert isinstance(module, FSDPModule), "wrapped"
    module.set_gradient_divide_factor(1.0)
    module.set_custom_all_gather(gather)  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
