"""Parameters that are cut by rows come together again, at their owners and everywhere, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.train.layout.shard_cut import RowCut, RowsCut, refuse_uncuttable
from cosmati.train.ranks import Ranks
from tests.train.test_rank_sum import Threads, threads

__all__ = ["threads"]

SHAPES = {"a": (7, 3), "b": (16,), "c": (1, 2, 5), "d": (9, 2, 2), "e": (8, 4), "f": (3,)}


def whole(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cut_for(ranks: Ranks) -> RowCut:
    return RowCut({name: RowsCut(shape, ranks.world) for name, shape in SHAPES.items()}, ranks)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES.values())
def test_rows_are_cut_as_chunk_cuts_them(shape: tuple[int, ...], world: int) -> None:
    """As FSDP2 does it, by torch.chunk: the last ranks may have none."""
    rows, like = RowsCut(shape, world), torch.arange(float(torch.Size(shape).numel())).view(shape)
    pieces = list(like.chunk(world))
    pieces += [like[:0]] * (world - len(pieces))
    for rank, piece in enumerate(pieces):
        assert torch.equal(like[rows.of(rank)], piece)
        assert rows.piece_shape(rank) == tuple(piece.shape)
        assert rows.num_elements(rank) == piece.numel()
    assert (rows.most, rows.row_size, rows.padded) == (len(pieces[0]), like[0].numel(), pieces[0].numel())


def test_pieces_are_collected_by_owners_and_handed_out_again(threads: Threads) -> None:
    truth = whole()

    def work(ranks: Ranks) -> Any:
        cut = cut_for(ranks)
        pieces = {name: cut.piece(name, tensor) for name, tensor in truth.items()}
        for name, piece in pieces.items():
            assert piece.untyped_storage().nbytes() == piece.nbytes, "a view would keep the whole"
            assert torch.equal(cut.whole(name, piece), truth[name])
        own = cut.collected(pieces)
        assert all(torch.equal(tensor, truth[name]) for name, tensor in own.items())
        doubled = {name: tensor * 2 for name, tensor in own.items()}
        back = cut.handed_out(doubled, list(truth), truth["a"])
        assert back.keys() == truth.keys()
        assert all(torch.equal(back[name], pieces[name] * 2) for name in truth)
        some = cut.handed_out({name: doubled[name] for name in ("e", "b") if name in own}, ["e", "b"], truth["a"])
        assert {name: tensor.tolist() for name, tensor in some.items()} == {n: back[n].tolist() for n in ("b", "e")}
        return set(own), cut.owner_of

    found = threads.run(work)
    assert sorted(name for own, _ in found for name in own) == sorted(SHAPES), "each has one owner"
    assert all(owner_of == found[0][1] for _, owner_of in found)
    assert all(name in found[owner][0] for name, owner in found[0][1].items())


def test_norms_are_those_of_whole_tensors_on_every_rank(threads: Threads) -> None:
    truth = whole(3)

    def work(ranks: Ranks) -> Any:
        cut = cut_for(ranks)
        pieces = {name: cut.piece(name, tensor) for name, tensor in truth.items()}
        assert cut.norms({}) == []
        return [float(one) for one in cut.norms(pieces)]

    expected = [float(torch.linalg.vector_norm(tensor)) for tensor in truth.values()]
    for found in threads.run(work):
        assert found == pytest.approx(expected, rel=1e-6)


def test_what_one_rank_says_of_its_rows_is_so_anywhere(threads: Threads) -> None:
    for says in ([], [1], [0, 1]):
        told = threads.run(lambda ranks, says=says: cut_for(ranks).anywhere(ranks.rank in says))  # type: ignore[misc]
        assert told == [bool(says)] * threads.world


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.held = [self.linear.weight]


def odd(weight: Tensor) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    return model


def hooked(*, after: bool) -> nn.Module:
    model = nn.Linear(2, 2)
    register = model.weight.register_post_accumulate_grad_hook if after else model.weight.register_hook
    register(lambda *_: None)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.ModuleList([nn.Linear(1, 1)]), "The model is a ModuleList, which has no forward of its own"),
        (nn.ModuleDict({"a": nn.Linear(1, 1)}), "The model is a ModuleDict"),
        (Holds(), r"The model \(Holds\) holds parameters in held too"),
        (nn.Sequential(Holds()), r"0 \(Holds\) holds parameters in held too"),
        (nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()), r"has torch.float32, torch.float64\. Bring it"),
        (nn.Linear(1, 1).half(), r"has torch.float16\. Bring it"),
        (odd(torch.ones(())), "weight is a scalar"),
        (odd(torch.ones(0, 2)), "weight has no elements"),
        (odd(torch.ones(3, 2).t()), "weight isn't contiguous"),
        (odd(torch.ones(9)[1:]), "weight begins between multiples of 16 bytes"),
        (hooked(after=False), "weight has hooks"),
        (hooked(after=True), "weight has hooks"),
    ],
)
def test_what_cannot_be_cut_is_named(model: nn.Module, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        refuse_uncuttable(model)


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 3), nn.Linear(2, 3).double(), odd(torch.ones(12)[4:]), nn.Identity()],
)
def test_plain_models_can_be_cut(model: nn.Module) -> None:
    assert refuse_uncuttable(model) is None
