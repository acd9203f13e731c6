"""Pieces, the buckets that they travel in, and which optimizers they can be given to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.pieces import Uncut
from cosmati.errors import PlanError
from cosmati.optim import SGD, SGDW, SOAP, AdamW, Lion, Muon, NorMuon, ScheduleFreeAdamW, Sophia
from cosmati.optim.optimizers import Optimizer
from cosmati.optim.piecewise import demands_of
from cosmati.optim.stepping import GroupedOptimizer
from cosmati.train.config import RunConfig
from cosmati.train.layout.blocks import blocks_in
from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.owned import OwnedCut
from cosmati.train.layout.piece import Bucket, Piece, by_owner, cut, evenly, in_buckets, laid_out, memory, strides_of
from cosmati.train.layout.shard_cut import RowCut, RowsCut
from cosmati.train.ranks import Ranks
from cosmati.train.trainer import Trainer
from tests.train.test_rank_sum import Threads, threads

__all__ = ["threads"]

SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


@pytest.mark.long
@given(sizes=SIZES, world=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_pieces_are_all_of_every_parameter(sizes: list[int], world: int, data: st.DataObject) -> None:
    divisible = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    unit = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), max_size=3)) - divisible)
    pieces = cut(sizes, divisible, [unit], world, 16)
    for index, size in enumerate(sizes):
        own = [piece for piece in pieces if piece.parameter == index]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])]
        assert own[-1].stop == size
        assert all(piece.start % 16 == 0 for piece in own)
        assert len({piece.owner for piece in own}) == len(own)
        assert len(own) == 1 or index in divisible
    assert len({piece.owner for piece in pieces if piece.parameter in unit}) <= 1
    loads = [sum(piece.stop - piece.start for piece in pieces if piece.owner == rank) for rank in range(world)]
    indivisible = [size for i, size in enumerate(sizes) if i not in divisible]
    largest = max([sum(sizes[i] for i in unit), *indivisible, sum(sizes) / world / 4, 16 * len(sizes)])
    assert max(loads) - min(loads) <= largest + 16 * world * len(sizes)


def test_only_what_is_large_beside_a_share_is_cut() -> None:
    sizes = [1000, 10, 300, 200, 490]
    assert cut(sizes, {0, 1, 2, 3, 4}, (), 2, 16) == (
        Piece(0, 0, 512, 0), Piece(0, 512, 1000, 1), Piece(1, 0, 10, 0), Piece(2, 0, 160, 0), Piece(2, 160, 300, 1),
        Piece(3, 0, 200, 1), Piece(4, 0, 256, 0), Piece(4, 256, 490, 1),
    )  # fmt: skip


@given(sizes=SIZES, world=st.sampled_from([2, 4]), limit=st.integers(1, 4000), is_even=st.booleans())
def test_buckets_have_a_place_for_every_element(sizes: list[int], world: int, limit: int, is_even: bool) -> None:
    pieces = cut(sizes, set(range(len(sizes))), (), world, 16)
    groups = in_buckets(sizes, limit)
    assert [index for group in groups for index in group] == list(reversed(range(len(sizes))))
    for group in groups:
        assert len(group) == 1 or sum(sizes[index] for index in group) <= limit
        bucket: Bucket = evenly(group, sizes, world, 16) if is_even else by_owner(group, pieces, world, 16)
        taken = sorted((part.place, part.place + part.stop - part.start) for part in bucket.parts)
        assert all(place % 16 == 0 for place, _ in taken)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))
        assert taken[-1][1] <= sum(bucket.lengths)
        assert sum(part.stop - part.start for part in bucket.parts) == sum(sizes[index] for index in group)
        if is_even:
            assert len({*bucket.lengths}) == 1
        else:
            own = [sum(part.stop - part.start for part in bucket.of(rank)) for rank in range(world)]
            assert own == [
                sum(p.stop - p.start for p in pieces if p.owner == rank and p.parameter in group)
                for rank in range(world)
            ]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(48.0).view(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).view(4, 6)[:, ::2],
    ],
)
def test_memory_goes_there_and_back(tensor: Tensor) -> None:
    assert torch.equal(laid_out(memory(tensor, tensor), tensor), tensor)
    assert torch.equal(laid_out(memory(tensor.contiguous(), tensor), tensor), tensor)
    is_dense = tensor.stride() == strides_of(tensor)
    assert (memory(tensor, tensor).data_ptr() == tensor.data_ptr()) == is_dense


def _tensors() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 10), (7,), (3, 2, 5, 5), ())
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(one) for one in made]


def test_norms_wholes_and_state_are_those_of_whole_tensors(threads: Threads) -> None:
    def work(ranks: Ranks) -> None:
        tensors = _tensors()
        pieces = cut([t.numel() for t in tensors], {0, 1}, (), ranks.world, 16)
        assert len([piece for piece in pieces if piece.parameter == 0]) > 1
        owned = OwnedCut(ranks, [Parameter(i, f"p{i}", 0, t) for i, t in enumerate(tensors)], pieces)
        whole = {f"p{i}": t.detach() * 3 for i, t in enumerate(_tensors())}
        own = {name: owned.piece(name, tensor).clone() for name, tensor in whole.items()}
        assert sum(tensor.numel() for tensor in own.values()) < sum(tensor.numel() for tensor in whole.values())
        for found, expected in zip(owned.norms(own), Uncut().norms(whole), strict=True):
            assert torch.equal(found, expected)
        for name, tensor in owned.wholes(own).items():
            assert torch.equal(tensor, whole[name])
            assert tensor.stride() == whole[name].stride()
        with torch.no_grad():
            for parameter in tensors:
                parameter.add_(1.0)
            for i, tensor in enumerate(tensors):  # what isn't this rank's is wrong before it comes
                kept = tensor.clone()
                tensor.fill_(torch.nan)
                piece = owned.own(f"p{i}")
                if piece is not None:
                    memory(tensor, tensor)[piece.start : piece.stop] = memory(kept, kept)[piece.start : piece.stop]
        owned.spread(list(whole))
        for found, expected in zip(tensors, _tensors(), strict=True):
            assert torch.equal(found, expected + 1.0)
        assert owned.anywhere(ranks.rank == 1)
        assert not owned.anywhere(flag=False)

    threads.run(work)


def test_nothing_has_no_norms() -> None:
    assert RowCut({}, Ranks()).norms({}) == []
    assert OwnedCut(Ranks(), [], []).norms({}) == []


@pytest.mark.parametrize("shapes", [[(3, 4)], [(0, 3), (3, 4)], [(0, 3)]])
def test_a_rank_that_holds_nothing_is_given_all(threads: Threads, shapes: list[tuple[int, int]]) -> None:
    def work(ranks: Ranks) -> None:
        tensors = [nn.Parameter(torch.full(shape, float(ranks.rank))) for shape in shapes]
        pieces = cut([t.numel() for t in tensors], (), (), ranks.world, 16)
        owned = OwnedCut(ranks, [Parameter(i, f"p{i}", 0, t) for i, t in enumerate(tensors)], pieces)
        owned.spread([f"p{i}" for i in range(len(tensors))])
        for piece in pieces:
            assert (tensors[piece.parameter] == piece.owner).all()

    threads.run(work)


@pytest.mark.parametrize(
    ("configuration", "num_divisible", "num_together"),
    [
        (SGD(lr=0.1), 2, 0),
        (AdamW(lr=0.1, fused=True), 2, 0),
        (AdamW(lr=0.1, cautious=True), 2, 0),
        (AdamW(lr=0.1, hyperball=True, weight_decay=0.0), 0, 0),
        (Lion(lr=0.1), 2, 0),
        (SGDW(lr=0.1), 2, 0),
        (ScheduleFreeAdamW(lr=0.1), 2, 0),
        (Sophia(lr=0.1, num_labels=4), 2, 0),
        (SOAP(lr=0.1), 0, 0),
        (Muon(lr=0.1), 0, 2),
        (Muon(lr=0.1, bfloat16=True), 0, 1),
        (NorMuon(lr=0.1), 0, 2),
    ],
)
def test_what_optimizers_need_of_a_cut(configuration: Optimizer, num_divisible: int, num_together: int) -> None:
    named = [(name, nn.Parameter(torch.ones(3, 4))) for name in "ab"]
    divisible, together = demands_of(configuration.build(named))
    assert (len(divisible), len(together)) == (num_divisible, num_together)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_an_optimizer_of_pytorchs_that_steps_each_parameter_by_itself_is_cut_nowhere(kind: Any) -> None:
    assert demands_of(kind([nn.Parameter(torch.ones(3, 4))])) == ([], [])


class Coupled(GroupedOptimizer):
    """One that doesn't say what it couples."""

    def step_group(self, group: dict[str, Any], present: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        raise AssertionError


class Apart(Coupled):
    """One that says that it leaves parameters apart."""

    couples = frozenset[str]()


def test_optimizers_that_cannot_be_shared_out_are_refused_on_one_rank_too() -> None:
    model = nn.Linear(3, 2)
    assert demands_of(Apart(model.parameters(), {})) == ([], [])
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    stepped.step()
    for optimizer, why in (
        (stepped, r"AdamW has state already, of whole parameters.*Give a configuration of cosmati\.optim"),
        (torch.optim.ASGD(model.parameters()), r"nobody says whether ASGD steps each by itself\. Give a config"),
        (
            Coupled(model.parameters(), {"lr": 0.1}),
            r"whether Coupled steps each.*GroupedOptimizer with couples = frozenset",
        ),
    ):
        with pytest.raises(PlanError, match=why):
            Trainer(
                model, lambda m, x: m(x).sum(), optimizers=[optimizer], config=RunConfig(sharding="optimizer")
            )  # fmt: skip


@pytest.mark.long
@given(st.integers(1, 20), st.integers(1, 3), st.integers(1, 9))
def test_rows_are_cut_as_torch_chunks_them(rows: int, width: int, world: int) -> None:
    """FSDP2 cuts so; where there are fewer rows than ranks, the last ones have none."""
    whole = torch.arange(rows * width).view(rows, width)
    cut_by_rows = RowsCut((rows, width), world)
    chunks = [*whole.chunk(world), *[whole[:0]] * world][:world]
    for rank, chunk in enumerate(chunks):
        assert torch.equal(whole[cut_by_rows.of(rank)], chunk)
        assert cut_by_rows.piece_shape(rank) == tuple(chunk.shape)
        assert cut_by_rows.num_elements(rank) == chunk.numel() <= cut_by_rows.padded


def test_blocks_are_those_of_the_innermost_lists() -> None:
    one, two, three, tied = (nn.Linear(2, 2) for _ in range(4))
    parts = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model = nn.ModuleDict(
        {
            "stages": nn.ModuleList([nn.ModuleList([one, two]), nn.ModuleList([three, tied, nn.ReLU(), parts])]),
            "head": nn.Linear(2, 2),
        }
    )
    model["head"].weight = tied.weight
    assert blocks_in(model) == [one, two, three]
    outer = nn.Sequential(one, nn.ReLU(), nn.Sequential(two))
    assert blocks_in(outer) == [one, outer[2]]


class Both(nn.Module):
    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other


@pytest.mark.timeout(30)
def test_a_module_in_very_many_places_is_looked_at_once() -> None:
    """Each of 60 levels holds the two of the next one twice: there are 2^60 ways to the last."""
    one, other, block = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    for _ in range(60):
        one, other = Both(one, other), Both(one, other)  # type: ignore[assignment]
    assert blocks_in(nn.ModuleDict({"deep": Both(one, other), "blocks": nn.ModuleList([block])})) == [block]


def test_a_layer_of_several_blocks_is_in_none_of_them() -> None:
    core, one, two, again = (nn.Linear(2, 2) for _ in range(4))
    blocks = [nn.Sequential(core, nn.ReLU()), nn.Sequential(core, one), nn.Sequential(two, nn.ReLU(), two)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "first": blocks[2]})
    assert blocks_in(model) == [blocks[2]], "a block may have several names"
    model["blocks"].append(nn.Sequential(again))
    model["head"] = again
    assert blocks_in(model) == [blocks[2]], "it's the head too"
    assert blocks_in(nn.ModuleDict({"blocks": nn.ModuleList([one, two, two])})) == [one], "it runs twice"
    assert blocks_in(nn.ModuleList([one, blocks[1]])) == [], "it runs by itself, and within the other one"
