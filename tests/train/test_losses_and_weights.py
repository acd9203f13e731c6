"""What a loss adds, whose weights are evaluated, and on which BatchNorm statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.batch import Data
from cosmati.core.loss import Classification, Loss
from cosmati.data.in_memory import InMemory
from cosmati.errors import DivergenceError
from cosmati.methods import EMA
from cosmati.optim import SGD
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation, batches
from cosmati.train.observers import History, Observer, StepReport
from cosmati.train.recalibration import RECALIBRATION_STEPS
from cosmati.train.trainer import Trainer

pytestmark = pytest.mark.long

RATE = 0.5
SMOOTHING = 0.8
Rows = tuple[Tensor, Tensor]
each_number = pytest.mark.parametrize("num_microbatches", [1, 4])


class TwoLayers(nn.Module):
    """A body and a head, in float64 so that an oracle of another order agrees to many places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(rows)))


def balanced(model: Any, data: Data) -> Loss:
    """Cross-entropy over the rows whose target isn't ignored, and a balancing term that looks at the rows."""
    logits = model(data[0])
    per_row = F.cross_entropy(logits, data[1], reduction="none", ignore_index=-100)
    weight = (data[1] != -100).sum()
    balance = logits.softmax(1).mean(0).square().sum()
    return Loss(per_row.sum(), weight, aux={"balance": 0.3 * balance, "size": 0.1 * logits.square().mean()})


def _rows(num: int, seed: int = 4) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows, targets = torch.randn(num, 4, generator=generator).double(), torch.randint(3, (num,), generator=generator)
    return rows, targets.masked_fill(torch.rand(num, generator=generator) < 0.3, -100)


def _mean_by_weight(parts: Sequence[Loss]) -> Tensor:
    """Return sum(sum_m + weight_m * aux_m) / sum(weight_m), written as the formula has it."""
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        total = total + part.sum + part.weight * sum(part.aux.values())
    return total / sum(float(part.weight) for part in parts)


@each_number
def test_auxiliary_terms_count_by_weight(num_microbatches: int) -> None:
    rows, targets = _rows(24)
    model, history = TwoLayers(), History()
    expected = copy.deepcopy(model)
    cut = list(zip(rows.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True))
    parts = [balanced(expected, part) for part in cut]
    assert num_microbatches == 1 or len({float(part.weight) for part in parts}) > 1
    value = _mean_by_weight(parts)
    value.backward()
    config = RunConfig(budget="1ba", num_microbatches=num_microbatches, num_threads=1)
    Trainer(model, balanced, [(rows, targets)], optimizers=[SGD(lr=RATE)], observers=[history], config=config).fit()
    for trained, own in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(trained.detach(), own.detach() - RATE * own.grad, rtol=1e-12, atol=1e-14)
    assert history.losses == [(1, pytest.approx(value.item(), rel=1e-12))]
    without = sum(part.sum.item() for part in parts) / sum(float(part.weight) for part in parts)
    assert value.item() > without + 0.05


