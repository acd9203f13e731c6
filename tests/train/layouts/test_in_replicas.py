"""Gradients of what a replica's ranks cut are put together once a step, or in backward where leaves are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.core.virtual_shards import VirtualShards
from cosmati.errors import PlanError
from cosmati.routing.regions import partition_parameters
from cosmati.train.direction_sketch import DirectionSketch
from cosmati.train.layout.in_replicas import InReplicas, Parts
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.ranks import Ranks

ROUTES = ((1.0,),) * 2


class SecondOfTwo:
    """The second of two ranks, the first of which has the same with the sign turned."""

    degree, place = 2, 1

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.asked: list[dict[int, int]] = []

    @contextmanager
    def putting_off(self, cut: dict[int, int]) -> Iterator[None]:
        self.asked.append(cut)
        yield

    def everyone(self, own: Tensor) -> list[Tensor]:
        self.sent.append(own)
        return [-own, own]


def layout_of(peers: SecondOfTwo) -> tuple[nn.Module, InReplicas]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2), nn.Linear(2, 2))
    cut = {"0.weight": 0, "2.weight": 1, "gone.weight": 0}
    parts = Parts(cast("ReplicaPeers", peers), cut, VirtualShards(2, peers), lambda _: cut, VirtualShards(2))
    return model, InReplicas(model, partition_parameters(model), Ranks(), len(ROUTES), parts)


def root_of(peers: SecondOfTwo, **looks: Any) -> dict[str, Tensor]:
    model, layout = layout_of(peers)
    learns = frozenset(range(len(layout.parameters)))
    rows = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    with layout.step(ROUTES, learns, **{"measure": False, **looks}) as step:
        for index in range(2):
            with step.slot(index) as slot:
                slot.backward(model(rows[index]).square().sum())
        return dict(step.root(None).tensors)


def test_parts_are_put_together_in_one_exchange() -> None:
    looked, peers = SecondOfTwo(), SecondOfTwo()
    whole, found = root_of(looked, measure=True), root_of(peers)
    assert not looked.sent  # each backward pass would have
    assert [one.numel() for one in peers.sent] == [12 + 6]
    assert [sorted(one.values()) for one in peers.asked] == [[0, 1]]
    assert not looked.asked
    for name, dim in (("0.weight", 0), ("2.weight", 1)):
        own = whole[name].chunk(2, dim)[1]
        assert torch.equal(found[name], torch.cat([-own, own], dim))
    for name in ("0.bias", "2.bias", "3.weight", "3.bias"):
        assert torch.equal(found[name], whole[name])


def test_nothing_is_put_off_where_directions_are_asked_for() -> None:
    peers = SecondOfTwo()
    root_of(peers, sketch=DirectionSketch(0))
    assert not peers.sent
    assert not peers.asked


def test_where_nothing_that_is_cut_learns_nothing_is_sent() -> None:
    peers = SecondOfTwo()
    model, layout = layout_of(peers)
    last = frozenset({len(layout.parameters) - 1})
    with layout.step(ROUTES, last, measure=False) as step:
        for index in range(2):
            with step.slot(index) as slot:
                slot.backward(model(torch.ones(1, 4)).sum())
        assert set(step.root(None).tensors) == {"3.bias"}
    assert not peers.sent


@pytest.fixture
def three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_initialized": True, "get_world_size": 3, "get_rank": 0}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)


def test_a_number_of_ranks_that_is_no_multiple_is_refused(three_ranks: None) -> None:
    with pytest.raises(PlanError, match="3 ranks can't be replicas of tensor_parallel=2 ranks each"):
        Ranks(2)


def test_replicas_share_microbatches_out() -> None:
    ranks = Ranks()
    ranks.world, ranks.rank, ranks.degree = 6, 5, 2
    assert (ranks.num_replicas, ranks.replica) == (3, 2)
    assert ranks.slots(6) == [[0, 2, 4], [1, 3, 5]]
    assert ranks.mine(6) == [4, 5]
    with pytest.raises(
        PlanError, match=r"3 replicas of 2 ranks can't share V = 4 .* number of replicas that divides V"
    ):
        ranks.mine(4)
