"""One step, looked at from within: what it is drawn by, what it gives, and what follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.loss import Loss, LossFunction, Regression
from cosmati.core.method import Method, Position, Stage, State
from cosmati.core.plan import Promise
from cosmati.core.rng import position_key
from cosmati.errors import BatchError, DivergenceError
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation
from cosmati.train.observers import Observer, StepOutcome
from cosmati.train.trainer import Trainer

GENERATOR = torch.Generator().manual_seed(5)
Rows = tuple[Tensor, Tensor]
ROWS: list[Rows] = [(torch.randn(8, 3, generator=GENERATOR), torch.randn(8, 1, generator=GENERATOR)) for _ in range(3)]
BAD: Rows = (torch.full((8, 3), math.nan), torch.zeros(8, 1))
BOTH = pytest.mark.parametrize("num_microbatches", [1, 2])


class Keeps(Observer):
    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def make(num_microbatches: int = 1, **given: Any) -> Trainer:
    torch.manual_seed(1)
    settings = {"budget": "40ba", "num_microbatches": num_microbatches, "num_threads": 1, "seed": 7}
    config = RunConfig(**settings | given.pop("config", {}))
    model = given.pop("model", None) or nn.Linear(3, 1)
    return Trainer(model, given.pop("loss", Regression()), optimizers=[SGD(lr=0.1)], config=config, **given)


def batch_of(rows: Rows, ids: Sequence[int] | None = None) -> Batch:
    ids = range(len(rows[0])) if ids is None else ids
    return Batch(rows, Lineage(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.int64)), None)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def stepped(model: nn.Linear, rows: Tensor, targets: Tensor) -> Tensor:
    """Return the weights of a layer after a step of gradient descent by hand, in float64."""
    weight, bias = (one.detach().double().requires_grad_() for one in (model.weight, model.bias))
    loss = (rows.double() @ weight.T + bias - targets.double()).square().mean()
    found = [one - 0.1 * g for one, g in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True)]
    return torch.cat([one.detach().flatten() for one in found])


# ------------------------------------------------------------------------------------------------- what follows a step


@BOTH
def test_what_is_due_after_a_step_is_done_in_its_order(
    num_microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"evaluate_every": "2ba", "checkpoint_every": "3ba", "run_folder": tmp_path}
    trainer = make(num_microbatches, config=settings, evaluation=Evaluation(ROWS[:1], {"zero": lambda *_: 0.0}))
    done = list[tuple[str, int]]()
    with trainer, monkeypatch.context() as patched:
        for name in ("look_around", "evaluate", "save"):
            patched.setattr(trainer, name, lambda name=name: done.append((name, trainer.clock.step)))
        for step in range(9):
            trainer.step(ROWS[step % 3])
    look, evaluate, save = "look_around", "evaluate", "save"
    assert done == [
        *[(look, 1), (look, 2), (evaluate, 2), (save, 3), (look, 4), (evaluate, 4), (evaluate, 6), (save, 6)],
        *[(look, 8), (evaluate, 8), (save, 9)],
    ]


@pytest.mark.parametrize("is_batch", [False, True])
@BOTH
def test_the_first_rows_of_a_run_are_seen_once(
    num_microbatches: int, is_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = make(num_microbatches), list[Any]()
    with trainer:
        assert trainer._continuity is not None
        see = trainer._continuity.see

        def noted(data: Any) -> None:
            seen.append(data)
            see(data)

        monkeypatch.setattr(trainer._continuity, "see", noted)
        for rows in ROWS[:2]:
            trainer.step(batch_of(rows) if is_batch else rows)
    ((inputs, targets),) = seen
    size = 8 // num_microbatches
    assert torch.equal(inputs, ROWS[0][0][:size])
    assert torch.equal(targets, ROWS[0][1][:size])


# ------------------------------------------------------------------------------------------------------- the short road


@dataclass(frozen=True, kw_only=True)
class Doubled(Method):
    """Doubles the loss."""

    stage: ClassVar[Stage] = Stage.LOSS

    def loss(self, loss: LossFunction, state: State, at: Position) -> LossFunction:
        def twice(model: nn.Module, data: Any) -> Loss:
            found = loss(model, data)
            assert isinstance(found, Loss)
            return Loss(2 * found.sum, found.weight)

        return twice


def test_forward_passes_of_the_short_road_are_drawn_by_step_and_seed() -> None:
    drawn = list[Tensor]()

    def loss(model: nn.Module, data: Rows) -> Tensor:
        drawn.append(torch.rand(3))
        return mse_loss(model(data[0]), data[1])

    with torch.random.fork_rng(devices=[]):
        with make(loss=loss) as trainer:
            trainer.step(ROWS[0])
            trainer.step(ROWS[1])
        for step, found in enumerate(drawn):
            torch.manual_seed(position_key(7, "forward", step, 0))
            assert torch.equal(found, torch.rand(3))
    assert len(drawn) == 2


def test_a_batch_whose_lineage_is_of_other_rows_is_refused_on_the_short_road() -> None:
    with make() as trainer:
        for ids in (range(7), range(9)):
            with pytest.raises(BatchError):
                trainer.plain_step(batch_of(ROWS[0], ids))
        assert trainer.clock.step == 0
        before = weights(trainer.model)
        trainer.plain_step(batch_of(ROWS[0]))
    assert not torch.equal(weights(trainer.model), before)


def test_batches_are_wrapped_where_somebody_reads_them_and_numbered_from_the_clock_on() -> None:
    for observers in ((), Keeps()):
        with make(observers=observers) as trainer:
            found = [trainer.step(rows).batches for rows in ROWS[:2]]
        assert [len(one) for one in found] == [bool(observers)] * 2
        if observers:
            assert found[1][0].lineage.row_ids.tolist() == list(range(8, 16))
    known = batch_of(ROWS[0])
    with make() as trainer:
        (own,) = trainer.step(known).batches
    assert own.lineage is known.lineage


def test_rows_without_tombstones_alone_teach_on_the_short_road() -> None:
    present = [0, 3, 4]
    ids = [row if row in present else TOMBSTONE for row in range(8)]
    with make() as trainer:
        layer = trainer.model
        assert isinstance(layer, nn.Linear)
        expected = stepped(layer, ROWS[0][0][present], ROWS[0][1][present])
        done = trainer.step(batch_of(ROWS[0], ids))
        torch.testing.assert_close(weights(layer).double(), expected, rtol=1e-5, atol=1e-6)
    assert (done.clock.rows, done.clock.tokens) == (8, 8)


@BOTH
def test_a_loss_without_weight_teaches_nothing_and_the_clock_goes_on(num_microbatches: int) -> None:
    keeps, texts = Keeps(), torch.arange(24).view(4, 6)
    trainer = make(
        num_microbatches, model=nn.Embedding(24, 2), loss=lambda m, data: Loss(m(data).sum(), 0.0), observers=keeps
    )
    before = weights(trainer.model)
    with trainer:
        done = trainer.step(texts)
    assert (float(done.loss), [float(one) for one in done.sub_losses]) == (0.0, [0.0])
    assert (done.clock.step, done.clock.rows, done.clock.tokens, len(done.batches)) == (1, 4, 24, num_microbatches)
    assert math.isnan(done.gradient_norm())
    assert torch.equal(weights(trainer.model), before)


@BOTH
def test_each_part_of_a_step_is_charged_and_methods_change_the_loss(
    num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, charged = make(num_microbatches, methods=[Doubled()]), list[str]()
    layer = trainer.model
    assert isinstance(layer, nn.Linear)
    monkeypatch.setattr(trainer.stopwatch, "lap", charged.append)
    with trainer:
        before = weights(layer).double()
        expected = before + 2 * (stepped(layer, *ROWS[0]) - before)
        charged.clear()
        trainer.step(ROWS[0])
    torch.testing.assert_close(weights(layer).double(), expected, rtol=1e-5, atol=1e-6)
    end = ["backward", "method", "optimizer", "method"]  # the tree over microbatches, and the methods on what it gives
    long = ["data", "method", *["forward", "backward"] * 2, *end]
    assert charged == (["data", "forward", "backward", "optimizer", "method"] if num_microbatches == 1 else long)


def test_a_forward_pass_that_fails_leaves_statistics_and_gradients_as_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    fails = [True]

    def loss(model: nn.Module, data: Rows) -> Tensor:
        value = mse_loss(model(data[0]), data[1])
        if fails[0]:
            value.backward()
            raise KeyError(3)
        return value

    with make(model=model, loss=loss) as trainer:
        before = {name: one.clone() for name, one in model.state_dict().items()}
        with pytest.raises(KeyError):
            trainer.step(ROWS[0])
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        fails[0] = False
        trainer.step(ROWS[0])
        assert int(model.state_dict()["0.num_batches_tracked"]) == 1


def test_a_statistic_that_is_not_finite_is_not_committed_on_the_short_road() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    with make(model=model) as trainer, pytest.raises(DivergenceError, match="A BatchNorm statistic isn't finite at st"):
        trainer.step((torch.cat([ROWS[0][0][:4], torch.full((4, 3), 3e30)]), torch.zeros(8, 1)))
    assert bool(torch.isfinite(model.state_dict()["0.running_var"]).all())


@pytest.mark.parametrize("counts", [False, True])
@BOTH
def test_what_a_forward_pass_moves_is_seen_in_its_first_step(num_microbatches: int, counts: bool) -> None:
    passes = [0]

    def loss(model: nn.Module, data: Rows) -> Tensor:
        passes[0] += counts
        return mse_loss(model(data[0]), data[1])

    with make(num_microbatches, loss=loss) as trainer:
        assert trainer.plan.holds(Promise.RESUME)
        trainer.step(ROWS[0])
        assert trainer._commit.watch.has_moved is counts
        assert trainer._plan.holds(Promise.RESUME) is not counts


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@BOTH
def test_the_loss_alone_runs_under_the_run_s_precision(num_microbatches: int, precision: str) -> None:
    seen = list[bool]()

    def loss(model: nn.Module, data: Rows) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return mse_loss(model(data[0]).float(), data[1])

    with make(num_microbatches, loss=loss, config={"precision": precision}) as trainer:
        seen.clear()
        trainer.step(ROWS[0])
        assert not torch.is_autocast_enabled("cpu")
    assert seen == [precision == "bfloat16"] * num_microbatches


# -------------------------------------------------------------------------------------------------------- the long road


@dataclass(frozen=True, kw_only=True)
class Tripled(Method):
    """Triples the targets."""

    stage: ClassVar[Stage] = Stage.LABEL

    def batch(self, batch: Batch, at: Position) -> Batch:
        return batch.replace(target=3 * batch.target)


@BOTH
def test_the_outcome_has_batches_as_the_methods_left_them_and_as_they_were_given(num_microbatches: int) -> None:
    keeps = Keeps()
    with make(num_microbatches, observers=keeps, methods=[Tripled()]) as trainer:
        done = trainer.step(ROWS[0])
    assert torch.equal(torch.cat([one.data[1] for one in done.batches]), 3 * ROWS[0][1])
    if num_microbatches > 1:
        assert torch.equal(torch.cat([one.data[1] for one in done.given]), ROWS[0][1])


def test_a_microbatch_that_is_not_offered_is_left_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(2, methods=[Tripled()]) as trainer:
        batch, asked, running = batch_of(ROWS[0]), list[Any](), trainer.assembly.router.running

        def noted(*given: Any) -> Any:
            asked.append(given)
            return running(*given)

        monkeypatch.setattr(trainer.assembly.router, "running", noted)
        route, _ = trainer._routes([batch, batch], [0, 0])
        assert trainer._changed(batch, route._replace(offered=False), trainer.position(0)) is batch
        changed = trainer._changed(batch, route, trainer.position(0))
        assert [(one[0].offered, *one[1:]) for one in asked] == [(o, batch, torch.device("cpu")) for o in (False, True)]
    assert torch.equal(changed.data[1], 3 * ROWS[0][1])


@pytest.mark.parametrize("every", [0, 1, 2])
@BOTH
def test_digests_are_of_before_and_after_a_step_where_they_are_due(num_microbatches: int, every: int) -> None:
    keeps = Keeps()
    with make(num_microbatches, observers=keeps, config={"digests_every": every}) as trainer:
        assert trainer.is_plain == (num_microbatches == 1 and not every)
        for rows in ROWS:
            trainer.step(rows)
    found = [one.digests for one in keeps.outcomes]
    assert [one is not None for one in found] == [every > 0 and step % every == 0 for step in range(3)]
    assert all(one.before != one.after for one in found if one is not None)
    if every == 1:
        assert found[0] is not None
        assert found[1] is not None
        assert found[0].after == found[1].before


@pytest.mark.parametrize("watched", [False, True])
def test_figures_are_due_where_somebody_reads_them_and_rows_are_offered(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, asked = make(2, observers=Keeps() if watched else ()), list[tuple[int, bool]]()
    due = trainer._cadences.due

    def noted(step: int, *, is_offered: bool) -> Any:
        asked.append((step, is_offered))
        return due(step, is_offered=is_offered)

    monkeypatch.setattr(trainer._cadences, "due", noted)
    with trainer:
        trainer.step(ROWS[0])
        trainer.step(batch_of(ROWS[0], [TOMBSTONE] * 4 + [*range(4)]))
        trainer.step(batch_of(ROWS[0], [TOMBSTONE] * 8))
    assert asked == ([(0, True), (1, True), (2, False)] if watched else [])


@pytest.mark.parametrize("has_statistics", [False, True])
def test_statistics_are_folded_after_the_commit(has_statistics: bool) -> None:
    norm = nn.BatchNorm1d(3) if has_statistics else nn.Identity()
    trainer, events = make(2, model=nn.Sequential(norm, nn.Linear(3, 1)), observers=Keeps()), list[str]()
    trainer.trace = events.append
    with trainer:
        events.clear()
        trainer.step(ROWS[0])
        assert events[0] == "step"
        assert events[events.index("commit") :] == ["commit", *["fold"] * has_statistics, "report"]
    if isinstance(norm, nn.BatchNorm1d):
        means = torch.stack([part.mean(0) for part in ROWS[0][0].chunk(2)])
        assert norm.running_mean is not None
        expected = (means[0] * 0.1 * 0.9 + means[1] * 0.1, means.mean(0) * 0.1)
        assert any(torch.allclose(norm.running_mean, one) for one in expected)
