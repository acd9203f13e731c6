"""The tree over all ranks, with threads in place of processes: the same bits as one pairwise sum of all leaves."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.train.layout.exchange import RankSum, sum_type
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.layout.piece import Bucket, evenly, in_buckets
from cosmati.train.layout.shard_groups import sum_of_replicas
from cosmati.train.ranks import Ranks

V = 8


class Threads:
    """A process group of threads: what each hands over, in the order of ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._met = threading.Barrier(world, timeout=280)
        self._own = threading.local()
        self._given: list[Any] = [None] * world

    @property
    def rank(self) -> int:
        """The thread's own."""
        return int(self._own.rank)

    def _exchange(self, value: Any) -> list[Any]:
        self._given[self._own.rank] = copy.deepcopy(value)
        self._met.wait()
        given = list(self._given)
        self._met.wait()
        return given

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        *,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        lengths = sent or [own.numel() // self.world] * self.world
        # Each rank's own lengths say where its parts begin.
        given = [
            one.split(parts.tolist())[self._own.rank]
            for one, parts in zip(self._exchange(own), self._exchange(torch.tensor(lengths)), strict=True)
        ]
        assert received is None or [len(one) for one in given] == received
        later = self._later(lambda: output.copy_(torch.cat(given).view(output.shape)))
        return later if async_op else later.wait()

    def all_gather_single(self, output: Tensor, own: Tensor, *, group: Any = None, async_op: bool) -> Any:
        given = self._exchange(own)
        later = self._later(lambda: output.copy_(torch.cat(given)))
        return later if async_op else later.wait()

    def all_gather_object(self, found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = self._exchange(own)

    def broadcast(self, value: Tensor, src: int = 0, group: Any = None, group_src: int | None = None) -> None:
        value.copy_(self._exchange(value)[src if group_src is None else group_src])

    @staticmethod
    def _later(arrives: Callable[[], Any]) -> Any:
        """What was received isn't there before somebody has waited for it."""
        return SimpleNamespace(wait=arrives)

    def all_reduce(self, value: Tensor, op: Any, group: Any = None, *, async_op: bool = False) -> Any:
        assert op is dist.ReduceOp.MAX
        # Some backends' maximum passes over NaN.
        given = [one.nan_to_num(nan=-torch.inf, posinf=torch.inf) for one in self._exchange(value)]
        later = self._later(lambda: value.copy_(torch.stack(given).amax(0)))
        return later if async_op else later.wait()

    def run(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """What each rank's thread returns."""

        def start(rank: int) -> Any:
            self._own.rank = rank
            ranks = Ranks()
            ranks.rank, ranks.world, ranks.is_parallel = rank, self.world, True
            try:
                return work(ranks)
            except BaseException:
                self._met.abort()  # Nobody waits for a rank that has failed.
                raise

        with ThreadPoolExecutor(self.world) as pool:
            done = [pool.submit(start, rank) for rank in range(self.world)]
        errors = [error for one in done if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [one.result() for one in done]


@pytest.fixture(params=[2, 4, 8])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Threads:
    group = Threads(request.param)
    for name in ("all_to_all_single", "all_gather_single", "all_reduce", "all_gather_object", "broadcast"):
        monkeypatch.setattr(dist, name, getattr(group, name), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    return group


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[Tensor] = [
        torch.randn(3, 5, generator=generator),
        torch.randn(16, generator=generator),
        torch.randn((), generator=generator),
        torch.randn(2, 3, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 6, generator=generator)[:, ::2],  # neither dense nor without gaps
        torch.randn(17, generator=generator),
        torch.randn(5, generator=generator),
    ]
    return [nn.Parameter(shape) for shape in shapes]


def _buckets(parameters: list[nn.Parameter], world: int) -> list[Bucket]:
    sizes = [parameter.numel() for parameter in parameters]
    groups = in_buckets(sizes, 40)
    assert len(groups) > 1
    return [evenly(group, sizes, world, 16) for group in groups]


def _leaves() -> list[list[Tensor | None]]:
    """For each microbatch a gradient for each parameter: the last one is absent everywhere, others now and then."""
    generator = torch.Generator().manual_seed(1)
    leaves: list[list[Tensor | None]] = []
    for microbatch in range(V):
        leaf: list[Tensor | None] = []
        for index, parameter in enumerate(_parameters()):
            gradient = torch.randn(parameter.shape, generator=generator)
            gradient[gradient.abs() < 0.3] = -0.0
            gradient.view(-1)[::5] = -0.0  # in all that are there: what stands for an absent one must leave it so
            leaf.append(None if index == 6 or (microbatch + index) % 3 == 0 or index == microbatch - 2 else gradient)
        leaves.append(leaf)
    return leaves


def _pairwise(values: list[Tensor | None]) -> Tensor | None:
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b if a is None else a if b is None else a + b for a, b in pairs]
    return values[0]


@pytest.mark.parametrize("run", [0, 1, 2])
def test_the_sum_has_the_bits_of_one_tree_on_every_rank(threads: Threads, run: int) -> None:
    leaves = _leaves()

    def work(ranks: Ranks) -> list[Tensor | None]:
        parameters = _parameters()
        ranks.run = min(run, V // ranks.world)
        total = RankSum(ranks, parameters, V, _buckets(parameters, ranks.world))
        for microbatch in ranks.mine(V):
            leaf = leaves[microbatch]
            total.lend()
            for parameter, gradient in zip(parameters, leaf, strict=True):
                if gradient is not None:  # as autograd adds it
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
            # What was brought to float32 comes beside the parameters, and takes the place of what they hold.
            widened = {i: gradient for i, gradient in enumerate(leaf[:2]) if gradient is not None}
            for index in widened:
                parameters[index].grad = torch.full_like(parameters[index], torch.nan) if index else None
            total.fold(widened)
            assert all(parameter.grad is None for parameter in parameters)
        return total.root()

    expected = [_pairwise([leaf[index] for leaf in leaves]) for index in range(7)]
    assert [one is None for one in expected] == [False] * 6 + [True]
    for root in threads.run(work):
        assert [one is None for one in root] == [False] * 6 + [True]
        for found, summed, parameter in zip(root, expected, _parameters(), strict=True):
            if found is not None and summed is not None:
                assert found.shape == parameter.shape
                assert torch.equal(found.contiguous().view(torch.int32), summed.contiguous().view(torch.int32))
        assert root[3] is not None
        assert root[3].stride() == _parameters()[3].stride()


def test_gradients_start_at_aligned_addresses(threads: Threads) -> None:
    def work(ranks: Ranks) -> list[int]:
        parameters = _parameters()
        total = RankSum(ranks, parameters, V, [evenly(range(7), [p.numel() for p in parameters], ranks.world, 16)])
        for _ in ranks.mine(V):
            for parameter in parameters:
                parameter.grad = torch.ones(parameter.shape)
            total.fold({})
        return [one.storage_offset() * one.element_size() for one in total.root() if one is not None]

    # 15, 16, 1, 54, 12, 17 and 5 floats, each from the next multiple of 64 bytes.
    assert threads.run(work) == [[0, 64, 128, 192, 448, 512, 640]] * threads.world


def _folded(ranks: Ranks) -> RankSum:
    """A sum of all of this rank's leaves."""
    parameters = [nn.Parameter(torch.zeros(40)) for _ in range(2)]
    total = RankSum(ranks, parameters, V, _buckets(parameters, ranks.world))
    for _ in ranks.mine(V):
        for parameter in parameters:
            parameter.grad = torch.ones(40)
        total.fold({})
    return total


def test_collectives_of_the_user_s_own_on_one_rank_are_known_to_all(threads: Threads) -> None:
    def work(ranks: Ranks, who: int | None) -> bool:
        ranks.has_met = ranks.rank == who
        _folded(ranks).root()
        return ranks.has_met

    for who in (None, 0, 1):
        assert threads.run(lambda ranks, who=who: work(ranks, who)) == [who is not None] * threads.world


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("odd", [1.0, -1.0, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])
def test_no_element_of_a_sum_is_beyond_its_bound(threads: Threads, odd: float, is_strided: bool) -> None:
    def work(ranks: Ranks, at: int) -> tuple[float, float]:
        ranks.share_out(V, is_strided=is_strided)
        parameters = [nn.Parameter(torch.zeros(16)) for _ in range(5)]  # two of them in a bucket
        total = RankSum(ranks, parameters, V, _buckets(parameters, ranks.world))
        assert total.bound == torch.inf
        for microbatch in ranks.mine(V):
            total.lend()
            for index, parameter in enumerate(parameters[1:]):  # nobody has a gradient of the first one
                is_odd = abs(odd) == 1 or (microbatch == at and index == at % 4)
                own = torch.full((16,), odd if is_odd else 0.0)
                parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
            total.fold({})
        root = [one for one in total.root() if one is not None]
        return total.bound, max(float(one.abs().max()) for one in root)

    for at in (0, 1, V - 2, V - 1):
        found = threads.run(lambda ranks, at=at: work(ranks, at))
        assert len({bound for bound, _ in found}) == 1
        bound, largest = found[0]
        if abs(odd) == 1:
            assert V == largest <= bound <= 100 * V
        else:
            assert bound > 1e38


def test_a_step_that_ends_without_its_sum_waits_for_what_is_under_way(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, awaited = [], []

    def later(arrives: Callable[[], Any]) -> Any:
        begun.append(arrives)
        return SimpleNamespace(wait=lambda: awaited.append(arrives) or arrives())

    monkeypatch.setattr(threads, "_later", later)
    threads.run(lambda ranks: _folded(ranks).close())
    assert len(awaited) == len(begun) >= 2 * threads.world


@pytest.mark.parametrize("world", ["", "1", "2"])
def test_one_of_several_processes_that_have_no_group_is_told_that_it_is_alone(
    world: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert Ranks().world == 1
    told = [str(one.message) for one in recwarn]
    assert bool(told) == (world == "2")
    assert all("WORLD_SIZE is 2, and there is no process group" in one for one in told)


@pytest.mark.parametrize("together", [1, 2, 4])
def test_groups_of_ranks_run_subtrees_and_tell_in_microbatch_order(threads: Threads, together: int) -> None:
    together = min(together, threads.world)

    def work(ranks: Ranks) -> tuple[list[int], list[list[int]], Tensor]:
        ranks.share_out(2 * V, is_strided=True, num_together=together)
        mine = ranks.mine(2 * V)
        return mine, ranks.slots(2 * V), ranks.gather(torch.tensor([[number, ranks.rank] for number in mine]))

    found = threads.run(work)
    size = 2 * V * together // threads.world
    for rank, (mine, slots, told) in enumerate(found):
        group, place = divmod(rank, together)
        assert mine == list(range(group * size + place, (group + 1) * size, together))
        assert [slot[rank] for slot in slots] == mine
        assert told[:, 0].tolist() == list(range(2 * V))
        assert {*told[:, 1].tolist()} == {*range(threads.world)}


def test_copies_of_shards_add_their_sums_in_one_tree(threads: Threads) -> None:
    """A length that no number of ranks divides, with -0.0 where all have it."""
    generator = torch.Generator().manual_seed(2)
    parts = [torch.randn(37, generator=generator) for _ in range(threads.world)]
    for part in parts:
        part[::5] = -0.0
    expected = _pairwise(list(parts))
    assert expected is not None
    for found in threads.run(lambda ranks: sum_of_replicas(parts[ranks.rank].clone(), ranks)):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    from_left_to_right = sum(parts[1:], start=parts[0])
    assert threads.world == 2 or not torch.equal(expected, from_left_to_right)


@pytest.mark.parametrize("run", [0, 1, 2])
def test_what_each_rank_knows_comes_in_microbatch_order(threads: Threads, run: int) -> None:
    width = min(run, V // threads.world) or V // threads.world

    def work(ranks: Ranks) -> tuple[list[int], Tensor, bool, bool]:
        ranks.run = min(run, V // ranks.world)
        mine = ranks.mine(V)
        table = ranks.gather(torch.tensor([[m, 10 * m] for m in mine]).t().contiguous().t())
        return mine, table, ranks.agree(flag=ranks.rank == 1), ranks.agree(flag=False)

    for rank, (mine, table, some, none) in enumerate(threads.run(work)):
        assert mine == [m for m in range(V) if m // width % threads.world == rank]
        assert table.tolist() == [[m, 10 * m] for m in range(V)]
        assert (some, none) == (True, False)


def test_optimizers_share_flat_tensors_in_the_order_of_ranks(threads: Threads) -> None:
    def work(ranks: Ranks) -> tuple[int, int, Tensor]:
        sharing = ranks.sharing
        return sharing.rank, sharing.world, sharing.gather(torch.full((3,), float(ranks.rank)))

    found = threads.run(work)
    assert [one[:2] for one in found] == [(rank, threads.world) for rank in range(threads.world)]
    for *_, gathered in found:
        assert gathered.tolist() == [[float(rank)] * 3 for rank in range(threads.world)]


def test_microbatches_that_are_cut_stay_with_their_rank(threads: Threads) -> None:
    """Piece k of microbatch m is microbatch k V + m (`Cuts`), and ranks still run whole subtrees of V."""

    def work(ranks: Ranks) -> tuple[list[int], list[int], list[int]]:
        ranks.share_out(V)
        slots = ranks.slots(2 * V)
        assert sorted(m for slot in slots for m in slot) == list(range(2 * V))
        mine = ranks.mine(2 * V)
        return ranks.mine(V), mine, ranks.gather(torch.tensor(mine)).tolist()

    for rank, (whole, cut, gathered) in enumerate(threads.run(work)):
        width = V // threads.world
        assert whole == list(range(rank * width, (rank + 1) * width))
        assert cut == [*whole, *(V + m for m in whole)]
        assert gathered == list(range(2 * V))


def test_ranks_that_do_not_divide_the_microbatches_are_refused() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.world, ranks.is_parallel) == (0, 1, False)
    assert list(ranks.mine(4)) == [0, 1, 2, 3]
    ranks.world = 3
    with pytest.raises(PlanError, match=r"3 ranks can't share V = 4 microbatches.*divides V, a power of two\.$"):
        ranks.mine(4)  # no V is shared by three
    ranks.world = 8
    with pytest.raises(PlanError, match=r"8 ranks can't share V = 4.*num_microbatches=...\) to 8 or a larger power"):
        ranks.mine(4)


def test_gradients_are_summed_in_one_type() -> None:
    narrow, single, double = (torch.zeros(1, dtype=kind) for kind in (torch.bfloat16, torch.float32, torch.float64))
    assert sum_type([narrow, single]) is torch.float32
    assert sum_type([double, double]) is torch.float64
    with pytest.raises(PlanError, match=r"Some parameters are float64 and others aren't"):
        sum_type([double, narrow])
    for kinds in ([single, double], [double, double, narrow]):
        with pytest.raises(PlanError, match=r"model\.float\(\)"):
            sum_type(kinds)
    assert sum_type([narrow]) is sum_type([torch.zeros(1, dtype=torch.float16)]) is torch.float32


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("place", [0, -1])
def test_one_complex_parameter_among_others_is_refused(kind: torch.dtype, others: int, place: int) -> None:
    tensors = [torch.zeros(1) for _ in range(others)]
    tensors.insert(place % (others + 1), torch.zeros(1, dtype=kind))
    with pytest.raises(PlanError, match=r"Some parameters are complex.*one rank.*view_as_real"):
        sum_type(tensors)


@pytest.mark.parametrize("shape", [(3, 5), (16, 1), (1, 1)])
def test_peers_add_in_the_tree_whatever_the_shape(threads: Threads, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    own = [torch.randn(shape, generator=generator) for _ in range(threads.world)]

    def work(ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
        ranks.degree = ranks.world
        peers = ReplicaPeers(ranks)
        assert (peers.degree, peers.place) == (threads.world, ranks.rank)
        return peers.total(own[ranks.rank].T), peers.everyone(own[ranks.rank].T)

    expected = _pairwise([*own])
    assert expected is not None
    for total, everyone in threads.run(work):
        assert torch.equal(total, expected.T)
        assert all(torch.equal(one, other.T) for one, other in zip(everyone, own, strict=True))


def test_batches_are_compared_first_of_all_and_then_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, ranks = [], Ranks.alone()
    ranks.is_parallel, ranks.has_met, ranks._has_compared = True, False, False
    monkeypatch.setattr(ranks, "unlike", lambda _: compared.append(step) or [])
    for step in (5, 6, 7, 8, 9, 15, 16, 17):
        ranks.refuse_unlike(step, torch.ones(1))
    assert compared == [5, 8, 16]
