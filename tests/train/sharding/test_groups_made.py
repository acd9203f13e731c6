"""A model is cut block by block into groups that FSDP2 gathers and sums as the tree does, never as means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from cosmati.train.layout import shard_groups
from cosmati.train.layout.shard_cut import RowsCut
from cosmati.train.layout.shard_groups import GroupGather, ShardGroup, TreeReduceScatter, shard, split, sum_of_replicas
from cosmati.train.layout.tree import Tree
from cosmati.train.ranks import Ranks
from tests.train.test_rank_sum import Threads, threads

__all__ = ["threads"]

CPU = torch.device("cpu")


def in_world(rank: int, world: int) -> None:
    """Be one of some ranks of which the others aren't there: what is sent to them is lost."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


@pytest.fixture
def world() -> Iterator[Callable[[int, int], None]]:
    assert not dist.is_initialized()
    yield in_world
    if dist.is_initialized():
        dist.destroy_process_group()


World = Callable[[int, int], None]


# -------------------------------------------------------------------------------------------------------------- split


def test_ranks_that_all_hold_one_copy_have_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks.alone()
    ranks.world = 4
    monkeypatch.setattr(shard_groups, "init_device_mesh", None)
    own, replicas = split(ranks, 4, CPU)
    assert own is ranks
    assert (replicas.world, replicas.rank, replicas.is_parallel) == (1, 0, False)


@pytest.mark.parametrize("rank", range(6))
def test_consecutive_ranks_hold_a_copy_and_those_in_one_place_are_replicas(world: World, rank: int) -> None:
    world(rank, 6)
    own, replicas = split(Ranks(), 2, CPU)
    assert own.group is not None
    assert replicas.group is not None
    first = rank - rank % 2
    assert dist.get_process_group_ranks(own.group) == [first, first + 1]
    assert dist.get_process_group_ranks(replicas.group) == [rank % 2, rank % 2 + 2, rank % 2 + 4]
    assert (own.rank, own.world, replicas.rank, replicas.world) == (rank % 2, 2, rank // 2, 3)


# ----------------------------------------------------------------------------------------------------------- replicas


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9])
def test_what_replicas_have_is_summed_in_tree_order(
    threads: Threads, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = torch.Generator().manual_seed(size)
    parts = torch.randn(threads.world, size, generator=drawn) * 10.0 ** torch.arange(threads.world)[:, None]

    lengths: list[tuple[int, int]] = []
    real = shard_groups.tree_reduce_scatter

    def spy(output: Tensor, flat: Tensor, group: Any) -> None:
        lengths.append((output.numel(), flat.numel()))
        real(output, flat, group)

    monkeypatch.setattr(shard_groups, "tree_reduce_scatter", spy)

    def work(ranks: Ranks) -> Tensor:
        return sum_of_replicas(parts[ranks.rank].clone(), ranks)

    tree: Tree[Tensor] = Tree(lambda left, right: left + right)
    for part in parts:
        tree.push(part)
    expected = tree.root()
    for found in threads.run(work):
        assert found.shape == (size,)
        assert torch.equal(found, expected)
    share = -(-size // threads.world)
    assert lengths == [(share, share * threads.world)] * threads.world, "no more is sent than is needed"


def test_one_copy_sums_nothing() -> None:
    alone, part = Ranks.alone(), torch.ones(3)
    assert sum_of_replicas(part, alone) is part


# -------------------------------------------------------------------------------------------------------------- shard


class Body(nn.Module):
    """Two blocks, something around them that is frozen in part, and a scale of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(2, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False)) for _ in range(2)])
        self.last = nn.Linear(3, 5)
        self.first.weight.requires_grad_(False)
        self.blocks[1][0].bias.requires_grad_(False)


OUTSIDE = ["first.weight", "first.bias", "last.weight", "last.bias", "scale"]
"""What the model gathers itself, as FSDP2 orders it: a module's own parameters come after those of its children."""


def groups_of(model: nn.Module, rank: int, num: int) -> list[ShardGroup]:
    in_world(rank, num)
    return shard(model, Ranks(), CPU)


@pytest.mark.parametrize("rank", range(3))
def test_blocks_are_groups_and_what_is_outside_them_is_the_last_one(world: World, rank: int) -> None:
    model = Body()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    groups = groups_of(model, rank, 3)
    blocks = [[f"blocks.{index}.{name}" for name in ("0.weight", "0.bias", "1.weight")] for index in range(2)]
    assert [list(group.names) for group in groups[:2]] == blocks
    assert list(groups[2].names) == OUTSIDE
    assert [group.number for group in groups] == [0, 1, 2]
    assert [group.module for group in groups] == [*model.blocks, model]
    frozen = {"first.weight", "blocks.1.0.bias"}
    own = dict(model.named_parameters())
    for group in groups:
        assert isinstance(group.module, FSDPModule)
        assert list(group.trained) == [name for name in group.names if name not in frozen]
        assert group.rows == {name: RowsCut(shapes[name], 3) for name in group.names}
        order = [one._module_info.param_name for one in group.module._get_fsdp_state()._fsdp_param_group.fsdp_params]
        assert order == [name.rpartition(".")[2] for name in group.names], "what's gathered flat is in FSDP2's order"
        for name in group.names:
            piece: Any = own[name]
            assert torch.equal(piece.to_local(), values[name][group.rows[name].of(rank)])


def test_weights_are_given_back_after_a_forward_pass_of_the_outermost_too(world: World) -> None:
    for group in groups_of(Body(), 0, 2):
        module: Any = group.module
        assert module._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is not None


def test_a_model_whose_blocks_hold_everything_has_no_group_of_its_own(world: World) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    groups = groups_of(model, 1, 2)
    assert [group.names for group in groups] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    assert isinstance(model, FSDPModule)


def test_a_group_of_some_ranks_cuts_among_them(world: World) -> None:
    world(5, 6)
    own, _ = split(Ranks(), 2, CPU)
    model = nn.Linear(2, 4, bias=False)
    value = model.weight.detach().clone()
    (group,) = shard(model, own, CPU)
    assert group.rows == {"weight": RowsCut((4, 2), 2)}
    piece: Any = model.weight
    assert torch.equal(piece.to_local(), value[2:])


# --------------------------------------------------------------------------------------------------------------- tune


def test_a_group_gathers_and_sums_by_what_it_is_given(world: World) -> None:
    model = nn.Linear(2, 4, bias=False)
    (group,) = groups_of(model, 0, 2)
    make: Any = (GroupGather, TreeReduceScatter)
    gather, reduce = make[0](group, None, None), make[1](group, None, None)
    assert shard_groups.tune(group, gather, reduce) is None
    state: Any = group.module
    held = state._get_fsdp_state()._fsdp_param_group
    assert (held._all_gather_comm, held._reduce_scatter_comm) == (gather, reduce)
    assert held.gradient_divide_factor == 1.0
