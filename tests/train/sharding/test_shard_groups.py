"""What a group gives and takes in FSDP2's form: pieces laid out flat and padded, and parts summed in tree order."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cosmati.train.layout import shard_groups
from cosmati.train.layout.shard_cut import RowsCut
from cosmati.train.layout.shard_groups import (
    GroupGather,
    ShardGroup,
    TreeReduceScatter,
    sum_of_replicas,
    tree_reduce_scatter,
)
from cosmati.train.ranks import Ranks

WORLD = 3
SHAPES = {"weight": (4, 2), "bias": (5,), "scale": (1, 3)}
"""Of 4, 5 and 1 rows over three ranks: 2 + 2 + 0, 2 + 2 + 1, 1 + 0 + 0."""
PADDED = {"weight": 4, "bias": 2, "scale": 3}


def group(*trained: str, number: int = 0) -> ShardGroup:
    rows = {name: RowsCut(shape, WORLD) for name, shape in SHAPES.items()}
    return ShardGroup(number, nn.Identity(), tuple(SHAPES), trained, rows)


def whole() -> dict[str, Tensor]:
    return {name: torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_gives_its_rows_of_each_parameter_and_zeros_to_the_same_length(rank: int) -> None:
    made = group(*SHAPES)
    pieces = {name: tensor[made.rows[name].of(rank)] for name, tensor in whole().items()}
    expected: list[float] = []
    for name, tensor in whole().items():
        most = -(-tensor.shape[0] // WORLD)
        own = tensor[rank * most : (rank + 1) * most].flatten().tolist()
        expected += own + [0.0] * (PADDED[name] - len(own))
    assert made.gathered_from(pieces).tolist() == expected
    assert made.gathered_from({name: piece.double() for name, piece in pieces.items()}).dtype is torch.float64


def test_a_group_may_be_one_parameter() -> None:
    alone = ShardGroup(0, nn.Identity(), ("bias",), ("bias",), {"bias": RowsCut((5,), WORLD)})
    assert alone.gathered_from({"bias": torch.ones(1)}).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("trained", [("weight", "bias", "scale"), ("bias", "scale"), ("weight",), ()])
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_ranks_part_of_the_sum_holds_its_pieces_of_what_learns(trained: tuple[str, ...], rank: int) -> None:
    made = group(*trained)
    assert made.num_summed == sum(PADDED[name] for name in trained)
    own = {name: tensor[made.rows[name].of(rank)] for name, tensor in whole().items() if name in trained}
    flat = torch.cat(
        [
            torch.zeros(0),
            *(nn.functional.pad(p.flatten(), (0, PADDED[n] - p.numel()), value=-1) for n, p in own.items()),
        ]
    )
    found = made.gradients_in(flat, rank)
    assert list(found) == list(trained)
    for name, gradient in found.items():
        assert torch.equal(gradient, own[name])
        assert gradient.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("ours", "setter"), [(GroupGather, "set_custom_all_gather"), (TreeReduceScatter, "set_custom_reduce_scatter")]
)
def test_it_is_called_and_allocates_as_fsdp_has_it(ours: type, setter: str) -> None:
    theirs = get_type_hints(getattr(FSDPModule, setter))["comm"]
    for method in ("__call__", "allocate"):
        own, form = (inspect.signature(getattr(kind, method)).parameters.values() for kind in (ours, theirs))
        assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in form]


class Noted:
    """Takes note of exchanges as they begin."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin(self, exchange: int) -> None:
        self.begun.append(exchange)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_gather_is_the_even_exchange_of_its_group(monkeypatch: pytest.MonkeyPatch, rounds: bool) -> None:
    told: list[tuple[Any, ...]] = []

    def gather(output: Tensor, own: Tensor, group: Any, *, rounds: bool) -> None:
        told.append((output, own, group, rounds))

    monkeypatch.setattr(shard_groups, "gather_weights", gather)
    noted, output, own, place = Noted(), torch.zeros(6), torch.ones(2), object()
    make: Any = GroupGather
    gathers = make(group(number=3), noted, lambda: rounds)
    assert gathers(output, own, place) is None
    assert noted.begun == [6]
    assert len(told) == 1
    assert all(a is b for a, b in zip(told[0], (output, own, place, rounds), strict=True))
    memory = gathers.allocate((2, 3), dtype=torch.float64, device=torch.device("cpu"))
    assert (memory.shape, memory.dtype) == ((2, 3), torch.float64)


def exchanged(monkeypatch: pytest.MonkeyPatch, table: Tensor) -> list[Any]:
    """Have the ranks' parts be the rows of a table; return a list of the groups that were asked."""
    asked: list[Any] = []

    def all_to_all(output: Tensor, own: Tensor, *, group: Any) -> None:
        asked.append(group)
        output.copy_(table.reshape(-1))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    return asked


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Add neighbours, then neighbours of these; the odd one out waits."""
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_parts_are_added_in_tree_order(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    table = torch.rand(world, 5, generator=torch.Generator().manual_seed(world)) * 10.0 ** torch.arange(-2, 3)
    place = object()
    asked = exchanged(monkeypatch, table)
    output, flat = torch.full((5,), -1.0), torch.full((5 * world,), 7.0)
    tree_reduce_scatter(output, flat, place)  # type: ignore[arg-type]
    assert torch.equal(output, tree_sum(list(table)))
    assert flat.eq(7).all()
    assert asked == [place]


def test_a_sum_is_the_odd_exchange_of_its_group_and_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made, noted, place = group("weight", "scale", number=3), Noted(), object()
    taken: list[tuple[ShardGroup, Tensor]] = []
    make: Any = TreeReduceScatter
    reduces = make(made, noted, lambda own, part: taken.append((own, part.clone())))
    asked = exchanged(monkeypatch, torch.stack([torch.full((7,), float(i)) for i in range(4)]))
    output = torch.zeros(7)
    # As FSDP2 calls it: whether it may be asynchronous isn't said, and it isn't.
    assert reduces(output_tensor=output, input_tensor=torch.zeros(28), group=place, op=dist.ReduceOp.SUM) is None
    assert (noted.begun, asked) == ([7], [place])
    ((own, part),) = taken
    assert own is made
    assert part.tolist() == output.tolist() == [6.0] * 7
    with pytest.raises(AssertionError, match="what has no gradient is filled"):
        reduces(torch.zeros(6), torch.zeros(24), place, dist.ReduceOp.SUM)
    assert noted.begun == [7]


def test_one_copy_is_its_own_sum() -> None:
    part = torch.ones(3)
    assert sum_of_replicas(part, Ranks.alone()) is part
