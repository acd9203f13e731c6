"""Of parameters in pieces with an owner each, every rank can have the whole, its norm and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.train.layout import owned as module
from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.owned import OwnedCut
from cosmati.train.layout.piece import Piece
from cosmati.train.layout.span import HeldSpan
from cosmati.train.ranks import Ranks
from tests.train.thread_group import on_threads

SHAPES = {"cut": (4, 3), "vector": (5,), "last": (2, 3, 2, 2), "scalar": (), "gaps": (2, 3), "none": (0,), "idle": (2,)}
# Nobody has a piece of the idle one; of three ranks the last has nothing.
PIECES = (
    Piece(0, 0, 8, 0), Piece(0, 8, 12, 1), Piece(1, 0, 5, 1), Piece(2, 0, 16, 1), Piece(2, 16, 24, 0),
    Piece(3, 0, 1, 0), Piece(4, 0, 6, 1), Piece(5, 0, 0, 1),
)  # fmt: skip
RUNS = {("cut", 0): (0, 8), ("cut", 1): (8, 12), ("last", 1): (0, 16), ("last", 0): (16, 24)}
WHOLE = {"vector": 1, "scalar": 0, "gaps": 1, "none": 1}
WORLDS = pytest.mark.parametrize("world", [2, 3])


def tensors(seed: int = 0, kind: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator).to(kind) for name, shape in SHAPES.items()}
    made["last"] = made["last"].contiguous(memory_format=torch.channels_last)
    made["gaps"] = torch.randn(2, 6, generator=generator).to(kind)[:, ::2]
    return made


def owned_cut(ranks: Ranks, parameters: Mapping[str, Tensor] | None = None) -> OwnedCut:
    given = (parameters or tensors()).items()
    return OwnedCut(ranks, [Parameter(i, n, 0, nn.Parameter(one)) for i, (n, one) in enumerate(given)], PIECES)


def in_memory(name: str, whole: Tensor) -> Tensor:
    """Elements as they lie in the parameter's memory."""
    return (whole.permute(0, 2, 3, 1) if name == "last" else whole).reshape(-1)


def part(name: str, whole: Tensor, rank: int) -> Tensor:
    """What a rank holds, by hand."""
    if WHOLE.get(name) == rank:
        return whole
    start, stop = RUNS.get((name, rank), (0, 0))
    return in_memory(name, whole)[start:stop]


