"""Ranks share parts of products where that was asked for, has been tried, and the model says which are cut."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.isolated import Isolated
from cosmati.core.loss import LanguageModel
from cosmati.core.parallel_styles import StyledShards
from cosmati.core.plan import Promise
from cosmati.core.virtual_shards import Alone, VirtualShards
from cosmati.errors import PlanError
from cosmati.train.config import RunConfig
from cosmati.train.layout.peers import ReplicaPeers
from cosmati.train.ranks import Ranks
from cosmati.train.virtual_shards import (
    _checked,
    _is_cut_by_styles,
    _offered_by,
    _refuse_untried,
    in_parts,
    share_parts,
)

STYLES = {"up": "colwise", "down": "rowwise"}
OBJECTIVE = LanguageModel(9)
TRIED = ("EMA", "GradientClipping", "LabelSmoothing", "LayerFreezing", "SAM", "SWA")


class Cut(nn.Module):
    """Two layers that are cut, and a third that isn't; it keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(2, 8, bias=False), nn.Linear(8, 2, bias=False), nn.Linear(2, 3)
        self.asked: list[VirtualShards | None] = []

    def compute_in_parts(self, shards: VirtualShards | None) -> Mapping[str, int]:
        self.asked.append(shards)
        return {"up.weight": 0, "down.weight": -1, "nowhere.weight": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(self.up(x)))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """The same, which only others can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(2, 8, bias=False), nn.Linear(8, 2, bias=False), nn.Linear(2, 3)


def config_of(**changed: Any) -> RunConfig:
    return RunConfig(**{"budget": "2ba", "num_microbatches": 2, **changed})


def given_of(config: RunConfig, *methods: object, loss: Any = OBJECTIVE) -> Any:
    return SimpleNamespace(config=config, methods=methods, loss=loss)


def ranks_of(degree: int, rank: int = 0) -> Ranks:
    ranks = Ranks()
    ranks.degree, ranks.rank = degree, rank
    return ranks


class Promises:
    """A plan that holds some promises and notes which are taken back."""

    def __init__(self, *held: Promise) -> None:
        self.held, self.withdrawn = held, list[tuple[Promise, str]]()

    def holds(self, promise: Promise) -> bool:
        return promise in self.held

    def withdraw(self, promise: Promise, because: str) -> Promises:
        self.withdrawn.append((promise, because))
        return self


@pytest.mark.parametrize(
    ("changed", "withdrawn", "because"),
    [
        ({}, (), ""),
        ({"parallel_styles": STYLES}, (), ""),
        ({"virtual_shards": 4}, (Promise.PARITY,), "virtual_shards=4 sums the parts of each product in a tree"),
        ({"virtual_shards": 4, "tensor_parallel": 2}, (Promise.PARITY,), "virtual_shards=4 sums"),
        (
            {"parallel_styles": STYLES, "tensor_parallel": 2},
            (Promise.ELASTIC, Promise.PARITY, Promise.REPLAYABLE),
            "parallel_styles cut products over tensor_parallel=2 ranks: another number of",
        ),
    ],
)
def test_promises_that_hold_are_withdrawn_with_the_reason(
    changed: dict[str, Any], withdrawn: tuple[Promise, ...], because: str
) -> None:
    every, none = Promises(*Promise), Promises()
    one, other = Promises(Promise.PARITY), config_of(**changed)
    for plan in (every, none, one):
        as_plan: Any = plan
        assert in_parts(as_plan, other) is as_plan
    assert tuple(promise for promise, _ in every.withdrawn) == withdrawn
    assert all(told.startswith(because) for _, told in every.withdrawn)
    assert none.withdrawn == []
    assert [promise for promise, _ in one.withdrawn] == ([Promise.PARITY] if withdrawn else [])
    assert _is_cut_by_styles(other) == (len(withdrawn) == 3)


def test_nothing_is_shared_where_nothing_is_asked_for() -> None:
    model, ranks = Cut(), ranks_of(2)
    for config in (config_of(), config_of(parallel_styles=STYLES)):
        assert share_parts(given_of(config, object()), model, ranks, packed=True) is None
    assert model.asked == []
    assert not ranks.in_lockstep


@pytest.mark.parametrize("degree", [1, 2])
def test_a_model_that_cuts_itself_is_told_of_the_parts(degree: int) -> None:
    model, ranks = Cut(), ranks_of(degree, rank=3)
    found = share_parts(given_of(config_of(virtual_shards=4)), model, ranks, packed=False)
    (shards,) = model.asked
    assert isinstance(shards, VirtualShards)
    assert (shards.number, shards.called, type(shards)) == (4, "virtual_shards=4", VirtualShards)
    assert ranks.in_lockstep == (degree > 1)
    if degree == 1:
        assert found is None
        assert isinstance(shards.peers, Alone)
        return
    assert found is not None
    assert isinstance(shards.peers, ReplicaPeers)
    assert (shards.own, found.peers) == (range(2, 4), shards.peers)
    assert found.shards is shards
    assert found.cut == {"up.weight": 0, "down.weight": -1}
    assert found.alone is not None
    assert (found.alone.number, type(found.alone.peers)) == (4, Alone)
    found.compute(None)
    assert model.asked == [shards, None]


@pytest.mark.parametrize("degree", [1, 2])
def test_a_model_that_is_cut_by_styles_is_cut_where_several_ranks_share_it(degree: int) -> None:
    model, ranks = Plain(), ranks_of(degree, rank=1)
    config = config_of(parallel_styles=STYLES, tensor_parallel=2)
    found = share_parts(given_of(config), model, ranks, packed=False)
    if degree == 1:
        assert found is None
        assert type(model.up) is nn.Linear
        return
    assert found is not None
    assert type(model.up) is not nn.Linear
    assert isinstance(found.shards, StyledShards)
    assert (found.shards.number, found.shards.peers, found.alone) == (2, found.peers, None)
    assert (found.peers.degree, found.peers.place) == (2, 1)
    assert found.cut == {"up.weight": 0, "down.weight": 1}
    found.compute(None)
    assert type(model.up) is nn.Linear


def test_a_lockstep_that_was_stays() -> None:
    ranks = ranks_of(1)
    ranks.in_lockstep = True
    share_parts(given_of(config_of(virtual_shards=2)), Cut(), ranks, packed=False)
    assert ranks.in_lockstep


def test_only_a_models_own_class_offers_parts() -> None:
    model = Cut()
    assert _offered_by(model, 4) == model.compute_in_parts
    lent = Plain()
    vars(lent)["compute_in_parts"] = model.compute_in_parts
    for one in (Plain(), lent):
        with pytest.raises(PlanError, match="Plain can't compute its products in virtual_shards=8: it has no `compu"):
            _offered_by(one, 8)


@pytest.mark.parametrize("told", [None, ["up.weight"], {"up.weight": "0"}, {"up.weight": 0, "down.weight": 1.0}])
def test_what_is_no_mapping_of_dimensions_is_refused(told: object) -> None:
    with pytest.raises(PlanError, match=r"Cut\.compute_in_parts returned .*Return the names of the parameters"):
        _checked(Cut(), VirtualShards(2), told)


def test_parameters_that_are_cut_can_be_and_have_no_hooks() -> None:
    model, shards = Cut(), VirtualShards(4)
    told = {"down.weight": 1, "gone": 7, "up.weight": 0}
    model.out.weight.register_hook(lambda _: None)
    assert list(_checked(model, shards, told).items()) == [("up.weight", 0), ("down.weight", 1)]
    assert _checked(model, shards, {}) == {}
    with pytest.raises(PlanError, match=r"out\.weight of shape \(3, 2\) can't be cut along dimension 0"):
        _checked(model, shards, {"out.weight": 0})
    model.up.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(PlanError, match=r"up\.weight has hooks, and with virtual_shards=4 ranks have a part"):
        _checked(model, shards, told)
    model.down.weight.register_hook(lambda _: None)
    with pytest.raises(PlanError, match=r"down\.weight has hooks"):
        _checked(model, shards, {"down.weight": 1})


def refused(model: nn.Module | None = None, *methods: object, **changed: Any) -> list[str]:
    packed, met = changed.pop("packed", False), changed.pop("met", False)
    loss = changed.pop("loss", OBJECTIVE)
    ranks = Ranks()
    ranks.has_met = met
    try:
        _refuse_untried(
            given_of(config_of(**changed), *methods, loss=loss), model or Cut(), ranks, "n=3", packed=packed
        )
    except PlanError as error:
        head, _, rest = str(error).partition(". Leave that out, or n and tensor_parallel.")
        assert not rest
        return head.removeprefix("n=3 hasn't been tried with ").split("; ")
    return []


def named(name: str) -> object:
    return type(name, (), {"__module__": "cosmati.methods"})()


def test_what_has_not_been_tried_is_named_once_and_in_order() -> None:
    compiled = Cut()
    compiled.down._compiled_call_impl = compiled.forward
    alone = Cut()
    alone.own = Isolated("open")
    assert refused() == refused(None, *map(named, TRIED)) == []
    assert refused(Cut().to("meta")) == ["device meta"]
    assert refused(sharding="full") == ["sharding='full'"]
    assert refused(gather_precision="bfloat16", sharding="full")[1:] == ["gather_precision='bfloat16'"]
    assert refused(compile_blocks=True) == refused(compiled, compile_blocks=True) == ["compile_blocks=True"]
    assert refused(compiled) == ["compiled modules"]
    assert refused(entropy_every=2) == ["entropy_every"]
    assert refused(loss=[named("SubStep")]) == ["several sub-steps"]
    assert refused(alone) == ["modules of one class alone"]
    assert refused(packed=True) == ["packs under a policy"]
    assert refused(met=True) == ["collectives in model or loss"]
    assert refused(None, named("MixUp"), named("EMA"), named("MixUp")) == ["MixUp"]
    every = refused(alone.to("meta"), named("MixUp"), packed=True, met=True, entropy_every=1, loss=[named("SubStep")])
    assert every == [
        "device meta",
        "entropy_every",
        "several sub-steps",
        "modules of one class alone",
        "packs under a policy",
        "collectives in model or loss",
        "MixUp",
    ]


def test_each_way_of_cutting_is_told_by_its_own_name() -> None:
    styles = config_of(parallel_styles=STYLES, tensor_parallel=2)
    for config, told in ((styles, "parallel_styles hasn't"), (config_of(virtual_shards=4), "virtual_shards=4 hasn't")):
        with pytest.raises(
            PlanError, match=f"^{told} been tried with packs under a policy. Leave that out, or "
        ) as one:
            share_parts(given_of(config), Cut(), ranks_of(1), packed=True)
        assert str(one.value).endswith(f"out, or {told.partition(' ')[0].partition('=')[0]} and tensor_parallel.")
        assert (
            share_parts(given_of(config), Cut() if config.virtual_shards else Plain(), ranks_of(1), packed=False)
            is None
        )