def test_auxiliary_terms_take_the_route_of_their_rows() -> None:
    """A region learns from the auxiliary terms of admitted microbatches alone."""
    policy = """
version: 1
taxonomy: t
regions:
  near_input: {params: ["body.*"]}
  near_output: {params: ["head.*"]}
rules:
  - {class: open, weight: 1}
  - {class: doubtful, region: near_input, weight: 0}
  - {class: doubtful, region: near_output, weight: 1}
"""
    rows, targets = _rows(24)
    model = TwoLayers()
    expected = copy.deepcopy(model)
    classes = (torch.arange(24) >= 12).long()
    # One microbatch for each class, whole: their rows' order changes nothing but the last places.
    by_class = [balanced(expected, (rows[classes == c], targets[classes == c])) for c in (0, 1)]
    body = list(expected.body.parameters())
    head = list(expected.head.parameters())
    gradients = torch.autograd.grad(_mean_by_weight(by_class[:1]), body, retain_graph=True)
    gradients += torch.autograd.grad(_mean_by_weight(by_class), head)
    trainer = Trainer(
        model,
        balanced,
        InMemory((rows, targets), 24, class_ids=classes, class_names=("open", "doubtful")),
        optimizers=[SGD(lr=RATE)],
        policy=load_policy(policy),
        taxonomy=Taxonomy("t", "1", (("open", "free to learn from"), ("doubtful", "only near the output"))),
        config=RunConfig(budget="1ba", num_microbatches=2, num_threads=1),
    )
    trainer.fit()
    for trained, own, gradient in zip(model.parameters(), [*body, *head], gradients, strict=True):
        torch.testing.assert_close(trained.detach(), own.detach() - RATE * gradient, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------- averaged weights and BatchNorm

LOSS = Classification(2)


def _skewed() -> Rows:
    """Rows far from zero mean and unit variance, where BatchNorm's statistics matter."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(96, 4, generator=generator) * 5 + 20
    return rows, (rows.sum(1) > 80).long()


def _normed(*, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(dropout), nn.BatchNorm1d(8, momentum=0.3), nn.ReLU(), nn.Linear(8, 2)
    )


class Recorder(Observer):
    """Keeps the parameters after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters: list[dict[str, Tensor]] = []

    def on_step(self, report: StepReport) -> None:
        self.parameters.append({n: p.detach().clone() for n, p in self.model.named_parameters()})


class Draws(Observer):
    """Draws from the default generator after each step, as a user's own code may, or another rank's does."""

    def on_step(self, report: StepReport) -> None:
        torch.rand(int(report.clock.step) % 7 + 1)


def _ema_run(data: Any, model: nn.Module, *observers: Observer, **options: Any) -> tuple[Trainer, float]:
    config = RunConfig(**{"budget": "20ba", "num_threads": 1, "num_microbatches": 2, "seed": 5} | options)
    trainer = Trainer(
        model,
        LOSS,
        data,
        optimizers=[SGD(lr=0.05, momentum=0.9)],
        methods=[EMA(smoothing=SMOOTHING)],
        evaluation=Evaluation(batches(_skewed(), 32), {"loss": LOSS}),
        observers=observers,
        config=config,
    )
    return trainer, trainer.fit().metrics["loss"]


def _averaged(model: nn.Module, recorder: Recorder) -> nn.Module:
    """Return a copy with the moving average of the recorded parameters, in float64."""
    averages = {name: value.double() for name, value in recorder.parameters[0].items()}
    for later in recorder.parameters[1:]:
        averages = {n: SMOOTHING * a + (1 - SMOOTHING) * later[n].double() for n, a in averages.items()}
    other = copy.deepcopy(model).double()
    for name, parameter in other.named_parameters():
        parameter.data.copy_(averages[name])
    return other


@torch.no_grad()
def _loss_with_statistics_of(model: nn.Sequential, passes: Sequence[Tensor]) -> float:
    """Average mean and unbiased variance over the passes by formula, set them, and measure."""
    linear, norm = model[0], model[2]
    seen = [linear(rows.double()) for rows in passes]
    norm.running_mean.copy_(torch.stack([x.mean(0) for x in seen]).mean(0))
    norm.running_var.copy_(torch.stack([x.var(0, unbiased=True) for x in seen]).mean(0))
    rows, targets = _skewed()
    return F.cross_entropy(model.eval()(rows.double()), targets).item()


@each_number
def test_averaged_weights_are_evaluated_on_statistics_of_their_own(num_microbatches: int) -> None:
    model = _normed()
    source, recorder = InMemory(_skewed(), 24), Recorder(model)
    _, measured = _ema_run(source, model, recorder, num_microbatches=num_microbatches)
    order = source.order(seed=5, num_microbatches=num_microbatches, route_pure=False)
    passes = [
        order.microbatch(step, index).data[0]
        for step in range(RECALIBRATION_STEPS)
        for index in range(num_microbatches)
    ]
    averaged = _averaged(model, recorder)
    stale = F.cross_entropy(averaged.eval()(_skewed()[0].double()), _skewed()[1]).item()
    expected = _loss_with_statistics_of(averaged, passes)
    assert measured == pytest.approx(expected, rel=1e-4)
    assert abs(stale - expected) > 1e-2 * expected, "the running statistics belong to other weights"


def test_evaluating_averaged_weights_leaves_no_trace() -> None:
    often, never = _normed(dropout=0.3), _normed(dropout=0.3)
    source = InMemory(_skewed(), 24)
    _ema_run(source, often, evaluate_every="1ba")
    config = RunConfig(budget="20ba", num_threads=1, num_microbatches=2, seed=5)
    Trainer(never, LOSS, source, optimizers=[SGD(lr=0.05, momentum=0.9)], config=config).fit()
    other = never.state_dict()
    assert [name for name, value in often.state_dict().items() if not torch.equal(value, other[name])] == []


def test_averaged_weights_where_the_data_are_a_list() -> None:
    rows, targets = _skewed()
    steps = [(rows[i : i + 24], targets[i : i + 24]) for i in range(0, 96, 24)]
    _, measured = _ema_run(steps, _normed())
    assert measured < math.log(2), "a guess has log 2, a mean of 0 and a variance of 1 give 22"


def test_recalibration_draws_are_keyed() -> None:
    """Dropout before BatchNorm: the statistics, and the metric, don't depend on who drew before."""
    source = InMemory(_skewed(), 24)
    _, quiet = _ema_run(source, _normed(dropout=0.5))
    _, drawn = _ema_run(source, _normed(dropout=0.5), Draws())
    assert quiet == drawn


def test_recalibration_has_the_precision_of_the_run() -> None:
    class Probe(nn.Module):
        """Notes the type of what passes through without a graph."""

        forward_caches = ("seen",)

        def __init__(self) -> None:
            super().__init__()
            self.seen: set[tuple[bool, torch.dtype]] = set()

        def forward(self, hidden: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                self.seen.add((self.training, hidden.dtype))
            return hidden

    probe = Probe()
    model = nn.Sequential(nn.Linear(4, 8), probe, nn.BatchNorm1d(8), nn.Linear(8, 2))
    _ema_run(InMemory(_skewed(), 24), model, precision="bfloat16", budget="2ba")
    assert probe.seen == {(True, torch.bfloat16), (False, torch.bfloat16)}


# ------------------------------------------------------------------------------------------------------------ threads


class Threads(Observer):
    """Notes the intra-op threads of each step."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_step(self, report: StepReport) -> None:
        self.seen.add(torch.get_num_threads())


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_threads_are_the_recipes_in_fit_and_the_users_after() -> None:
    observer = Threads()
    _ema_run(InMemory(_skewed(), 24), _normed(), observer, num_threads=2)
    assert observer.seen == {2}
    assert torch.get_num_threads() == 3
    _ema_run(InMemory(_skewed(), 24), _normed(), observer, num_threads=None)
    assert observer.seen == {2, 3}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_threads_are_the_users_after_an_error() -> None:
    seen: list[int] = []

    def broken(model: nn.Module, data: Data) -> Tensor:
        seen.append(torch.get_num_threads())
        return model(data[0]).sum() * torch.nan

    config = RunConfig(budget="1ba", num_threads=2)
    with pytest.raises(DivergenceError):
        Trainer(_normed(), broken, [_skewed()], optimizers=[SGD(lr=0.1)], config=config).fit()
    assert (seen, torch.get_num_threads()) == ([2], 3)
