"""What nobody has tried under full sharding is refused by name, at any number of ranks; the settings take the word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.clock import Clock
from cosmati.core.loss import Classification
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.methods import EMA, StochasticDepth
from cosmati.optim import AdamW
from cosmati.train.config import RunConfig
from cosmati.train.layout.shard_cut import refuse_uncuttable
from cosmati.train.observers.monitors.norms import GradientNorms
from cosmati.train.trainer import Trainer


def planned(**changed: Any) -> Trainer:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    for name in ("own", "other"):
        if (value := changed.pop(name, None)) is not None:
            model.register_parameter(name, value if isinstance(value, nn.Parameter) else nn.Parameter(value))
    optimizers = changed.pop("optimizers", AdamW(lr=1e-2))
    optimizers = optimizers(model) if callable(optimizers) else optimizers
    methods = changed.pop("methods", [])
    config = RunConfig(budget="1ba", num_microbatches=2, **{"sharding": "full", **changed})
    data = InMemory((torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), 8)
    return Trainer(model, Classification(3), data, optimizers=optimizers, methods=methods, config=config)


class Mine(AdamW):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"entropy_every": 1}, "entropy_every"),
        ({"optimizers": AdamW(lr=1e-2, fused=True)}, r"AdamW\(fused=True\)"),
        ({"optimizers": Mine(lr=1e-2)}, r"Mine\."),
        ({"optimizers": type("AdamW", (AdamW,), {})(lr=1e-2)}, r"AdamW\."),
        ({"optimizers": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)}, "already built"),
        ({"methods": [StochasticDepth(target_layer_name="Linear")]}, "StochasticDepth"),
        ({"methods": [type("EMA", (EMA,), {})(half_life="2ba")]}, r"EMA\."),
    ],
)
def test_what_is_not_tried_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=f"(?s)sharding='full' hasn't been tried with.*{named}"):
        planned(**changed)


def test_blocks_are_compiled_beside_their_hooks_and_others_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    data = InMemory((torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), 8)
    config = RunConfig(budget="1ba", num_microbatches=2, sharding="full", compile_blocks=True)
    model[2].register_forward_hook(lambda *_: None)
    with pytest.raises(PlanError, match="compile_blocks=True of blocks that have hooks"):
        Trainer(model, Classification(3), data, optimizers=AdamW(lr=1e-2), config=config)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (torch.tensor(1.0), "own is a scalar"),
        (torch.zeros(0, 3), "own has no elements"),
        (torch.zeros(3, 0), "own has no elements"),
        (torch.zeros(3, 2).t(), "own isn't contiguous"),
        (torch.zeros(7)[1:].view(3, 2), "own begins between multiples of 16 bytes in memory"),
        (torch.zeros(2, dtype=torch.bfloat16), "this one has torch.bfloat16, torch.float32"),
    ],
)
def test_parameters_that_have_no_rows_are_refused_on_one_rank_too(own: Tensor, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(own=own)


@pytest.mark.parametrize("hooked", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused(hooked: str) -> None:
    own = nn.Parameter(torch.zeros(2))
    getattr(own, hooked)(lambda _: None)
    with pytest.raises(PlanError, match="own has hooks"):
        planned(own=own)


def test_modules_that_hold_weights_in_attributes_are_refused() -> None:
    model = nn.Sequential(nn.LSTM(4, 3))
    with pytest.raises(PlanError, match=r"0 \(LSTM\) holds parameters in _flat_weights too"):
        refuse_uncuttable(model)


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_parameters_that_share_memory_are_refused(sharding: str) -> None:
    flat = torch.zeros(9)
    for own, other in ((flat[:6], flat[5:]), (flat[:1], flat[:1]), (flat[2:5], flat)):
        with pytest.raises(PlanError, match=r"own.* share memory"):
            planned(own=own, other=other, sharding=sharding)
    assert planned(own=flat[:4], other=flat[4:], sharding=sharding).fit().outcome == "completed"


def test_one_rank_wraps_nothing() -> None:
    trainer = planned()
    assert trainer.fit().outcome == "completed"
    assert all(type(parameter) is nn.Parameter for parameter in trainer.model.parameters())


def test_gradient_norms_are_refused_where_optimizers_hold_pieces() -> None:
    """The workers of full sharding see to it that such optimizers say so."""
    monitor, optimizer = GradientNorms(), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.__dict__["holds_pieces"] = True
    monitor.before(Clock(), 1)
    try:
        with pytest.raises(PlanError, match="with this sharding each rank holds pieces"):
            optimizer.step()
    finally:
        monitor.end()


def test_an_unknown_sharding_is_refused() -> None:
    with pytest.raises(PlanError, match="Use 'replicated', 'optimizer' or 'full'"):
        RunConfig(sharding="zero3")  # type: ignore[arg-type]


@pytest.mark.parametrize("num", [0, 1, 3, -2])
def test_a_copy_lies_on_a_power_of_two_of_ranks(num: int) -> None:
    with pytest.raises(PlanError, match=f"shard_ranks = {num}.*Use 2, 4, 8"):
        RunConfig(sharding="full", shard_ranks=num)


def test_what_is_not_cut_lies_on_no_number_of_ranks() -> None:
    with pytest.raises(PlanError, match=r"shard_ranks = 2 .*sharding='optimizer' they aren't"):
        RunConfig(sharding="optimizer", shard_ranks=2)


def test_on_how_many_ranks_a_copy_lies_is_no_part_of_the_run() -> None:
    torch.manual_seed(0)
    alone = planned().prepared.identity
    torch.manual_seed(0)
    cut = planned(shard_ranks=4)
    assert cut.prepared.identity == alone
    assert cut.fit().outcome == "completed"