def parts(whole: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {name: part(name, one, rank).clone() for name, one in whole.items()}


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def placed(rank: int) -> Ranks:
    ranks = Ranks.alone()
    ranks.rank, ranks.world, ranks.is_parallel = rank, 3, True
    return ranks


def test_pieces_are_by_name_and_each_rank_finds_its_own() -> None:
    names = list(SHAPES)
    for rank in range(3):
        owned = owned_cut(placed(rank))
        assert owned.pieces == {name: [p for p in PIECES if names[p.parameter] == name] for name in names}
        for name in names:
            held = [piece for piece in owned.pieces[name] if piece.owner == rank]
            assert owned.own(name) == (held[0] if held else None)
            assert owned.is_whole(name) is (name not in ("cut", "last"))


def test_a_piece_is_a_view_where_the_whole_is_laid_out_alike() -> None:
    whole = tensors(1)
    for rank in range(3):
        owned = owned_cut(placed(rank))
        for name, one in whole.items():
            found = owned.piece(name, one)
            assert same(found, part(name, one, rank))
            if WHOLE.get(name) == rank:
                assert found is one
            elif found.numel():
                assert found.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
            else:
                assert found.shape == (0,)
        for kind in (torch.float64, torch.bool):
            odd = whole["last"].contiguous().to(kind)
            assert same(owned.piece("last", odd), part("last", odd, rank))
    assert owned_cut(placed(2)).piece("cut", whole["cut"].double()).dtype is torch.float64


@WORLDS
def test_wholes_come_together_as_their_parameters_are_laid_out(world: int) -> None:
    whole = tensors(1) | {"vector": tensors(1)["vector"].double(), "last": tensors(1)["last"].half()}
    del whole["idle"]

    def work(ranks: Ranks) -> Any:
        owned = owned_cut(ranks)
        own = parts(whole, ranks.rank)
        # A whole one may be handed over in another layout than its parameter's.
        own["gaps"] = own["gaps"].t().contiguous().t() if ranks.rank == 1 else own["gaps"]
        return owned.wholes(own), owned.whole("last", own["last"]), owned.whole("scalar", own["scalar"])

    for found, last, scalar in on_threads(world, work):
        assert list(found) == list(whole)
        assert all(same(found[name], one) for name, one in whole.items())
        assert found["last"].is_contiguous(memory_format=torch.channels_last)
        assert found["gaps"].stride() == (3, 1)
        assert same(last, whole["last"])
        assert same(scalar, whole["scalar"])


@WORLDS
def test_pieces_travel_type_by_type_in_the_order_of_names(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: dict[str, Tensor] = {
        "last": torch.arange(24.0).view(2, 3, 2, 2), "vector": torch.arange(5), "none": torch.zeros(0),
        "cut": torch.arange(100.0, 112.0).view(4, 3), "gaps": torch.zeros(2, 3, dtype=torch.int64),
    }  # fmt: skip
    exchanges: list[str] = []
    gather, swap = module.all_gather, dist.all_to_all_single
    monkeypatch.setattr(module, "all_gather", lambda *given: exchanges.append("gather") or gather(*given))

    def swapped(received: Tensor, sent: Tensor, *lengths: list[int]) -> None:
        exchanges.append("swap")
        # Threads take more than they send; other backends refuse it.
        assert [len(received), len(sent)] == [sum(own) for own in lengths]
        swap(received, sent, *lengths)

    monkeypatch.setattr(dist, "all_to_all_single", swapped)

    def work(ranks: Ranks) -> Any:
        owned = owned_cut(ranks)
        own = {name: part(name, one, ranks.rank).reshape(-1) for name, one in whole.items()}
        empty = list(owned.travelled({"none": torch.zeros(0)})), list(owned.travelled({}))
        return [(name, piece, run.tolist()) for name, piece, run in owned.travelled(own)], empty

    def sends_nothing(ranks: Ranks) -> Any:
        own = {"none": torch.zeros(0), "scalar": torch.full((1,), 3.0) if ranks.rank == 0 else torch.zeros(0)}
        return [(name, piece, run.tolist()) for name, piece, run in owned_cut(ranks).travelled(own)]

    lies = in_memory("last", whole["last"]).tolist()
    wanted = [
        ("last", PIECES[3], lies[:16]), ("last", PIECES[4], lies[16:]), ("none", PIECES[7], []),
        ("cut", PIECES[0], list(range(100, 108))), ("cut", PIECES[1], list(range(108, 112))),
        ("vector", PIECES[2], [0, 1, 2, 3, 4]), ("gaps", PIECES[6], [0] * 6),
    ]  # fmt: skip
    assert on_threads(world, work) == [(wanted, ([], []))] * world
    # Two ranks swap, more gather; what is nowhere is asked of nobody.
    assert exchanges == ["swap" if world == 2 else "gather"] * 2 * world
    assert on_threads(world, sends_nothing) == [[("none", PIECES[7], []), ("scalar", PIECES[5], [3.0])]] * world


@WORLDS
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_every_rank_has_the_norm_of_each_whole_tensor_in_its_type(world: int, kind: torch.dtype) -> None:
    mixed = tensors(1) | {name: tensors(1, kind)[name] for name in ("cut", "vector")}
    whole = {name: mixed[name] for name in ("gaps", "vector", "idle", "last", "cut", "scalar", "none")}
    wanted = [torch.linalg.vector_norm(one.double()) * (name != "idle") for name, one in whole.items()]

    def work(ranks: Ranks) -> Any:
        owned = owned_cut(ranks)
        own = parts(whole, ranks.rank)
        alone = owned.norms({"vector": own["vector"]})
        assert owned.norms({}) == []
        assert [owned.anywhere(ranks.rank == one) for one in range(world + 1)] == [True] * world + [False]
        return owned.norms(own), alone

    for found, alone in on_threads(world, work):
        assert [one.dtype for one in found] == [one.dtype for one in whole.values()]
        for one, norm in zip(found, wanted, strict=True):
            assert one.shape == ()
            torch.testing.assert_close(one.double(), norm, rtol=4 * torch.finfo(one.dtype).eps, atol=0)
        assert len(alone) == 1
        assert torch.equal(alone[0], found[1])
        assert same(found[4], torch.linalg.vector_norm(whole["cut"])), "of what's cut: the whole's bits"


def test_what_nobody_has_a_piece_of_has_no_norm_on_one_rank_too() -> None:
    owned = owned_cut(Ranks.alone())
    assert [float(one) for one in owned.norms({"idle": torch.ones(0), "scalar": torch.tensor(-3.0)})] == [0.0, 3.0]


@WORLDS
def test_pieces_are_spread_into_parameters_in_place(world: int) -> None:
    values = tensors(1)
    names = ("gaps", "last", "cut", "vector", "none", "idle")

    def work(ranks: Ranks) -> Any:
        parameters = {name: nn.Parameter(one) for name, one in tensors().items()}
        given = [Parameter(i, name, 0, one) for i, (name, one) in enumerate(parameters.items())]
        owned = OwnedCut(ranks, given, PIECES)
        places = {name: (one.data_ptr(), one.stride()) for name, one in parameters.items()}
        with torch.no_grad():
            for name, one in parameters.items():
                if WHOLE.get(name) == ranks.rank:
                    one.copy_(values[name])
                elif (name, ranks.rank) in RUNS:
                    lies = one.permute(0, 2, 3, 1) if name == "last" else one
                    start, stop = RUNS[name, ranks.rank]
                    lies.view(-1)[start:stop] = part(name, values[name], ranks.rank)
        owned.spread(names)
        owned.spread(())
        assert {name: (one.data_ptr(), one.stride()) for name, one in parameters.items()} == places
        return {name: one.detach() for name, one in parameters.items()}

    for rank, found in enumerate(on_threads(world, work)):
        assert all(torch.equal(found[name], values[name]) for name in names if name != "idle")
        assert torch.equal(found["idle"], tensors()["idle"])
        asked = values if WHOLE["scalar"] == rank else tensors()
        assert torch.equal(found["scalar"], asked["scalar"]), "it wasn't asked for"


def state() -> dict[str, Tensor]:
    """An optimizer's, whole; of some keys the parameter's name is only a part."""
    first, second = tensors(1), tensors(2)
    found = {f"{name}/avg": one for name, one in first.items() if name != "idle"}
    found |= {f"{name}/sq": second[name].double() for name in ("cut", "gaps")}
    found |= {f"{name}/step": torch.tensor(i + 1) for i, name in enumerate(("cut", "vector", "last"))}
    return found | {"run/total": torch.arange(2), "moved": torch.ones(()), "vector/odd": torch.ones(7, 2).bool()}


def own_of(whole: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    found = {}
    for key, one in whole.items():
        name = key.rpartition("/")[0]
        if name not in SHAPES:
            found[key] = one
        elif (name, rank) in RUNS:
            found[key] = part(name, one, rank) if one.ndim else one
        elif WHOLE.get(name) == rank:
            found[key] = one
    return found


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_whole_state_a_rank_keeps_its_own(rank: int) -> None:
    whole = state()
    found = owned_cut(placed(rank)).own_state(whole)
    wanted = own_of(whole, rank)
    assert list(found) == list(wanted)
    for key, one in wanted.items():
        assert same(found[key], one)
        is_cut = key.rpartition("/")[0] in ("cut", "last") and one.ndim
        if is_cut:
            assert found[key].untyped_storage().nbytes() == one.nbytes, "a view would keep the whole"
        else:
            assert found[key] is whole[key]


@WORLDS
def test_state_comes_together_whole_on_every_rank(world: int) -> None:
    whole = state()
    order = ("run/total", "moved", *(key for name in SHAPES for key in whole if key.rpartition("/")[0] == name))

    def work(ranks: Ranks) -> Any:
        own = own_of(whole, ranks.rank)
        found = owned_cut(ranks).whole_state(own)
        assert found["run/total"] is own["run/total"]
        return found

    for found in on_threads(world, work):
        assert tuple(found) == order
        assert all(same(found[key], whole[key]) for key in order)


def spans(held: Mapping[str, HeldSpan]) -> dict[str, tuple[Sequence[Any], tuple[int, ...], int]]:
    return {key: (one.tensor.reshape(-1).tolist(), one.shape, one.start) for key, one in held.items()}


@WORLDS
def test_state_is_held_by_one_rank_each_in_runs_of_the_contiguous_whole(world: int) -> None:
    whole = state()

    def held_by(rank: int) -> dict[str, tuple[Sequence[Any], tuple[int, ...], int]]:
        found = {}
        for key, one in whole.items():
            name, flat = key.rpartition("/")[0], one.reshape(-1).tolist()
            # Channels-last is no run of a contiguous whole: its first owner has all of it, of numbers as well.
            first = {"cut": 0, "last": 1}.get(name, WHOLE.get(name, 0))
            if name == "cut" and one.ndim:
                if (name, rank) in RUNS:
                    start, stop = RUNS[name, rank]
                    found[key] = flat[start:stop], tuple(one.shape), start
            elif rank == first:
                found[key] = flat, tuple(one.shape), 0
        return found

    def work(ranks: Ranks) -> Any:
        return spans(owned_cut(ranks).held_state(own_of(whole, ranks.rank)))

    for rank, found in enumerate(on_threads(world, work)):
        assert found == held_by(rank)


def test_what_only_its_owner_holds_is_sent_with_its_type_and_shape() -> None:
    """Each rank's own of another rank's is no matter; what is sent lies in memory of its own kind."""

    def work(ranks: Ranks) -> Any:
        owned = owned_cut(ranks)
        whole = torch.arange(6.0).view(2, 3).t() if ranks.rank == 1 else torch.zeros(9)
        sent = owned._sent(whole, 1, [3, 2], torch.float32)
        nothing = owned._sent(torch.tensor(4) if ranks.rank == 0 else None, 0, [], torch.int64)
        return sent.tolist(), sent.is_contiguous(), nothing.item(), nothing.dtype

    wanted = ([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], True, 4, torch.int64)
    assert on_threads(3, work) == [wanted] * 3
