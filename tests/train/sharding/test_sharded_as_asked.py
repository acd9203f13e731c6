"""A run is sharded as it's asked: nothing, its optimizers, or all that is known to work, and what isn't is named."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmati import RunConfig
from cosmati.core.isolated import Isolated
from cosmati.errors import PlanError
from cosmati.methods import EMA, StochasticDepth
from cosmati.optim import SGD, AdamW, Muon
from cosmati.train import sharding
from cosmati.train.assembly import ScheduledOptimizer, Turn
from cosmati.train.layout import sharded
from cosmati.train.sharding import _BY_ELEMENT, _BY_MATRIX, _METHODS, sharded_as_asked
from tests.train.hand_made import REGIONS

BOUND = AdamW(lr=0.1, weight_decay=0.0, hyperball=True)
MODEL_PARTS = ("0.weight", "0.bias", "1.weight")


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))


def loss(model: nn.Module, data: Any) -> torch.Tensor:
    return torch.zeros(())


class Recorded:
    """A layout that notes how it was made and what is asked of it."""

    made: list[Recorded]

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given, self.named = given, named
        self.rehomed: list[Any] = []
        self.staged: list[Any] = []
        self.parameters = [SimpleNamespace(name=name) for name in MODEL_PARTS]
        self.lockstep = SimpleNamespace(together=nullcontext)
        type(self).made.append(self)

    def rehome(self, optimizers: Any) -> None:
        self.rehomed.extend(optimizers)

    def stage(self, names: Any) -> None:
        self.staged.append(names)

    def pieces(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, nn.Parameter(torch.ones(2, 2))) for name in MODEL_PARTS]


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    Recorded.made = []
    monkeypatch.setattr(sharding, "OptimizerSharded", Recorded)
    monkeypatch.setattr(sharded, "Sharded", Recorded)
    return Recorded


class Asked:
    """A run that asks for a sharding."""

    def __init__(self, world: int = 1, num_microbatches: int = 4, packed: bool = False, **settings: Any) -> None:
        self.model: Any = settings.pop("model", None) or model_of()
        self.ranks: Any = SimpleNamespace(
            is_parallel=world > 1, world=world, has_met=settings.pop("has_met", False), in_lockstep=False, together=None
        )
        optimizers = settings.pop("optimizers", [SGD(lr=0.1)])
        self.given: Any = SimpleNamespace(
            loss=settings.pop("loss", loss), methods=settings.pop("methods", []), optimizers=optimizers,
            config=RunConfig(budget="1ba", **settings), model=self.model, policy=None,
        )  # fmt: skip
        self.plan: Any = SimpleNamespace(facts=SimpleNamespace(num_microbatches=num_microbatches, packed=packed))
        built = [torch.optim.SGD(self.model.parameters(), lr=0.1) for _ in optimizers]
        scheduled = tuple(ScheduledOptimizer(one, None, (0.1,), frozenset({2, 0})) for one in built)
        self.turns = (Turn("turn", loss, {0: "0.weight"}, scheduled), Turn("again", loss, {}, scheduled))
        self.layout: Any = object()

    def __call__(self) -> tuple[Any, Any]:
        return sharded_as_asked(self.given, self.model, REGIONS, self.ranks, self.plan, self.layout, self.turns)


def refused(**given: Any) -> str:
    with pytest.raises(PlanError) as caught:
        Asked(**{"sharding": "full", **given})()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["replicated", "optimizer", "full"])
def test_on_one_rank_the_layout_and_turns_stay(kind: str) -> None:
    asked = Asked(sharding=kind)
    layout, turns = asked()
    assert layout is asked.layout
    assert turns is asked.turns
    assert Recorded.made == []


def test_replicated_on_several_ranks_is_as_planned() -> None:
    asked = Asked(2)
    assert asked() == (asked.layout, asked.turns)


@pytest.mark.parametrize("gather", ["float32", "bfloat16"])
def test_optimizers_are_shared_out_each_once(gather: str) -> None:
    asked = Asked(2, sharding="optimizer", gather_precision=gather, optimizers=[SGD(lr=0.1), SGD(lr=0.2)])
    layout, turns = asked()
    assert turns is asked.turns
    assert layout.given == (asked.model, REGIONS, asked.ranks, 4, None)
    assert layout.named == {"rounds": gather == "bfloat16"}
    assert layout.rehomed == [one.optimizer for one in asked.turns[0].optimizers]


def test_an_optimizer_that_has_begun_is_refused_on_one_rank_too() -> None:
    asked = Asked(sharding="optimizer")
    asked.turns[0].optimizers[0].optimizer.state[asked.model[0].weight] = {"x": 1}
    with pytest.raises(PlanError, match="SGD has state already"):
        asked()


@pytest.mark.parametrize("kind", ["replicated", "optimizer", "full"])
def test_rounded_weights_are_of_several_microbatches(kind: str) -> None:
    with pytest.raises(PlanError, match="V = 1 microbatch a step runs on one rank"):
        Asked(num_microbatches=1, sharding=kind, gather_precision="bfloat16")()
    Asked(num_microbatches=2, sharding=kind, gather_precision="bfloat16")()
    Asked(num_microbatches=1, sharding=kind)()


@pytest.mark.parametrize("kind", ["optimizer", "full"])
def test_shared_memory_is_refused_where_anything_is_cut(kind: str) -> None:
    model = model_of()
    model[1].weight = nn.Parameter(model[0].weight.detach()[:2])
    asked = Asked(sharding=kind, model=model)
    with pytest.raises(PlanError, match="share memory"):
        asked()
    Asked(model=model)()


@pytest.mark.parametrize(("world", "shard_ranks", "num"), [(2, None, 2), (4, None, 4), (4, 2, 2), (4, 8, 4), (2, 2, 2)])
def test_a_copy_lies_on_as_many_ranks_as_asked_or_as_there_are(world: int, shard_ranks: Any, num: int) -> None:
    asked = Asked(world, sharding="full", shard_ranks=shard_ranks, gather_precision="bfloat16")
    layout, turns = asked()
    assert layout.given == (asked.model, REGIONS, asked.ranks, 4, num)
    assert layout.named == {"rounds": True}
    assert asked.ranks.in_lockstep is True
    assert asked.ranks.together is nullcontext
    assert turns[0].optimizers[0] is turns[1].optimizers[0]
    built = turns[0].optimizers[0].optimizer
    assert built is not asked.turns[0].optimizers[0].optimizer
    assert built.holds_pieces is True
    assert len([p for group in built.param_groups for p in group["params"]]) == 2
    assert (turns[0].name, turns[1].name, turns[0].optimizers[0].base_rates) == ("turn", "again", (0.1,))


@pytest.mark.parametrize(
    ("optimizer", "is_staged"),
    [
        (SGD(lr=0.1), False),
        (Muon(lr=0.1), True),
        (AdamW(lr=0.1), False),
        (AdamW(lr=0.1, weight_decay=0.0, hyperball=True), True),
    ],
)
def test_whole_matrices_are_staged_for_those_that_need_them(optimizer: Any, is_staged: bool) -> None:
    layout, _ = Asked(2, sharding="full", optimizers=[optimizer])()
    assert layout.staged == ([["0.weight", "1.weight"]] if is_staged else [])


class Own(AdamW):
    """Somebody's."""


