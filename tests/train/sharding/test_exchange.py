"""The exchange of gradients: early or late, of shares or of all; and no more bytes than a ring sends."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmati.core.pieces import Pieces
from cosmati.errors import DivergenceError, PlanError
from cosmati.optim import AdamW
from cosmati.routing.regions import RegionSelector, partition_parameters
from cosmati.train.config import RunConfig
from cosmati.train.finite import FiniteCheck
from cosmati.train.layout import optimizer_sharded, whole
from cosmati.train.layout.exchange import RankSum
from cosmati.train.layout.layout import LayoutStep
from cosmati.train.layout.optimizer_sharded import OptimizerSharded
from cosmati.train.layout.piece import by_owner, cut, evenly, in_buckets
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks
from tests.train.test_rank_sum import Threads, V, _leaves, _pairwise, _parameters, threads

__all__ = ["threads"]
_ONE_BY_ONE = threading.Lock()
SIZES = [parameter.numel() for parameter in _parameters()]


def _summed(ranks: Ranks, total: RankSum, parameters: list[nn.Parameter], order: random.Random) -> list[Tensor | None]:
    """Give a sum its leaves; the last one's gradients come in any order, some are never told of, some aren't expected.

    Returns:
        The root.
    """
    leaves, mine = _leaves(), ranks.mine(V)
    for microbatch in mine:
        total.lend()
        leaf = leaves[microbatch]
        indices = [i for i, gradient in enumerate(leaf) if gradient is not None]
        order.shuffle(indices)
        assert total.is_at_last == (microbatch == mine[-1])
        if total.is_at_last:
            total.expect({*indices, order.randrange(7)})  # one of them may never come
        for place, index in enumerate(indices):
            gradient, parameter = leaf[index], parameters[index]
            assert gradient is not None
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
            if place < len(indices) - order.randrange(2):
                total.arrived(index)
        total.fold({})
    return total.root()


@pytest.mark.parametrize("seed", range(4))
def test_buckets_that_leave_early_give_the_bits_of_one_tree(threads: Threads, seed: int) -> None:
    """Each rank's gradients come in another order, and buckets leave in one."""
    expected = [_pairwise([leaf[index] for leaf in _leaves()]) for index in range(7)]

    early = []

    def work(ranks: Ranks) -> list[Tensor | None]:
        parameters = _parameters()
        buckets = [evenly(group, SIZES, ranks.world, 16) for group in in_buckets(SIZES, 20)]
        total = RankSum(ranks, parameters, V, buckets)
        found = _summed(ranks, total, parameters, random.Random(10 * seed + ranks.rank))
        early.append(ranks.num_early)
        return found

    for root in threads.run(work):
        for found, summed in zip(root, expected, strict=True):
            assert (found is None) == (summed is None)
            assert found is None or summed is None or torch.equal(found, summed)
    assert any(early)


def test_each_rank_keeps_its_share(threads: Threads) -> None:
    expected = [_pairwise([leaf[index] for leaf in _leaves()]) for index in range(7)]

    def work(ranks: Ranks) -> int:
        parameters = _parameters()
        pieces = cut(SIZES, {0, 3}, [[1, 2]], ranks.world, 16)
        buckets = [by_owner(group, pieces, ranks.world, 16) for group in in_buckets(SIZES, 20)]
        total = RankSum(ranks, parameters, V, buckets, keeps_share=True)
        root = _summed(ranks, total, parameters, random.Random(ranks.rank))
        own = {piece.parameter: piece for piece in pieces if piece.owner == ranks.rank}
        for index, (found, summed) in enumerate(zip(root, expected, strict=True)):
            assert (found is None) == (summed is None)
            if found is None or summed is None:
                continue
            if index not in own:
                assert not found.numel()
            elif own[index].stop - own[index].start == SIZES[index]:
                assert torch.equal(found, summed)
                assert found.shape == parameters[index].shape
            else:
                like = torch.empty_strided(summed.shape, parameters[index].stride()).copy_(summed)
                run = like.as_strided((SIZES[index],), (1,))[own[index].start : own[index].stop]
                assert torch.equal(found, run)
        return sum(found.numel() for found in root if found is not None)

    assert sum(threads.run(work)) == sum(SIZES[:6])


class Counted:
    """Counts the bytes that one rank sends in a step to others."""

    def __init__(self, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = [0] * threads.world
        whole_sent = dist.all_to_all_single, dist.all_gather_single, dist.all_reduce  # type: ignore[attr-defined]

        def to_all(output: Tensor, own: Tensor, received: list[int], sent: list[int], **more: Any) -> Any:
            rank = threads.rank
            self.bytes[rank] += (sum(sent) - sent[rank]) * own.element_size()
            return whole_sent[0](output, own, received, sent, **more)

        def gather(output: Tensor, own: Tensor, **more: Any) -> Any:
            self.bytes[threads.rank] += (threads.world - 1) * own.nbytes
            return whole_sent[1](output, own, **more)

        def reduce(value: Tensor, op: Any, **more: Any) -> Any:
            self.bytes[threads.rank] += -(-2 * value.nbytes * (threads.world - 1) // threads.world)
            return whole_sent[2](value, op, **more)

        for name, counting in (("all_to_all_single", to_all), ("all_gather_single", gather), ("all_reduce", reduce)):
            monkeypatch.setattr(dist, name, counting, raising=False)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(300, 64), *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 300))


