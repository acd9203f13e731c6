"""State of optimizers and methods that ranks hold in pieces: all of it is held once, and comes together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.train.layout.layout import Parameter
from cosmati.train.layout.owned import OwnedCut
from cosmati.train.layout.piece import Piece, cut
from cosmati.train.layout.shard_cut import RowCut, RowsCut
from cosmati.train.layout.shard_state import ShardState
from cosmati.train.layout.span import HeldSpan
from cosmati.train.ranks import Ranks
from tests.train.test_rank_sum import Threads, threads

__all__ = ["threads"]

State = dict[str, Tensor]
SHAPES = ((40, 10), (70,), (12, 3, 5, 5), (), (6, 4))


def tensors(seed: int = 0) -> list[Tensor]:
    """One is laid out channels-last, one has gaps."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    made[4] = torch.randn(6, 8, generator=generator)[:, ::2]
    return made


def together(held: Sequence[Mapping[str, HeldSpan]]) -> State:
    """What all ranks hold, put together element by element: each is there once."""
    found: State = {}
    times: dict[str, Tensor] = {}
    for own in held:
        for key, span in own.items():
            flat = found.setdefault(key, torch.full(span.shape, -1, dtype=span.tensor.dtype)).view(-1)
            flat[span.start : span.stop] = span.tensor.contiguous().view(-1)
            times.setdefault(key, torch.zeros(span.shape)).view(-1)[span.start : span.stop] += 1
    assert all(bool((one == 1).all()) for one in times.values())
    return found


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        assert found[key].dtype == one.dtype
        assert torch.equal(found[key], one), key


def state_of_an_optimizer() -> State:
    found = {"run/total": torch.tensor(5.0), "moved": torch.arange(3)}
    for seed, name in enumerate(("exp_avg", "exp_avg_sq"), start=1):
        found |= {f"p{index}/{name}": one for index, one in enumerate(tensors(seed)) if index != 1}
    found |= {f"p{index}/step": torch.tensor(float(index + 3)) for index in range(5)}
    return found | {"p0/mask": tensors(3)[0] > 0, "p1/count": torch.arange(70), "p2/half": tensors(4)[2].half()}


@pytest.mark.parametrize("divisible", [set(), {0, 1, 2, 4}])
def test_pieces_of_an_optimizers_state(threads: Threads, divisible: set[int]) -> None:
    truth = state_of_an_optimizer()

    def work(ranks: Ranks) -> Any:
        made = [nn.Parameter(one) for one in tensors()]
        pieces: Sequence[Piece] = cut([one.numel() for one in made], divisible, (), ranks.world, 16)
        owned = OwnedCut(ranks, [Parameter(i, f"p{i}", 0, one) for i, one in enumerate(made)], pieces)
        own = owned.own_state(truth)
        if divisible:
            assert not owned.is_whole("p0")
            assert not owned.is_whole("p2")
            for key in own.keys() & {"p0/mask"}:
                assert own[key].untyped_storage().nbytes() == own[key].nbytes, "a view would keep the whole"
        assert_same(owned.whole_state(own), truth)
        return own, owned.held_state(own), len(owned.pieces["p0"])

    everyone = threads.run(work)
    assert_same(together([held for _, held, _ in everyone]), truth)
    assert {"run/total", "moved"} <= everyone[0][1].keys(), "what isn't a parameter's is the first rank's"
    # A piece is written by its owner; of one that is no run of the whole's elements, the first owner writes all.
    assert sum("p0/exp_avg" in held for _, held, _ in everyone) == everyone[0][2]
    assert sum("p2/exp_avg" in held for _, held, _ in everyone) == 1
    num = sum(one.numel() for own, _, _ in everyone for key, one in own.items() if key.endswith("exp_avg"))
    assert num == sum(one.numel() for key, one in truth.items() if key.endswith("exp_avg"))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_norms_of_pieces_are_as_precise_as_they_are(threads: Threads, kind: torch.dtype) -> None:
    """What one rank holds whole, and what's cut: every rank has the norm of the whole, to its type's last bits."""
    whole = {f"p{index}": one.to(kind) for index, one in enumerate(tensors())}
    expected = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in whole.values()])

    def work(ranks: Ranks) -> Tensor:
        made = [nn.Parameter(one) for one in tensors()]
        pieces = cut([one.numel() for one in made], {0, 4}, (), ranks.world, 16)
        owned = OwnedCut(ranks, [Parameter(i, f"p{i}", 0, one) for i, one in enumerate(made)], pieces)
        found = owned.norms({name: owned.piece(name, one) for name, one in whole.items()})
        assert {one.dtype for one in found} == {kind}
        return torch.stack(found).double()

    for found in threads.run(work):
        torch.testing.assert_close(found, expected, rtol=8 * torch.finfo(kind).eps, atol=0)


