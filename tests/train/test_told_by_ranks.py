"""Ranks know the same of each other: who runs what, what each has, and where theirs differ."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cosmati.core.batch import Batch, Lineage
from cosmati.errors import DataError, PlanError
from cosmati.train import ranks as module
from cosmati.train.ranks import Ranks, exchange_device
from tests.train.thread_group import on_threads


def placed(world: int, rank: int = 0, *, degree: int = 1, run: int = 0, together: int = 0) -> Ranks:
    ranks = Ranks.alone()
    ranks.world, ranks.rank, ranks.is_parallel, ranks.degree = world, rank, world > 1, degree
    ranks.run, ranks.num_together = run, together
    return ranks


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("together", [0, 1, 2, 4])
@pytest.mark.parametrize("num", [4, 8, 16])
def test_microbatches_are_dealt_out_once_and_as_subtrees(world: int, is_strided: bool, together: int, num: int) -> None:
    if together > world or not (is_strided or together == 0):
        return
    dealt = []
    for rank in range(world):
        ranks = placed(world, rank)
        ranks.share_out(num, is_strided=is_strided, num_together=together)
        assert ranks.run == (1 if is_strided else num // world)
        assert ranks.num_together == together
        dealt.append(ranks.mine(num))
        assert [slot[rank] for slot in ranks.slots(num)] == dealt[-1]
    assert sorted(m for own in dealt for m in own) == list(range(num))
    assert all(own == sorted(own) and len(own) == num // world for own in dealt)
    of_group = num * (together or world) // world
    for rank, own in enumerate(dealt):
        first = rank // (together or world) * of_group
        place = rank % (together or world)
        step = (together or world) if is_strided else 1
        start = first + (place if is_strided else place * num // world)
        assert own == list(range(start, start + step * num // world, step))


def test_runs_of_some_length_alternate() -> None:
    ranks = placed(4, together=2)
    ranks.share_out(4)
    assert (ranks.num_together, ranks.run) == (0, 1)
    assert [placed(2, rank, run=2).mine(8) for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert placed(2).slots(8) == [[0, 4], [1, 5], [2, 6], [3, 7]], "before they're shared out"
    assert [placed(4, rank, degree=2).mine(4) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("world", "degree", "num", "told"),
    [
        (4, 1, 2, ("4 ranks can't share V = 2 microbatches. Start a number of ranks that divides V, a power of two, or "
         "set RunConfig(num_microbatches=...) to 4 or a larger power of two.")),
        (3, 1, 4, "3 ranks can't share V = 4 microbatches. Start a number of ranks that divides V, a power of two."),
        (8, 2, 2, ("4 replicas of 2 ranks can't share V = 2 microbatches. Start a number of replicas that divides V, a "
         "power of two, or set RunConfig(num_microbatches=...) to 4 or a larger power of two.")),
    ],
)  # fmt: skip
def test_ranks_that_cannot_share_microbatches_are_refused(world: int, degree: int, num: int, told: str) -> None:
    with pytest.raises(PlanError) as refused:
        placed(world, degree=degree).share_out(num)
    assert str(refused.value) == told


def test_one_process_has_everything_and_asks_nobody() -> None:
    ranks = Ranks()
    rows = torch.arange(3)
    assert (ranks.world, ranks.rank, ranks.is_parallel, ranks.has_met, ranks.degree) == (1, 0, False, False, 1)
    assert (ranks.num_replicas, ranks.replica, ranks.has_replicas, ranks.can_tell) == (1, 0, False, False)
    assert ranks.gather(rows) is rows
    assert ranks.gather_by_rank(rows) is rows
    assert torch.equal(ranks.gather_by_replica(rows), rows)
    assert ranks.told(b"this") == b"this"
    assert ranks.told_by_all({"a": 1}) == [{"a": 1}]
    assert (ranks.agree(flag=True), ranks.agree(flag=False)) == (True, False)
    assert ranks.all_equal(b"x")
    assert ranks.unlike(b"x") == []
    assert ranks.unlike_names({"a": b"x"}) == []
    ranks.share([rows])
    ranks.barrier()
    ranks.refuse_unlike(0, rows)
    ranks.refuse_unlike_end(0, 1, None)
    with ranks.counting(), ranks.together():
        pass
    assert not ranks.has_met
    assert (ranks.sharing.rank, ranks.sharing.world) == (0, 1)
    for one in (ranks, Ranks.alone()):
        assert (one.run, one.num_together, one.num_early) == (0, 0, 0)
        assert (one.in_lockstep, one.group, one.within, one.across) == (False, None, None, None)
    alone = Ranks.alone()
    assert (alone.world, alone.rank, alone.is_parallel) == (1, 0, False)


@pytest.mark.parametrize("asked", ["", "1", "2"])
def test_one_of_several_processes_without_a_group_is_warned(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", asked)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Ranks()
    assert [str(one.message)[:48] for one in told] == ["WORLD_SIZE is 2, and there is no process group: "] * (
        asked == "2"
    )
    assert all(one.filename == __file__ for one in told)

    def work(_: Ranks) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Ranks()

    on_threads(1, work)


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_who_starts_with_torchrun_has_a_group_and_leaves_it(by_torchrun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: by_torchrun)
    monkeypatch.setattr(dist, "init_process_group", made.append)
    monkeypatch.setattr(module.atexit, "register", made.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    Ranks()
    own = "nccl" if torch.cuda.is_available() else "gloo"
    assert made == ([own, module._leave_group] if by_torchrun else [])
    left: list[int] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(1))
    for is_there in (False, True):
        monkeypatch.setattr(dist, "is_initialized", lambda is_there=is_there: is_there)
        module._leave_group()
        assert left == [1] * is_there
    made.clear()
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    Ranks()
    assert made == [], "there's one"


def test_each_rank_has_what_all_have() -> None:
    def work(ranks: Ranks) -> Any:
        rank = ranks.rank
        assert (ranks.world, ranks.is_parallel, ranks.has_replicas, ranks.can_tell) == (4, True, True, True)
        assert exchange_device() == torch.device("cpu")
        rows = torch.tensor([[rank, 0], [rank, 1]])
        by_rank = ranks.gather_by_rank(rows.t().contiguous().t()).tolist()
        assert by_rank == [[one, part] for one in range(4) for part in (0, 1)] == ranks.gather_by_replica(rows).tolist()
        ranks.share_out(8)
        assert ranks.gather(torch.tensor([[m] for m in ranks.mine(8)])).flatten().tolist() == list(range(8))
        ranks.share_out(8, is_strided=True)
        assert ranks.gather(torch.tensor([[m] for m in ranks.mine(8)])).flatten().tolist() == list(range(8))
        ranks.share_out(8, is_strided=True, num_together=2)
        assert ranks.gather(torch.tensor([[m] for m in ranks.mine(8)])).flatten().tolist() == list(range(8))
        sharing = ranks.sharing
        assert (sharing.rank, sharing.world) == (rank, 4)
        assert sharing.gather(torch.tensor([rank, 7])).tolist() == [[one, 7] for one in range(4)]
        own = [torch.full((2, 3), float(rank)).t(), torch.tensor(float(rank), requires_grad=True)]
        ranks.share(own)
        assert all((one == 0).all() for one in own)
        assert ranks.told_by_all({"näme": [rank, "x" * rank]}) == [{"näme": [one, "x" * one]} for one in range(4)]
        assert ranks.told(b"from the first" if rank == 0 else b"other") == b"from the first"
        assert ranks.told(b"" if rank == 0 else b"other") == b""
        assert [ranks.agree(rank == one) for one in (0, 3, 4)] == [True, True, False]
        assert ranks.unlike(b"ab" if rank in (1, 3) else b"aa") == [1, 3]
        assert ranks.unlike(b"ab" if rank == 0 else b"aa") == [1, 2, 3]
        assert not ranks.all_equal(b"ab" if rank == 2 else b"aa")
        assert ranks.all_equal(b"ab")
        digests = (
            {"same": b"1", "other": bytes([rank // 3])}
            | ({"b": b"1"} if rank else {})
            | ({"a": b""} if rank > 2 else {})
        )
        assert ranks.unlike_names(digests) == ["a", "b", "other"]
        ranks.barrier()
        return True

    assert on_threads(4, work) == [True] * 4


def test_replicas_have_groups_of_their_own() -> None:
    def work(_: Ranks) -> Any:
        ranks = Ranks(2)
        assert (ranks.degree, ranks.num_replicas, ranks.replica, ranks.has_replicas) == (2, 2, ranks.rank // 2, True)
        assert not ranks.can_tell
        assert ranks.gather_by_replica(torch.tensor([ranks.replica])).tolist() == [0, 1]
        within, across = Ranks.in_group(ranks.within), Ranks.in_group(ranks.across)
        assert (within.world, within.rank, within.is_parallel) == (2, ranks.rank % 2, True)
        assert (across.world, across.rank) == (2, ranks.rank // 2)
        mine = torch.tensor([ranks.rank])
        assert across.agree(ranks.rank == 3) == (ranks.rank in (1, 3))
        return within.gather_by_rank(mine).tolist(), across.gather_by_rank(mine).tolist()

    assert on_threads(4, work) == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]


def test_one_rank_in_a_group_has_no_others() -> None:
    def work(_: Ranks) -> Any:
        alone = Ranks.in_group(dist.new_group([dist.get_rank()], use_local_synchronization=True))
        return alone.is_parallel, alone.world, alone.rank

    assert on_threads(2, work) == [(False, 1, 0)] * 2


def batch(*values: float) -> Batch:
    return Batch(torch.tensor(values), Lineage(torch.arange(len(values)), torch.zeros(len(values), dtype=torch.int64)))


def test_batches_are_compared_at_first_and_ever_more_rarely() -> None:
    def work(ranks: Ranks) -> Any:
        looked = []
        for step in (7, *range(18)):
            try:
                ranks.refuse_unlike(step, torch.tensor([0.0 if ranks.rank % 2 else 1.0]), "order")
            except DataError as error:
                looked.append((step, str(error)[:60]))
        ranks.refuse_unlike(0, torch.ones(1))
        try:
            ranks.refuse_unlike(0, "a", 1 if ranks.rank == 1 else 2)
        except DataError as error:
            looked.append((0, str(error)[:60]))
        return looked

    for found in on_threads(4, work):
        assert [step for step, _ in found] == [7, 0, 1, 2, 4, 8, 16, 0]
        assert found[0][1].startswith("At step 7, ranks 1, 3 had another batch than rank 0. Every")
        assert found[-1][1].startswith("At step 0, rank 1 had another batch than rank 0.")


@pytest.mark.parametrize(
    ("passes", "data", "told"),
    [
        ((0, 0), (None, None), None),
        ((1, 1), (batch(1, 2), batch(3, 4)), None),
        ((0, 0), (batch(1), torch.ones(1, 2)), None),
        ((0, 0), (batch(1, 2), batch(3)), "At step 5 some ranks had a batch of 1 rows, and others of 2. Every rank"),
        ((0, 0), (batch(1), torch.ones(2, 2)), "At step 5 some ranks had a batch of 1 rows, and others of 2."),
        ((0, 0), (batch(1, 2), None), "At step 5 the data of some ranks have ended, and others' haven't. Every rank"),
        ((0, 1), (batch(1), batch(1)), "At step 5 the data of some ranks have ended, and others' haven't."),
        ((0, 1), (batch(1), batch(1, 2)), "At step 5 the data of some ranks have ended"),
        ((0, 1), (None, None), "At step 5 the data of some ranks have ended"),
    ],
)
def test_data_that_end_on_some_ranks_only_are_refused(passes: Any, data: Any, told: str | None) -> None:
    def work(ranks: Ranks) -> None:
        with pytest.raises(DataError, match=told) if told else nullcontext():
            ranks.refuse_unlike_end(5, passes[ranks.rank], data[ranks.rank])

    on_threads(2, work)


@pytest.mark.parametrize(
    ("before", "after", "early", "met"),
    [
        ([3, 4], [3, 4], 0, False),
        ([3, 4], [3, 5], 0, True),
        ([3, 4], [4, 5], 2, False),
        ([3, 4], [4, 5], 1, True),
        ([3], [3, 0], 0, True),
        ([3, 4], [3, 4], 1, True),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_collectives_of_others_are_counted(
    before: list[int], after: list[int], early: int, met: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(ranks: Ranks) -> bool:
        told = iter([before, after])
        monkeypatch.setattr(module, "num_collectives", lambda: next(told))
        with pytest.raises(KeyError) if fails else nullcontext(), ranks.counting():
            ranks.num_early += early
            if fails:
                raise KeyError
        return ranks.has_met

    ranks: Any = placed(2)
    ranks.has_met = False
    ranks.num_early = 5
    assert counted(ranks) is met
    ranks.has_met = True
    assert counted(ranks) is True
    ranks.has_met, ranks.in_lockstep = False, True
    assert counted(ranks) is False
    ranks.in_lockstep, ranks.is_parallel = False, False
    assert counted(ranks) is False


def test_a_gather_has_the_name_that_pytorch_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    names = ("all_gather_single", "all_gather_into_tensor")
    for name in names:
        monkeypatch.setattr(
            dist, name, lambda *own, name=name, **how: given.append((name, own, how)) or name, raising=False
        )
    own = torch.ones(1), torch.ones(2)
    group: Any = SimpleNamespace()
    assert module.all_gather(own[1], own[0], group=group, is_async=True) == names[0]
    monkeypatch.delattr(dist, names[0])
    assert module.all_gather(own[1], own[0]) == names[1]
    assert [(name, how) for name, _, how in given] == [
        (names[0], {"group": group, "async_op": True}),
        (names[1], {"group": None, "async_op": False}),
    ]
    assert all(one is own[1] and other is own[0] for _, (one, other), _ in given)


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("gloo", "cpu"), ("mpi", "cpu")])
def test_tensors_lie_where_the_backend_takes_them(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    assert exchange_device() == torch.device(device)


def test_ranks_that_replicas_do_not_divide_are_refused() -> None:
    def work(_: Ranks) -> str:
        with pytest.raises(PlanError) as told:
            Ranks(3)
        return str(told.value)

    wanted = (
        "2 ranks can't be replicas of tensor_parallel=3 ranks each. Start a multiple of 3 ranks, or take a "
        "RunConfig(tensor_parallel=...) that divides 2."
    )
    assert on_threads(2, work) == [wanted] * 2
    assert Ranks(3).degree == 1, "one alone does everything"
