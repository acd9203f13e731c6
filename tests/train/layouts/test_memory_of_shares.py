"""A rank's share of a sum keeps no memory of what other ranks have sent, unless it's about to be gathered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.train.layout.exchange import RankSum
from cosmati.train.layout.piece import by_owner, cut, evenly
from cosmati.train.ranks import Ranks

SIZES = (128, 64)
FLOAT = torch.float32.itemsize


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was waited for, in a group each of whose ranks has what the first one has."""
    waited: list[str] = []

    def all_to_all(output: Tensor, own: Tensor, received: list[int], _: list[int], **more: Any) -> Any:
        # What a rank sends itself lies first: this one has the first place.
        parts = len([one for one in received if one])
        later = own if len(own) == len(output) and parts == 1 else own[: received[0]].repeat(parts)

        def arrive() -> None:
            waited.append("sent")
            output.copy_(later)

        return SimpleNamespace(wait=arrive)

    def all_reduce(_: Tensor, **more: Any) -> Any:
        return SimpleNamespace(wait=lambda: waited.append("told"))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return waited


def summed(world: int, num_microbatches: int, *, keeps_share: bool) -> RankSum:
    """Return a sum of which this rank, the first one, has folded all its own leaves but the last: each is of ones."""
    ranks = Ranks()
    ranks.world, ranks.is_parallel, ranks.run = world, True, 1
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    pieces = cut(SIZES, {0, 1}, [], world, 16)
    bucket = by_owner((0, 1), pieces, world, 16) if keeps_share else evenly((0, 1), SIZES, world, 16)
    total = RankSum(ranks, parameters, num_microbatches, [bucket], keeps_share=keeps_share)
    for _ in range(num_microbatches // world - 1):
        fold(total)
    return total


def fold(total: RankSum) -> None:
    for parameter in total._tensors:
        parameter.grad = torch.ones_like(parameter)
    total.fold({})


@pytest.mark.parametrize("keeps_share", [False, True])
def test_a_share_that_waits_for_the_next_run_has_memory_of_its_own(arrivals: list[str], keeps_share: bool) -> None:
    total = summed(4, 8, keeps_share=keeps_share)
    assert arrivals == ["sent"]
    assert total._sent == []
    (tree,) = total._shares
    (waiting,) = tree.waiting()
    assert waiting.tolist() == [4.0] * (sum(SIZES) // 4)
    assert waiting.untyped_storage().nbytes() == waiting.nbytes == FLOAT * sum(SIZES) // 4


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("num_runs", [1, 2, 4])
def test_a_share_of_a_gradient_has_the_memory_of_the_share(arrivals: list[str], world: int, num_runs: int) -> None:
    total = summed(world, num_runs * world, keeps_share=True)
    fold(total)
    shares = total.root()
    assert arrivals == ["sent"] * num_runs + ["told"]
    for share, size in zip(shares, SIZES, strict=True):
        assert share is not None
        assert share.tolist() == [float(num_runs * world)] * (size // world)
        assert share.untyped_storage().nbytes() == FLOAT * sum(SIZES) // world
    assert num_runs * world <= total.bound <= 4 * num_runs * world


def test_what_was_swapped_is_added_where_it_was_sent_from(arrivals: list[str]) -> None:
    """Two ranks that keep everything send each other all: nothing is gathered, or copied."""
    total = summed(2, 4, keeps_share=False)
    (waiting,) = total._shares[0].waiting()
    assert waiting.tolist() == [2.0] * sum(SIZES)
    fold(total)
    ((flat, _, _),) = total._sent
    landed = [(one is flat, tree) for one, tree in total._land(is_last=True)]
    assert landed == [(True, total._shares[0])]
    assert total._shares[0].root() is waiting
    assert waiting.tolist() == [4.0] * sum(SIZES)
    assert total._sent == []
    assert arrivals == ["sent", "sent"]


@pytest.mark.parametrize("is_last", [False, True])
def test_what_is_about_to_be_gathered_is_added_where_it_arrived(arrivals: list[str], is_last: bool) -> None:
    total = summed(4, 4, keeps_share=False)
    fold(total)
    ((flat, received, _),) = total._sent
    ((found, tree),) = list(total._land(is_last=is_last))
    assert found is flat
    share = tree.root()
    assert (share.data_ptr() == received.data_ptr()) == is_last
    assert share.tolist() == [4.0] * (sum(SIZES) // 4)
    assert arrivals == ["sent"]
