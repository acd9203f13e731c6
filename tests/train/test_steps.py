"""Steps of both roads: which part of the time is charged to what, and what observers are told."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.clock import Clock
from cosmati.core.loss import LossFunction, Regression
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.pieces import Pieces
from cosmati.methods import EMA, SAM, GradientClipping
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation
from cosmati.train.observers import History, Observer, StepOutcome
from cosmati.train.trainer import Trainer
from tests.train.hand_made import SecondOfTwo

GENERATOR = torch.Generator().manual_seed(0)
DATA = [(torch.randn(4, 3, generator=GENERATOR), torch.randn(4, 1, generator=GENERATOR)) for _ in range(4)]


class Keeps(Observer):
    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.outcomes: list[StepOutcome] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def _trainer(num_microbatches: int, *observers: Observer, **options: Any) -> Trainer:
    torch.manual_seed(1)
    config = RunConfig(budget="4ba", num_microbatches=num_microbatches, num_threads=1, **options.pop("config", {}))
    loss = options.pop("loss", Regression())
    given = {"optimizers": [SGD(lr=0.1)], "observers": observers, "config": config} | options
    return Trainer(nn.Linear(3, 1), loss, DATA, **given)


# What each part is charged with, in order. `method` comes twice on the long road: before and after the passes.
SHORT = ["data", "forward", "backward", "optimizer", "method", "ledger"]
LONG = [
    "data", "method", "forward", "backward", "forward", "backward", "backward", "method", "optimizer", "method",
    "ledger",
]  # fmt: skip


@pytest.mark.parametrize(("num_microbatches", "expected"), [(1, SHORT), (2, LONG)])
@pytest.mark.parametrize("watched", [True, False])
def test_the_time_of_a_step_is_charged_part_by_part(
    num_microbatches: int, expected: list[str], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(num_microbatches, *([Keeps()] if watched else []))
    charged: list[str] = []
    monkeypatch.setattr(trainer.stopwatch, "lap", charged.append)
    with trainer:
        trainer.step(DATA[0])
        trainer.step(DATA[1])
    assert charged == (expected if watched else expected[:-1]) * 2


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_observers_are_told_of_the_step_that_was_taken(num_microbatches: int) -> None:
    keeps = Keeps()
    trainer = _trainer(num_microbatches, keeps)
    reference = copy.deepcopy(trainer.model)
    trainer.fit()
    losses = []
    for rows, targets in DATA:
        loss = nn.functional.mse_loss(reference(rows), targets)
        losses.append(loss.item())
        for parameter, gradient in zip(
            reference.parameters(), torch.autograd.grad(loss, list(reference.parameters())), strict=True
        ):
            parameter.data -= 0.1 * gradient
    assert [float(outcome.loss) for outcome in keeps.outcomes] == pytest.approx(losses)
    assert [float(outcome.sub_losses[0]) for outcome in keeps.outcomes] == pytest.approx(losses)
    clocks = [outcome.clock for outcome in keeps.outcomes]
    assert [(c.step, c.epoch, c.step_in_epoch, c.rows, c.tokens) for c in clocks] == [
        (1, 0, 1, 4, 4), (2, 0, 2, 8, 8), (3, 0, 3, 12, 12), (4, 1, 0, 16, 16)
    ]  # fmt: skip
    assert all(later.seconds > earlier.seconds for earlier, later in itertools.pairwise(clocks))
    ids = [[i for batch in outcome.batches for i in batch.lineage.row_ids.tolist()] for outcome in keeps.outcomes]
    assert ids == [list(range(start, start + 4)) for start in (0, 4, 8, 12)]
    assert all(not outcome.loss.requires_grad for outcome in keeps.outcomes)
    for outcome in keeps.outcomes:
        assert len(outcome.batches) == num_microbatches
        assert [route.offered for route in outcome.routes] == [True, True][: 0 if num_microbatches == 1 else 2]
        assert (outcome.weights is None) == (outcome.num_rows is None) == (num_microbatches == 1)
        if outcome.weights is not None and outcome.num_rows is not None:
            assert (outcome.weights.tolist(), outcome.num_rows.tolist()) == ([2, 2], [2, 2])


@pytest.mark.parametrize(("details_every", "steps"), [(1, [1, 2, 3, 4]), (2, [1, 3]), (3, [1, 4])])
def test_norms_are_measured_on_their_cadence(details_every: int, steps: list[int]) -> None:
    keeps = Keeps()
    _trainer(2, keeps, config={"details_every": details_every}).fit()
    assert [outcome.clock.step for outcome in keeps.outcomes if outcome.norms is not None] == steps
    assert all(outcome.update_norms is None for outcome in keeps.outcomes), "only under a policy"


def test_norms_are_of_what_each_microbatch_adds_to_the_mean() -> None:
    keeps = Keeps()
    trainer = _trainer(2, keeps)
    weight, bias = (parameter.detach().clone().requires_grad_() for parameter in trainer.model.parameters())
    with trainer:
        trainer.step(DATA[0])
    norms = keeps.outcomes[0].norms
    assert norms is not None
    assert norms.dtype is torch.float64
    for half, norm in zip((slice(0, 2), slice(2, 4)), norms, strict=True):
        summed = (nn.functional.linear(DATA[0][0][half], weight, bias) - DATA[0][1][half]).square().sum()
        gradients = torch.autograd.grad(summed / 4, [weight, bias])
        expected = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
        torch.testing.assert_close(norm, expected[None], rtol=1e-6, atol=0)


def test_without_observers_nothing_is_measured_and_batches_are_not_wrapped() -> None:
    trainer = _trainer(2)
    with trainer:
        assert trainer.step(DATA[0]).norms is None
    trainer = _trainer(1)
    with trainer:
        assert trainer.step(DATA[0]).batches == ()


def test_the_user_may_keep_the_for() -> None:
    expected, kept = _trainer(2), _trainer(2)
    expected.fit()
    outcome = kept.step(DATA[0])  # opens the run
    assert outcome.clock == kept.clock
    with kept as same:
        assert same is kept
        for data in DATA[1:]:
            kept.step(data)
    for ours, theirs in zip(kept.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (kept.clock.step, kept.clock.epoch) == (4, 1)


CLIPPING = GradientClipping(clipping_type="norm", clipping_threshold=1.0)


@pytest.mark.parametrize(
    ("methods", "num_microbatches", "expected"),
    [((), 1, True), ((CLIPPING,), 1, True), ((EMA(half_life="2ba"),), 1, True), ((), 2, False)],
)
def test_which_road_a_run_takes(methods: tuple[Any, ...], num_microbatches: int, expected: bool) -> None:
    assert _trainer(num_microbatches, methods=methods).is_plain == expected


def test_events_come_in_the_order_of_the_loop() -> None:
    trainer = _trainer(2, Keeps(), methods=[EMA(half_life="2ba")], evaluation=Evaluation(DATA[:1]))
    events: list[str] = []
    trainer.trace = events.append
    trainer.fit()
    step = ["step", "forward", "leaf", "forward", "leaf", "tree", "commit", "after", "report"]
    assert events == step * 4 + ["evaluate"]


@dataclass(frozen=True, kw_only=True)
class Doubles(Method):
    """Doubles the rows."""

    stage: ClassVar[Stage] = Stage.PERTURB

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch.replace(input=2 * batch.input)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_methods_change_the_batches_that_are_offered(num_microbatches: int) -> None:
    keeps = Keeps()
    trainer = _trainer(num_microbatches, keeps, methods=[Doubles()])
    ids = torch.tensor([5, 6, TOMBSTONE, TOMBSTONE])
    with trainer:
        trainer.step(Batch(DATA[0], Lineage(ids, torch.zeros(4, dtype=torch.int64))))
    (outcome,) = keeps.outcomes
    found = torch.cat([batch.data[0] for batch in outcome.batches])
    # Where all rows of a microbatch are tombstones, nobody asks a method about them.
    untouched = {1: 4, 2: 2, 4: 2}[num_microbatches]
    assert torch.equal(found[:untouched], 2 * DATA[0][0][:untouched])
    assert torch.equal(found[untouched:], DATA[0][0][untouched:])
    assert [route.offered for route in outcome.routes] == {1: [], 2: [True, False], 4: [True] * 2 + [False] * 2}[
        num_microbatches
    ]
    assert outcome.loss.item() == pytest.approx(
        nn.functional.mse_loss(_trainer(1).model(2 * DATA[0][0][:2]), DATA[0][1][:2]).item()
    )


@dataclass(frozen=True, kw_only=True)
class Remembers(Method):
    """Writes down where each of its hooks is called."""

    places: list[tuple[str, int, int]]
    stage: ClassVar[Stage] = Stage.PERTURB

    def _note(self, hook: str, at: Position) -> None:
        self.places.append((hook, at.clock.step, at.microbatch))

    def batch(self, batch: Batch, at: Position) -> Batch:
        self._note("batch", at)
        return batch

    def loss(self, loss: LossFunction, state: State, at: Position) -> LossFunction:
        self._note("loss", at)
        return loss

    def gradients(self, gradients: Pieces, weights: Pieces, at: Position) -> Pieces:
        self._note("gradients", at)
        return gradients

    def after(self, state: State, weights: Pieces, at: Position, learnt: frozenset[str] | None) -> State:
        self._note("after", at)
        return state


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_hooks_are_told_where_in_the_run_they_are(num_microbatches: int) -> None:
    method = Remembers(places=[])
    trainer = _trainer(num_microbatches, methods=[method])
    with trainer:
        trainer.step(DATA[0])
        trainer.step(DATA[1])
    microbatches = range(num_microbatches)
    assert method.places == [
        place
        for step in range(2)
        for place in (
            *(("batch", step, m) for m in microbatches),
            *(("loss", step, m) for m in microbatches),
            ("gradients", step, 0),
            ("after", step + 1, 0),
        )
    ]


def test_the_result_says_where_the_run_stands() -> None:
    metrics = {"error": lambda model, data: nn.functional.mse_loss(model(data[0]), data[1])}
    trainer = _trainer(1, evaluation=Evaluation(DATA[:1], metrics))
    result = trainer.fit()
    assert (result.outcome, result.clock, result.run_folder) == ("completed", trainer.clock, None)
    error = nn.functional.mse_loss(trainer.model(DATA[0][0]), DATA[0][1])
    assert result.metrics == {"error": pytest.approx(error.item())}
    assert set(result.seconds_by_part) == {"data", "forward", "backward", "optimizer", "method", "evaluation"}
    charged = sum(seconds for part, seconds in result.seconds_by_part.items() if part != "evaluation")
    assert 0 < charged <= result.seconds
    assert trainer.clock == Clock(4, 1, 0, 16, 16, trainer.clock.seconds)


def test_observers_are_told_of_each_evaluation() -> None:
    history = History()
    metrics = {"bias": lambda model, data: model.bias.mean()}
    trainer = _trainer(1, history, evaluation=Evaluation(DATA[:1], metrics), config={"evaluate_every": "3ba"})
    result = trainer.fit()
    assert [clock.step for clock, _, _ in history.evaluations] == [3, 4]
    first, last = history.evaluations
    assert last[2] == result.metrics == {"bias": pytest.approx(trainer.model.bias.item())}
    assert first[2] != last[2]
    assert 0 < first[1] <= last[1] <= result.seconds
    assert first[1] >= first[0].seconds


def test_the_pass_that_is_applied_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(2, Keeps(), methods=[SAM(rho=0.1)], config={"details_every": 2})
    passes: list[tuple[int, bool]] = []
    step = trainer.assembly.layout.step

    def noted(*given: Any, measure: bool, **others: Any) -> Any:
        passes.append((trainer.clock.step, measure))
        return step(*given, measure=measure, **others)

    monkeypatch.setattr(trainer.assembly.layout, "step", noted)
    trainer.fit()
    # Whether a second pass follows isn't known before the first one has ended.
    assert passes == [(step, step % 2 == 0) for step in range(4) for _ in range(2)]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_are_changed_before_their_commit_on_both_roads(num_microbatches: int) -> None:
    class Half(nn.Module):
        """Has a parameter that the loss doesn't know."""

        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.used(rows)

    torch.manual_seed(2)
    model = Half()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = nn.functional.mse_loss(model(DATA[0][0]), DATA[0][1])
    gradients = torch.autograd.grad(loss, list(model.used.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    method = GradientClipping(clipping_type="norm", clipping_threshold=norm.item() / 4)
    config = RunConfig(budget="4ba", num_microbatches=num_microbatches, num_threads=1)
    decays = [torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)]
    with Trainer(model, Regression(), optimizers=decays, methods=[method], config=config) as trainer:
        trainer.step(DATA[0])
    for name, gradient in zip(("used.weight", "used.bias"), gradients, strict=True):
        expected = before[name] - 0.1 * (gradient / 4 + 0.5 * before[name])
        torch.testing.assert_close(dict(model.named_parameters())[name].data, expected, rtol=1e-4, atol=1e-6)
    # What has no gradient isn't moved, not even by decay.
    assert torch.equal(model.idle.weight.data, before["idle.weight"])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_clock_counts_the_rows_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmati.train.prepare.Ranks", SecondOfTwo)
    tokens = torch.arange(20).view(4, 5)
    trainer = _trainer(2, loss=lambda model, data: model(data[:, :3].float()).mean())
    with trainer:
        outcome = trainer.step(tokens)
    assert [batch.data.tolist() for batch in outcome.batches] == [tokens[2:].tolist()], "this rank's own"
    assert (outcome.clock.rows, outcome.clock.tokens) == (4, 20)