def _a_step(ranks: Ranks, kind: type[Whole]) -> Whole:
    """Take one step of AdamW over V microbatches."""
    with _ONE_BY_ONE:
        model = _model()
    layout = kind(model, partition_parameters(model), ranks, V)
    optimizer = AdamW(lr=1e-2).build([(p.name, p.tensor) for p in layout.parameters])
    if isinstance(layout, OptimizerSharded):
        layout.rehome([optimizer])
    everything = frozenset(p.index for p in layout.parameters)
    with layout.step([(1.0,)] * V, everything, measure=False) as step:
        for microbatch in layout.mine:
            with step.slot(microbatch) as slot:
                slot.backward(model(torch.arange(8) + microbatch).square().sum())
        root = step.root(torch.tensor([8.0], dtype=torch.float64))
    layout.commit(root, everything, optimizer.step)
    return layout


@pytest.mark.parametrize("kind", [Whole, OptimizerSharded])
def test_no_more_is_sent_than_by_a_ring(threads: Threads, monkeypatch: pytest.MonkeyPatch, kind: type[Whole]) -> None:
    monkeypatch.setattr(whole, "BUCKET_ELEMENTS", 20_000)
    monkeypatch.setattr(optimizer_sharded, "BUCKET_ELEMENTS", 20_000)
    counted = Counted(threads, monkeypatch)
    layouts = threads.run(lambda ranks: _a_step(ranks, kind))
    alone = _a_step(Ranks(), Whole)
    assert {layout.digest() for layout in layouts} == {alone.digest()}
    num_bytes = 4 * sum(p.tensor.numel() for p in alone.parameters)
    ring = 2 * num_bytes * (threads.world - 1) / threads.world
    # Beside gradients and parameters a float for each parameter and two more, and what fills up to 64 bytes.
    beside = (len(alone.parameters) + 2) * (8 + 64 * threads.world)
    assert sum(counted.bytes) / threads.world <= ring + beside
    assert sum(counted.bytes) / threads.world >= ring
    held = [sum(p.numel() for _, p in layout.pieces()) for layout in layouts]
    if kind is OptimizerSharded:
        assert 4 * sum(held) == num_bytes
        assert max(held) <= 1.1 * num_bytes / 4 / threads.world


@pytest.mark.parametrize("kind", [Whole, OptimizerSharded])
@pytest.mark.parametrize(
    ("by", "denominator", "is_finite"),
    [
        (1.0, 8.0, True),
        (1.0, -1e-20, True),
        (1.0, 0.0, True),  # its region rests
        (1.0, None, True),
        (1e30, 8.0, False),  # finite, and may be beyond float32 elsewhere
        (3e38, 1e10, False),
        (1.0, torch.nan, False),
        (1e20, -1e-20, False),
        (torch.nan, 8.0, False),
        (torch.inf, None, False),
    ],
)
def test_a_sum_is_known_to_be_finite_where_every_rank_s_share_is(
    threads: Threads, kind: type[Whole], by: float, denominator: float | None, is_finite: bool
) -> None:
    def work(ranks: Ranks, degree: int) -> bool:
        with _ONE_BY_ONE:
            model = nn.Linear(4, 6)
        layout = kind(model, partition_parameters(model), ranks, V)
        if isinstance(layout, OptimizerSharded):
            layout.rehome([AdamW(lr=1e-2).build([(p.name, p.tensor) for p in layout.parameters])])
        with layout.step([(1.0,)] * V, frozenset({0, 1}), measure=False) as step:
            for microbatch in layout.mine:
                with step.slot(microbatch) as slot:
                    slot.backward(model(torch.ones(4)).sum() * (by if microbatch == V - 1 else 1.0))
            assert not step.is_finite
            layout.ranks = cast("Ranks", SimpleNamespace(degree=degree))
            layout.gradients = lambda _: Pieces({})  # type: ignore[method-assign]  # these are no parts
            step.root(None if denominator is None else torch.tensor([denominator], dtype=torch.float64))
        return bool(step.is_finite)

    assert threads.run(lambda ranks: work(ranks, 1)) == [is_finite] * threads.world
    # A rank that computes a part of each microbatch knows nothing of the other parts.
    assert not any(threads.run(lambda ranks: work(ranks, 2)))


