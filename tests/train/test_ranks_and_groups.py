"""Ranks deal out what they're asked to, gather rows of any shape, and make groups only where there are replicas."""

from __future__ import annotations

import runpy
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.errors import DataError
from cosmati.train import ranks as module
from cosmati.train.ranks import Ranks
from tests.train.thread_group import on_threads


def placed(world: int, rank: int = 0) -> Ranks:
    ranks = Ranks.alone()
    ranks.world, ranks.rank, ranks.is_parallel = world, rank, world > 1
    return ranks


@pytest.mark.parametrize("is_there", [False, True])
def test_what_keeps_pytorchs_group_of_the_moment_is_imported_before_there_is_one(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: is_there)
    monkeypatch.setitem(sys.modules, "torch.distributed.nn.functional", None)
    if is_there:
        with pytest.raises(ModuleNotFoundError, match=r"torch\.distributed\.nn\.functional"):
            runpy.run_path(str(module.__file__), run_name="again")
    else:
        assert "Ranks" in runpy.run_path(str(module.__file__), run_name="again")


@pytest.mark.parametrize("is_there", [False, True])
def test_where_pytorch_has_no_collectives_one_process_is_alone(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of torch.distributed is asked then, and who was started as one of two is told."""

    def asked() -> bool:
        assert is_there, "torch.distributed has no such function here"
        return False

    monkeypatch.setattr(dist, "is_available", lambda: is_there)
    monkeypatch.setattr(dist, "is_torchelastic_launched", asked)
    monkeypatch.setattr(dist, "is_initialized", asked)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ranks = Ranks(2)
    assert len(told) == 1
    assert (ranks.world, ranks.rank, ranks.is_parallel, ranks.degree) == (1, 0, False, 1)


def test_ranks_without_replicas_make_no_groups() -> None:
    def work(_: Ranks) -> Any:
        many = len(dist.distributed_c10d._world.pg_map)
        found = [Ranks(), Ranks(1)]
        assert len(dist.distributed_c10d._world.pg_map) == many
        return [(one.degree, one.within, one.across, one.group) for one in found]

    assert on_threads(2, work) == [[(1, None, None, None)] * 2] * 2


def test_each_rank_has_a_run_of_consecutive_microbatches_unless_asked_otherwise() -> None:
    dealt = {}
    for rank in range(4):
        ranks = placed(4, rank)
        ranks.share_out(8)
        dealt[rank] = ranks.mine(8)
        assert (ranks.run, ranks.num_together) == (2, 0)
        ranks.share_out(8, is_strided=True)
        assert ranks.mine(8) == [rank, rank + 4]
        ranks.share_out(8, is_strided=True, num_together=2)
        assert ranks.mine(8) == [rank // 2 * 4 + rank % 2, rank // 2 * 4 + rank % 2 + 2]
        ranks.share_out(4)
        assert (ranks.run, ranks.num_together) == (1, 0), "as if it had been asked nothing before"
    assert dealt == {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}


@pytest.mark.parametrize("together", [0, 2])
@pytest.mark.parametrize("is_strided", [False, True])
def test_rows_of_any_shape_come_into_the_order_of_microbatches(together: int, is_strided: bool) -> None:
    whole = torch.arange(96.0).view(8, 3, 4)
    shapes = (whole, whole.flatten(1), whole[:, 0, 0], whole.transpose(1, 2))

    def work(ranks: Ranks) -> list[Tensor]:
        given = Ranks()
        if together or is_strided:
            given.share_out(8, is_strided=is_strided, num_together=together)
        mine = given.mine(8)
        return [given.gather(one[mine]) for one in shapes]

    for found in on_threads(4, work):
        for own, wanted in zip(found, shapes, strict=True):
            assert own.dtype == wanted.dtype
            assert torch.equal(own, wanted)


def test_rows_of_tokens_are_counted_by_the_row() -> None:
    """Two rows of three and three of two are as many tokens, and other batches."""
    shapes = ((2, 3), (3, 2))

    def work(ranks: Ranks) -> str:
        tokens = torch.zeros(shapes[ranks.rank], dtype=torch.int64)
        with pytest.raises(DataError) as told:
            ranks.refuse_unlike_end(3, 1, {"input_ids": tokens})
        ranks.refuse_unlike_end(3, 1, {"input_ids": tokens.view(6, 1)})
        ranks.refuse_unlike_end(3, 1, tokens[:1])
        return str(told.value)

    wanted = (
        "At step 3 some ranks had a batch of 2 rows, and others of 3. Every rank has to be given the same batches, as "
        "many as the others, of the same rows."
    )
    assert on_threads(2, work) == [wanted] * 2


def test_a_barrier_is_one_of_all_ranks_and_of_no_single_one(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []
    monkeypatch.setattr(dist, "barrier", lambda: met.append(1))
    placed(1).barrier()
    assert met == []
    placed(2).barrier()
    assert met == [1]


def test_what_the_first_rank_tells_arrives_byte_by_byte_and_values_in_their_own_memory() -> None:
    message = bytes(range(256)) * 2

    def work(ranks: Ranks) -> Any:
        rank = ranks.rank
        odd = torch.arange(6.0).view(2, 3).t() * (rank + 1)
        gaps = torch.full((2, 4), 7.0)
        own = [odd, gaps[:, ::2].fill_(rank), torch.tensor(rank == 0), torch.full((0,), 1.0)]
        learns = torch.tensor([float(rank)], requires_grad=True)
        ranks.share(iter([*own, learns]))
        assert learns.requires_grad
        assert gaps.tolist() == [[0.0, 7.0, 0.0, 7.0]] * 2, "beside it nothing is written"
        return ranks.told(message if rank == 0 else b"x"), [one.tolist() for one in own], learns.tolist()

    values = [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], [[0.0, 0.0]] * 2, True, []]
    assert on_threads(3, work) == [(message, values, [0.0])] * 3


@pytest.mark.parametrize(
    "kind", [torch.bool, torch.int16, torch.uint16, torch.float16, torch.float8_e4m3fn, torch.float64]
)
def test_what_is_expanded_and_what_no_backend_has_a_type_for_is_shared_as_it_is(kind: torch.dtype) -> None:
    def work(ranks: Ranks) -> Any:
        first = ranks.rank == 0
        expanded = torch.full((3, 1), float(first)).to(kind).expand(2, 3, 4)
        whole, single = torch.full((2, 2), float(first)).to(kind), torch.tensor(float(first)).to(kind)
        ranks.share([expanded, whole, single, expanded[:, 1]])
        assert expanded.stride() == (0, 1, 0)
        return [one.float().unique().tolist() for one in (expanded, whole, single)]

    assert on_threads(2, work) == [[[1.0]] * 3] * 2


def test_ranks_differ_by_any_byte_and_names_by_who_has_them() -> None:
    def work(ranks: Ranks) -> Any:
        rank = ranks.rank
        differing = [ranks.unlike(bytes([0, 255 if rank == one else 0, 3])) for one in range(4)]
        names = ranks.unlike_names({"b": b"1"} | {"a": bytes([rank == 2])} | ({"c": b""} if rank == 1 else {}))
        return differing, names, ranks.unlike_names({}), ranks.told_by_all({} if rank else {"x": None})

    told: list[dict[str, Any]] = [{"x": None}, {}, {}]
    assert on_threads(3, work) == [([[1, 2], [1], [2], []], ["a", "c"], [], told)] * 3