class Blocks(nn.Module):
    def __init__(self, *, hooked: str | None = None) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 2)
        if hooked:
            getattr(self.blocks[1], hooked)(lambda *_: None)
        self.head.register_forward_hook(lambda *_: None)


ALONE = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), Isolated("a"))
HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
COMPILED = "compile_blocks=True of blocks that have hooks"
UNTRIED: list[tuple[dict[str, Any], str]] = [
    *(({"model": Blocks(hooked=one), "compile_blocks": True}, COMPILED) for one in HOOKS),
    ({"entropy_every": 2}, "entropy_every"),
    ({"loss": [loss]}, "several sub-steps"),
    ({"model": ALONE}, "modules of one class alone"),
    ({"packed": True}, "packs under a policy"),
    ({"has_met": True}, "collectives in model or loss"),
    ({"methods": [EMA(half_life="1ba"), StochasticDepth(target_layer_name="Linear")]}, "StochasticDepth"),
    ({"optimizers": [Own(lr=0.1)]}, "Own"),
    ({"optimizers": [type("AdamW", (AdamW,), {"__module__": "mine"})(lr=0.1)]}, "AdamW"),
    ({"optimizers": [AdamW(lr=0.1, fused=True)]},
     "AdamW(fused=True), whose bits follow from where a parameter is cut"),
    ({"optimizers": [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]},
     "an optimizer that is already built (SGD: give cosmati.optim's configuration)"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "named"), UNTRIED, ids=[named[:30] + str(i) for i, (_, named) in enumerate(UNTRIED)])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_untried_under_full_sharding_is_named(world: int, given: dict[str, Any], named: str) -> None:
    message = refused(world=world, **given)
    assert message.startswith(f"sharding='full' hasn't been tried with {named}. Leave that out,")
    Asked(**{**given, "sharding": "replicated"})()


def test_all_that_is_untried_is_named_once() -> None:
    methods = [StochasticDepth(target_layer_name="Linear")] * 2
    message = refused(methods=methods, entropy_every=1, packed=True, model=nn.Linear(2, 2, device="meta"))
    assert "tried with device meta; entropy_every; packs under a policy; StochasticDepth. Leave" in message


def test_what_has_been_tried_is_let_be() -> None:
    Asked(sharding="full", model=Blocks(), compile_blocks=True)()
    Asked(sharding="full", model=Blocks(hooked=HOOKS[0]))()
    for name in _METHODS:
        asked = Asked(sharding="full")
        asked.given.methods = [type(name, (), {"__module__": "cosmati.methods"})()]
        asked()
    assert {"EMA", "SAM", "MixUp"} <= {*_METHODS}
    assert "AdamW" in _BY_ELEMENT
    assert "Muon" in _BY_MATRIX


def test_what_cannot_be_cut_is_refused_on_one_rank_too() -> None:
    model = model_of()
    model.register_parameter("own", nn.Parameter(torch.tensor(1.0)))
    assert "own is a scalar" in refused(model=model)


@pytest.mark.parametrize("kind", ["replicated", "optimizer"])
def test_parts_that_a_replicas_ranks_share_go_to_the_layout(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    parts, asked = object(), Asked(2, sharding=kind, packed=True)
    told: list[Any] = []
    monkeypatch.setattr(sharding, "InReplicas", Recorded)
    monkeypatch.setattr(sharding, "share_parts", lambda *given, **named: told.append((given, named)) or parts)
    layout, turns = asked()
    assert told == [((asked.given, asked.model, asked.ranks), {"packed": True})]
    assert layout.given == (asked.model, REGIONS, asked.ranks, 4, parts)
    assert turns is asked.turns
