"""What ranks send each other of a step's sums: no more than a ring does, nothing of memory that nobody has written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.train.layout import exchange
from cosmati.train.layout.exchange import RankSum, sum_type
from cosmati.train.layout.piece import by_owner, cut, evenly, in_buckets
from cosmati.train.ranks import Ranks
from tests.train.thread_group import on_threads

V = 4
SIZES = (32, 16, 5, 0)


def gradient(microbatch: int, index: int) -> Tensor | None:
    """None of the last but one parameter's on half of the ranks, none of the first one's on the others."""
    if (index == 0 and microbatch < 2) or (index == 2 and microbatch >= 2):
        return None
    generator = torch.Generator().manual_seed(10 * microbatch + index)
    found = torch.randn(SIZES[index], generator=generator)
    found[::3] = -0.0
    return found


def pairwise(values: Sequence[Tensor | None]) -> Tensor | None:
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b if a is None else a if b is None else a + b for a, b in pairs]
    return values[0]


def folded(ranks: Ranks, *, is_strided: bool, keeps_share: bool = False, limit: int = 16) -> tuple[RankSum, Any]:
    ranks.share_out(V, is_strided=is_strided)
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    pieces = cut(SIZES, {0}, (), ranks.world, 16)
    groups = in_buckets(SIZES, limit)
    buckets = [
        by_owner(group, pieces, ranks.world, 16) if keeps_share else evenly(group, SIZES, ranks.world, 16)
        for group in groups
    ]
    total = RankSum(ranks, parameters, V, buckets, keeps_share=keeps_share)
    for place, m in enumerate(ranks.mine(V)):
        assert total.is_at_last == (place == V // ranks.world - 1)
        total.lend()
        for index, parameter in enumerate(parameters):
            own = gradient(m, index)
            if own is not None:
                parameter.grad = own if parameter.grad is None else parameter.grad.add_(own)
        total.fold({})
    return total, pieces


def same_bits(own: Tensor, other: Tensor) -> bool:
    return torch.equal(own.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("keeps_share", [False, True])
def test_sums_have_the_bits_of_the_tree_whatever_memory_held(
    world: int, is_strided: bool, keeps_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.empty

    def used(*size: Any, **how: Any) -> Tensor:
        found: Tensor = plain(*size, **how)
        return found.fill_(7.0) if found.is_floating_point() and not found.is_meta else found

    monkeypatch.setattr(exchange.torch, "empty", used)
    sums = [pairwise([gradient(m, index) for m in range(V)]) for index in range(len(SIZES))]

    def work(ranks: Ranks) -> None:
        total, pieces = folded(ranks, is_strided=is_strided, keeps_share=keeps_share)
        assert total.bound == torch.inf
        root = total.root()
        assert total.bound >= max(float(one.abs().max()) for one in root if one is not None and one.numel())
        assert total.bound < 500
        for index, wanted in enumerate(sums):
            found = root[index]
            assert found is not None
            assert wanted is not None
            if not keeps_share:
                assert same_bits(found, wanted)
                continue
            own = [p for p in pieces if p.parameter == index and p.owner == ranks.rank]
            piece = wanted[own[0].start : own[0].stop] if own else wanted[:0]
            assert same_bits(found, piece)

    on_threads(world, work)


@pytest.mark.parametrize(
    ("world", "keeps_share", "gathers"), [(2, False, 0), (2, True, 0), (4, False, 4), (4, True, 0)]
)
def test_two_ranks_swap_all_and_more_gather_their_shares(
    world: int, keeps_share: bool, gathers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sent = Counter[str](), Counter[int]()
    gather, swap = exchange.all_gather, dist.all_to_all_single

    def gathered(*given: Any, **how: Any) -> Any:
        made[f"gather {dist.get_rank()}"] += 1
        return gather(*given, **how)

    def swapped(received: Tensor, flat: Tensor, got: list[int], lengths: list[int], **how: Any) -> Any:
        rank = dist.get_rank()
        made[f"swap {rank}"] += 1
        sent[rank] += sum(lengths) - lengths[rank]
        assert len(received) == sum(got)
        return swap(received, flat, got, lengths, **how)

    monkeypatch.setattr(exchange, "all_gather", gathered)
    monkeypatch.setattr(exchange.dist, "all_to_all_single", swapped)
    on_threads(world, lambda ranks: folded(ranks, is_strided=False, keeps_share=keeps_share, limit=20)[0].root())
    num_buckets = len(in_buckets(SIZES, 20))
    for rank in range(world):
        assert made[f"gather {rank}"] == (num_buckets if gathers else 0)
        assert made[f"swap {rank}"] == num_buckets
        assert sent[rank] <= sum(-(-size // (16 * world)) * 16 * world for size in SIZES)


def test_where_nobody_has_a_gradient_the_bound_is_zero() -> None:
    def work(ranks: Ranks) -> Any:
        parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
        total = RankSum(ranks, parameters, V, [evenly(range(4), SIZES, 2, 16)])
        for _ in ranks.mine(V):
            total.lend()
            total.fold({})
        root, bound = total.root(), total.bound
        total.close()
        with pytest.raises(AssertionError, match="a leaf of each of this rank's microbatches comes first"):
            total.root()
        return root, bound

    assert on_threads(2, work) == [([None] * 4, 0.0)] * 2


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ((torch.float32,), torch.float32),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float64, torch.float64), torch.float64),
        ((torch.float64, torch.float32), "Some parameters are float64 and others aren't"),
        ((torch.float32, torch.complex64), "Some parameters are complex: several ranks sum real gradients"),
        ((torch.complex128,), "Some parameters are complex"),
    ],
)
def test_gradients_are_summed_in_one_type(kinds: Sequence[torch.dtype], found: object) -> None:
    tensors = [torch.zeros(1, dtype=kind) for kind in kinds]
    if isinstance(found, str):
        with pytest.raises(PlanError, match=found):
            sum_type(tensors)
    else:
        assert sum_type(tensors) is found
