"""Weights that passes read rounded: the bits of a loop that says so, and whole where anybody else looks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.plan import Promise
from cosmati.core.rng import position_key
from cosmati.data.in_memory import InMemory
from cosmati.errors import PlanError
from cosmati.optim import SGD
from cosmati.recipes.recipe import Recipe
from cosmati.routing.regions import partition_parameters
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, batches
from cosmati.train.layout.rounded import gather_weights
from cosmati.train.layout.whole import Whole
from cosmati.train.ranks import Ranks
from cosmati.train.trainer import Trainer
from tests.train.sharding.test_exchange import Counted
from tests.train.test_rank_sum import Threads, threads

__all__ = ["threads"]
V, STEPS = 4, 3
CLASSES = Classification(3)


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 3))
    net[0].bias.requires_grad_(False)
    return net


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 5, generator=generator), torch.randint(3, (24,), generator=generator)


def trainer(**changed: Any) -> Trainer:
    settings = {"gather_precision": "bfloat16", "num_microbatches": V, "num_threads": 1, **changed}
    return Trainer(
        model(),
        CLASSES,
        InMemory(rows(), 24),
        optimizers=SGD(lr=0.5, momentum=0.9),
        evaluation=Evaluation(batches(rows(), 24), {"loss": CLASSES}),
        config=RunConfig(budget=f"{STEPS}ba", **settings),
    )


def by_hand() -> nn.Module:
    """Train as the trainer is to: each pass on a copy whose weights are rounded, each commit on the weights."""
    net = model()
    learning = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.5, momentum=0.9)
    order = InMemory(rows(), 24).order(seed=0, num_microbatches=V, route_pure=False)
    for step in range(STEPS):
        leaves = []
        for index in range(V):
            read = copy.deepcopy(net)
            for parameter in read.parameters():
                parameter.data = parameter.data.bfloat16().float()
            torch.manual_seed(position_key(0, "forward", step, index))
            data: Any = order.microbatch(step, index).data
            nn.functional.cross_entropy(read(data[0]), data[1], reduction="sum").div(16).backward()
            leaves.append([p.grad for p in read.parameters() if p.requires_grad])
        while len(leaves) > 1:
            leaves = [
                [a + b for a, b in zip(*pair, strict=True)] for pair in zip(leaves[::2], leaves[1::2], strict=True)
            ]
        for parameter, gradient in zip(learning, leaves[0], strict=True):
            parameter.grad = gradient / 1.5
        optimizer.step()
    return net


def test_a_run_has_the_bits_of_a_loop_on_rounded_weights() -> None:
    run, plain = trainer(), trainer(gather_precision="float32")
    metrics = run.fit().metrics
    plain.fit()
    expected = by_hand()
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, run.model.get_parameter(name)), name
    assert not torch.equal(expected[0].weight, plain.model.get_parameter("0.weight"))  # type: ignore[index]
    assert not torch.equal(expected[0].weight, expected[0].weight.bfloat16().float())  # type: ignore[index, union-attr]
    expected.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(expected(rows()[0]), rows()[1]).item()
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6), "evaluations read weights whole"


def test_a_plan_says_that_parity_is_broken_and_by_what() -> None:
    broken = [g for g in trainer().plan.guarantees if not g.holds]
    assert [(g.promise, "rounded to bfloat16" in g.because) for g in broken if g.promise is Promise.PARITY] == [
        (Promise.PARITY, True)
    ]
    assert trainer(gather_precision="float32").plan.holds(Promise.PARITY)
    assert trainer().plan.holds(Promise.ELASTIC)


def test_it_is_part_of_what_a_run_is_and_others_are_what_they_were() -> None:
    before, after = (trainer(gather_precision=one).prepared.identity for one in ("float32", "bfloat16"))
    assert {**before, "settings.gather_precision": "bfloat16"} == dict(after)
    texts = [
        Recipe(
            name="r", model=model, loss=CLASSES, data=rows, optimizers=(), config=RunConfig(gather_precision=one)
        ).text
        for one in ("float32", "bfloat16")
    ]
    assert ["gather_precision" in text for text in texts] == [False, True]


def test_one_microbatch_a_step_gathers_nothing() -> None:
    with pytest.raises(PlanError, match="V = 1 microbatch a step runs on one rank"):
        trainer(num_microbatches=1)
    with pytest.raises(PlanError, match="Here the nearest is 'bfloat16'"):
        RunConfig(gather_precision="fp16")  # type: ignore[arg-type]


def test_weights_are_whole_again_however_a_pass_ends() -> None:
    net = model()
    net.register_parameter("numbers", nn.Parameter(torch.arange(3), requires_grad=False))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    layout = Whole(net, partition_parameters(net), Ranks(), 2, rounds=True)

    def broken_off() -> None:
        with layout.step(((1.0,),) * 2, frozenset({0}), measure=False):
            assert all(torch.equal(p, before[name].bfloat16().to(p.dtype)) for name, p in net.named_parameters())
            assert not torch.equal(net.get_parameter("0.weight"), before["0.weight"])
            raise KeyError

    with pytest.raises(KeyError):
        broken_off()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_gathered_weights_are_sent_in_half_the_bytes(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(threads, monkeypatch)
    whole = torch.randn(threads.world * 64, generator=torch.Generator().manual_seed(0))

    def work(ranks: Ranks) -> list[Tensor]:
        found = []
        for rounds in (False, True):
            gathered = torch.empty_like(whole)
            gather_weights(gathered, whole.chunk(ranks.world)[ranks.rank], None, rounds=rounds)
            found.append(gathered)
        return found

    for as_they_are, rounded in threads.run(work):
        assert torch.equal(as_they_are, whole)
        assert torch.equal(rounded, whole.bfloat16().float())
    assert counted.bytes == [(threads.world - 1) * 64 * (4 + 2)] * threads.world
