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
    return taken(*layout_of(peers), **looks)


def taken(model: nn.Module, layout: InReplicas, **looks: Any) -> dict[str, Tensor]:
    """Return what a step over two microbatches comes to."""
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


@pytest.mark.parametrize("looks", [{"measure": True}, {"sketch": DirectionSketch(0)}])
def test_after_a_step_that_put_off_one_that_does_not_sends_nothing(looks: dict[str, Any]) -> None:
    peers = SecondOfTwo()
    model, layout = layout_of(peers)
    whole = taken(model, layout, **looks)
    put_off = taken(model, layout)
    assert (len(peers.sent), len(peers.asked)) == (1, 1)
    again = taken(model, layout, **looks)
    assert (len(peers.sent), len(peers.asked)) == (1, 1)
    assert all(torch.equal(again[name], one) for name, one in whole.items())
    last = taken(model, layout)
    assert all(torch.equal(last[name], one) for name, one in put_off.items())
    assert (len(peers.sent), len(peers.asked)) == (2, 2)


def test_gradients_are_put_together_within_a_step_alone_also_after_one_that_failed() -> None:
    peers = SecondOfTwo()
    _, layout = layout_of(peers)
    whole = {p.name: torch.ones_like(p.tensor) for p in layout.parameters}

    def fails() -> None:
        assert not torch.equal(layout.gradients(whole).tensors["0.weight"], whole["0.weight"])
        assert layout.put_together({"0.bias": whole["0.bias"]}) == {"0.bias": whole["0.bias"]}
        raise ZeroDivisionError

    assert layout.put_together(whole) is whole
    with pytest.raises(ZeroDivisionError), layout.step(ROUTES, frozenset({0}), measure=False):
        fails()
    assert layout.put_together(whole) is whole
    assert dict(layout.gradients(whole).tensors) == whole
    assert len(peers.sent) == 1


def test_a_rank_that_is_a_replica_by_itself_has_its_gradients_whole() -> None:
    model = nn.Linear(4, 2)
    layout = InReplicas(model, partition_parameters(model), Ranks(), len(ROUTES), None)
    own = {"weight": torch.ones(2, 4)}
    with layout.step(ROUTES, frozenset({0, 1}), measure=False):
        assert layout.put_together(own) is own


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