def test_of_a_rank_that_has_nothing_nothing_travels(threads: Threads) -> None:
    """An empty tensor is the first rank's; the second one has all there is."""
    made = [nn.Parameter(torch.empty(0)), nn.Parameter(torch.arange(3.0))]

    def work(ranks: Ranks) -> Any:
        pieces = [Piece(0, 0, 0, 0), Piece(1, 0, 3, 1)]
        owned = OwnedCut(ranks, [Parameter(i, f"p{i}", 0, one) for i, one in enumerate(made)], pieces)
        own = {f"p{i}": owned.piece(f"p{i}", one.detach()).reshape(-1) for i, one in enumerate(made)}
        return [(name, run.tolist()) for name, _, run in owned.travelled(own)]

    for found in threads.run(work):
        assert found == [("p0", []), ("p1", [0.0, 1.0, 2.0])]


def rows_cut(ranks: Ranks) -> RowCut:
    return RowCut({f"p{i}": RowsCut(shape, ranks.world) for i, shape in enumerate(SHAPES) if shape}, ranks)


def test_rows_of_an_optimizers_state_and_whole_matrices_with_their_owners(threads: Threads) -> None:
    truth = {key: one.contiguous() for key, one in state_of_an_optimizer().items()}

    def work(ranks: Ranks) -> Any:
        shards = rows_cut(ranks)
        state = ShardState(shards, ranks, {"p0", "p4"})
        own = state.own(truth, of_optimizers=True)
        for key, one in own.items():
            name = key.rpartition("/")[0]
            if name in ("p0", "p4"):
                assert shards.owner_of[name] == ranks.rank
                assert torch.equal(one, truth[key])
            elif name in shards.rows and one.ndim:
                assert one.shape == shards.rows[name].piece_shape(ranks.rank)
        assert_same(state.gathered(own, of_optimizers=True), truth)
        return own, state.held(own, of_optimizers=True)

    everyone = threads.run(work)
    assert_same(together([held for _, held in everyone]), truth)
    assert {"run/total", "moved", "p3/step"} <= everyone[0][1].keys()
    assert sum("p0/exp_avg" in own for own, _ in everyone) == 1


def test_what_only_resembles_a_whole_matrixs_state_is_each_ranks_own(threads: Threads) -> None:
    """An optimizer's state is of the parameter that its name begins with, and of none that stands further on."""

    def work(ranks: Ranks) -> Any:
        own = {"all/p0/total": torch.tensor(float(ranks.rank))}
        found = ShardState(rows_cut(ranks), ranks, {"p0"}).gathered(own, of_optimizers=True)
        return float(found["all/p0/total"]) == ranks.rank

    assert all(threads.run(work))


def test_rows_of_a_methods_state(threads: Threads) -> None:
    """Of a parameter that's in its name, and of its shape; a method's is never a whole matrix's owner's."""
    own_names = {f"averages/{key}": one.contiguous() for key, one in state_of_an_optimizer().items()}
    truth = own_names | {"averages/p1": torch.randn(70), "of all/p0/rows": torch.randn(40), "p4": torch.randn(6, 4)}

    def work(ranks: Ranks) -> Any:
        shards = rows_cut(ranks)
        state = ShardState(shards, ranks, {"p0", "p4"})
        own = state.own(truth, of_optimizers=False)
        assert own["p4"].shape == shards.rows["p4"].piece_shape(ranks.rank)
        assert own["averages/p0/exp_avg"].shape == shards.rows["p0"].piece_shape(ranks.rank)
        assert own["of all/p0/rows"].shape == (40,)
        assert_same(state.gathered(own, of_optimizers=False), truth)
        return state.held(own, of_optimizers=False)

    assert_same(together(threads.run(work)), truth)