def test_the_least_divisor_of_all_regions_counts(threads: Threads) -> None:
    def work(ranks: Ranks) -> list[bool]:
        with _ONE_BY_ONE:
            model = nn.Linear(4, 6)
        each = {name: RegionSelector(params=(name,)) for name in ("weight", "bias")}
        layout, found = Whole(model, partition_parameters(model, each), ranks, V), []
        for divisors in ([1.0, 1.0], [1e-30, 1.0], [1.0, 1e-30]):
            with layout.step([(1.0, 1.0)] * V, frozenset({0, 1}), measure=False) as step:
                for microbatch in layout.mine:
                    with step.slot(microbatch) as slot:
                        slot.backward(model(torch.ones(4)).sum())
                step.root(torch.tensor(divisors, dtype=torch.float64))
            found.append(step.is_finite)
        return found

    assert threads.run(work) == [[True, False, False]] * threads.world


class Segments(nn.Module):
    """Used again within a reentrant checkpoint from some pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.is_used_again = nn.Linear(4, 4), False

    def forward(self, row: Tensor) -> Tensor:
        hidden: Tensor = self.first(row)
        return checkpoint(self.first, hidden, use_reentrant=True) if self.is_used_again else hidden  # type: ignore[no-any-return]


def _pass(layout: Whole, model: Segments, weight: float = 1.0, learns: Iterable[int] = (0, 1)) -> LayoutStep:
    with layout.step([(weight,)] * V, frozenset(learns), measure=False) as step:
        for microbatch in layout.mine:
            with step.slot(microbatch) as slot:
                if weight:
                    slot.backward(model(torch.ones(4)).sum())
        step.root(None)
    return step


@pytest.mark.parametrize("kind", [Whole, OptimizerSharded])
def test_a_gradient_that_comes_in_parts_after_the_first_look_is_refused(threads: Threads, kind: type[Whole]) -> None:
    """The bucket of its first part has left."""

    def work(ranks: Ranks) -> int:
        with _ONE_BY_ONE:
            model = Segments()
        layout = kind(model, partition_parameters(model), ranks, V)
        if isinstance(layout, OptimizerSharded):
            layout.rehome([AdamW(lr=1e-2).build([(p.name, p.tensor) for p in layout.parameters])])
        _pass(layout, model)
        assert ranks.num_early == 0
        _pass(layout, model)
        assert ranks.num_early == 1
        model.is_used_again = True
        with pytest.raises(PlanError, match=r"first\.(weight|bias) arrives in parts.*use_reentrant=False"):
            _pass(layout, model)
        return layout.ranks.rank

    assert threads.run(work) == list(range(threads.world))


def test_what_has_learnt_nothing_in_the_first_pass_is_looked_at_in_its_own_first_one() -> None:
    model = Segments()
    layout = Whole(model, partition_parameters(model), Ranks(), V)
    _pass(layout, model, weight=0.0)
    _pass(layout, model, learns=[1])
    model.is_used_again = True
    with pytest.raises(PlanError, match=r"first\.weight arrives in parts"):
        _pass(layout, model)


def test_nothing_leaves_before_it_was_looked_at_or_while_a_hook_may_change_it(threads: Threads) -> None:
    def work(ranks: Ranks) -> list[int]:
        with _ONE_BY_ONE:
            model = nn.Linear(4, 6)
        each = {name: RegionSelector(params=(name,)) for name in ("weight", "bias")}
        layout, found = Whole(model, partition_parameters(model, each), ranks, V), []

        def take(*weights: float) -> None:
            with layout.step([weights] * V, frozenset({0, 1}), measure=False) as step:
                for microbatch in layout.mine:
                    with step.slot(microbatch) as slot:
                        slot.backward(model(torch.ones(4)).sum())
                step.root(None)
            found.append(ranks.num_early)

        take(1.0, 0.0)
        take(1.0, 0.0)  # the whole bucket, of the region that was looked at
        take(1.0, 1.0)
        take(1.0, 1.0)
        hook = model.bias.register_post_accumulate_grad_hook(lambda _: None)
        take(1.0, 1.0)
        hook.remove()
        take(1.0, 1.0)
        return found

    assert threads.run(work) == [[0, 1, 1, 2, 2, 3]] * threads.world


def test_what_is_not_finite_on_one_rank_is_refused_on_all(threads: Threads) -> None:
    def spoilt(root: Pieces, value: float) -> Pieces:
        return root.map(lambda gradient: torch.full_like(gradient, value))

    def work(ranks: Ranks) -> list[str]:
        layout = _a_step(ranks, OptimizerSharded)
        nothing: Mapping[str, Tensor] = {p.name: p.tensor for p in layout.parameters}
        root = layout.gradients({name: layout._cut.piece(name, one.detach()) for name, one in nothing.items()})  # type: ignore[attr-defined]
        told = []
        for keeps_norms in (True, False):
            check = FiniteCheck(RunConfig(), torch.device("cpu"))
            check.keeps_norms = keeps_norms
            check.check(torch.tensor(1.0), 0, root)
            check.check(torch.tensor(1.0), 0, spoilt(root, 1e30))  # a norm beyond float32, of finite gradients
            try:
                check.check(torch.tensor(1.0), 1, spoilt(root, torch.nan) if ranks.rank == 1 else root)
            except DivergenceError as error:
                told.append(str(error)[:24])
        return told

    assert threads.run(work) == [["A gradient isn't finite "] * 2] * threads.world
