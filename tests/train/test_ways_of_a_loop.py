"""The loop ends, leaves out, looks around and reports as it says, with one microbatch and with several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from cosmati.core.batch import Batch, Lineage
from cosmati.core.loss import Regression
from cosmati.core.plan import Promise
from cosmati.errors import BatchError, DataError, DivergenceError
from cosmati.methods import EMA, GradientClipping
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import Evaluation
from cosmati.train.finite import MAX_LEFT_OUT
from cosmati.train.observers import History, Observer, StepOutcome
from cosmati.train.run.checkpoints import list_checkpoints
from cosmati.train.trainer import Trainer

GENERATOR = torch.Generator().manual_seed(3)
Rows = tuple[Tensor, Tensor]
ROWS: list[Rows] = [(torch.randn(4, 3, generator=GENERATOR), torch.randn(4, 1, generator=GENERATOR)) for _ in range(6)]
BAD: Rows = (torch.full((4, 3), math.nan), torch.zeros(4, 1))
BOTH = pytest.mark.parametrize("num_microbatches", [1, 2])


class Keeps(Observer):
    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []
        self.begun: list[int] = []

    def on_step(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def on_step_begin(self, clock: Any) -> None:
        self.begun.append(clock.step)


class Endless:
    """Rows without a length, as often as somebody asks for them."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Rows]:
        yield from ROWS[: self.num]


def make(num_microbatches: int = 1, data: Any = ROWS, budget: str = "6ba", **given: Any) -> Trainer:
    torch.manual_seed(1)
    config = RunConfig(budget=budget, num_microbatches=num_microbatches, num_threads=1, **given.pop("config", {}))
    model = given.pop("model", None) or nn.Linear(3, 1)
    loss = given.pop("loss", Regression())
    return Trainer(model, loss, data, **{"optimizers": [SGD(lr=0.1)], "config": config, **given})


def weights(trainer: Trainer) -> list[float]:
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()]).tolist()


def test_fit_asks_for_data() -> None:
    with pytest.raises(DataError, match=r"fit\(\) needs data: Trainer\(model, loss, data, ...\)"):
        make(data=None).fit()


@BOTH
@pytest.mark.parametrize(
    ("data", "budget", "outcome", "step"),
    [
        (ROWS, "6ba", "completed", 6),
        (ROWS, "8ba", "completed", 8),  # a second pass
        ("once 6", "6ba", "completed", 6),
        ("once 3", "6ba", "exhausted", 3),
        (Endless(4), "2ep", "completed", 8),
        (Endless(4), "5ba", "completed", 5),
    ],
)
def test_a_run_ends_with_its_budget_or_its_data(
    num_microbatches: int, data: Any, budget: str, outcome: str, step: int
) -> None:
    rows = iter(ROWS[: int(data[-1])]) if isinstance(data, str) else data
    history = History()
    evaluation = Evaluation(ROWS[:1], {"zero": lambda *_: 0.0})
    result = make(num_microbatches, rows, budget, evaluation=evaluation, observers=history).fit()
    assert (result.outcome, result.clock.step, result.clock.rows) == (outcome, step, 4 * step)
    assert [clock.step for clock, *_ in history.evaluations] == [step]
    assert [one for one, _ in history.losses] == [*range(1, step + 1)]


def test_epochs_of_data_without_a_length_are_counted_as_they_end() -> None:
    keeps = Keeps()
    result = make(1, Endless(4), "2ep", observers=keeps).fit()
    assert [(one.clock.epoch, one.clock.step_in_epoch) for one in keeps.outcomes[3:6]] == [(0, 4), (1, 1), (1, 2)]
    assert (result.clock.epoch, result.clock.step_in_epoch) == (2, 0)


def test_who_stops_before_the_first_step_has_neither_step_nor_evaluation() -> None:
    history = History()
    trainer = make(evaluation=Evaluation(ROWS[:1], {"zero": lambda *_: 0.0}), observers=history)
    before = weights(trainer)
    trainer.stop()
    result = trainer.fit()
    assert (result.outcome, result.clock.step, history.evaluations, weights(trainer)) == ("stopped", 0, [], before)
    assert trainer.fit().outcome == "completed"


@BOTH
def test_a_step_that_diverges_is_left_out_and_the_next_one_counts(num_microbatches: int) -> None:
    keeps, data = Keeps(), [*ROWS[:2], BAD, *ROWS[2:4]]
    trainer = make(num_microbatches, data, "5ba", observers=keeps, config={"on_divergence": "skip"})
    assert trainer.plan.holds(Promise.PARITY)
    result = trainer.fit()
    left = keeps.outcomes[2]
    assert [bool(one.left_out) for one in keeps.outcomes] == [False, False, True, False, False]
    assert (left.clock.step, left.clock.rows, result.clock.rows) == (3, 12, 20)
    assert (len(left.sub_losses), len(left.routes), len(left.batches)) == (0, num_microbatches, num_microbatches)
    assert [route.offered for route in left.routes] == [False] * num_microbatches
    assert math.isnan(left.loss)
    assert math.isnan(left.gradient_norm())
    assert left.weights is not None
    assert left.num_rows is not None
    assert left.weights.tolist() == left.num_rows.tolist() == [0] * num_microbatches
    assert left.weights.dtype == torch.float64
    assert not trainer.plan.holds(Promise.PARITY)
    assert f"parity: step 2 was left out: {left.left_out}" in str(trainer.plan)
    other = make(num_microbatches, [*ROWS[:2], *ROWS[2:4]], "4ba")
    other.fit()
    assert weights(trainer) == weights(other)


@BOTH
@pytest.mark.parametrize(("is_broken", "fails"), [(True, False), (False, True)])
def test_twenty_in_a_row_may_be_left_out(num_microbatches: int, is_broken: bool, fails: bool) -> None:
    many = [*[BAD] * MAX_LEFT_OUT, *([ROWS[0]] if is_broken else []), BAD, ROWS[1]]
    keeps = Keeps()
    trainer = make(num_microbatches, many, f"{len(many)}ba", observers=keeps, config={"on_divergence": "skip"})
    if fails:
        with pytest.raises(DivergenceError):
            trainer.fit()
        assert trainer.clock.step == MAX_LEFT_OUT == 20
    else:
        trainer.fit()
        assert len(keeps.outcomes) == len(many)


@BOTH
def test_nothing_of_a_step_that_diverges_is_kept(num_microbatches: int) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    trainer = make(num_microbatches, [ROWS[0], BAD], "2ba", model=model)
    reference = make(num_microbatches, [ROWS[0]], "1ba", model=nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    reference.model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()})
    reference.fit()
    with pytest.raises(DivergenceError):
        trainer.fit()
    assert trainer.clock.step == 1
    for (name, one), other in zip(model.state_dict().items(), reference.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert all(one.grad is None for one in model.parameters())


@BOTH
def test_after_one_two_four_and_eight_steps_others_hands_are_looked_at(num_microbatches: int) -> None:
    trainer, looked = make(num_microbatches, budget="11ba"), list[int]()
    look = trainer.look_around
    trainer.look_around = lambda: (looked.append(trainer.clock.step), look())[1]  # type: ignore[method-assign, func-returns-value]
    with trainer:
        looked.clear()
        for step in range(11):
            trainer.step(ROWS[step % 6])
        assert looked == [1, 2, 4, 8]
    looked.clear()
    again = make(num_microbatches, budget="3ba")
    again.look_around = lambda: looked.append(again.clock.step)  # type: ignore[method-assign]
    again.fit()
    assert looked == [1, 2, 3]


def test_a_batch_that_is_no_batch_is_refused_before_it_teaches() -> None:
    trainer = make(data=None)
    short = Batch(ROWS[0], Lineage(torch.arange(3), torch.zeros(3, dtype=torch.int64)), None)
    with trainer, pytest.raises(BatchError):
        trainer.step(short)
    assert trainer.clock.step == 0


@BOTH
def test_gradients_that_somebody_left_are_not_the_step_s(num_microbatches: int) -> None:
    trainers = [make(num_microbatches, data=None, budget="1ba") for _ in range(2)]
    for parameter in trainers[0].model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    for trainer in trainers:
        with trainer:
            trainer.step(ROWS[0])
    assert weights(trainers[0]) == weights(trainers[1])


@BOTH
def test_the_outcome_tells_rates_norm_and_loss(num_microbatches: int) -> None:
    keeps = Keeps()
    trainer = make(num_microbatches, data=None, budget="1ba", observers=keeps)
    layer = nn.Linear(3, 1)
    layer.load_state_dict({name: one.clone() for name, one in trainer.model.state_dict().items()})
    loss = mse_loss(layer(ROWS[0][0]), ROWS[0][1])
    loss.backward()
    norm = math.sqrt(sum(float(one.grad.square().sum()) for one in layer.parameters() if one.grad is not None))
    with trainer:
        done = trainer.step(ROWS[0])
    assert done is keeps.outcomes[0]
    assert (done.learning_rates, keeps.begun) == ([0.1], [0])
    assert float(done.loss) == pytest.approx(loss.item())
    assert not done.loss.requires_grad
    assert [float(one) for one in done.sub_losses] == [float(done.loss)]
    assert done.gradient_norm() == pytest.approx(norm)


def test_without_observers_the_outcome_has_the_clock_and_the_loss() -> None:
    with make(data=None, budget="1ba") as trainer:
        done = trainer.step(ROWS[0])
    assert (done.clock, done.batches, done.learning_rates) == (trainer.clock, (), ())
    assert math.isnan(done.gradient_norm())
    assert float(done.loss) > 0


@BOTH
def test_rows_that_are_all_tombstones_teach_nothing(num_microbatches: int) -> None:
    keeps = Keeps()
    trainer = make(num_microbatches, data=None, budget="1ba", observers=keeps, methods=[EMA(half_life="1ba")])
    before = weights(trainer)
    gone = Batch(ROWS[0], Lineage(torch.full((4,), -1), torch.zeros(4, dtype=torch.int64)), None)
    with trainer:
        done = trainer.step(gone)
    assert weights(trainer) == before
    assert (float(done.loss), [float(one) for one in done.sub_losses], done.clock.step) == (0, [0], 1)
    assert math.isnan(done.gradient_norm())


@BOTH
def test_methods_change_gradients_before_they_are_committed(num_microbatches: int) -> None:
    clip = make(
        num_microbatches,
        data=None,
        budget="1ba",
        methods=[GradientClipping(clipping_type="norm", clipping_threshold=1e-3)],
    )
    before = torch.tensor(weights(clip))
    with clip:
        clip.step(ROWS[0])
    assert float((torch.tensor(weights(clip)) - before).norm()) == pytest.approx(1e-4, rel=1e-3)


@BOTH
def test_cadences_count_from_the_step_that_was_taken(num_microbatches: int) -> None:
    history = History()
    evaluation = Evaluation(ROWS[:1], {"zero": lambda *_: 0.0})
    make(num_microbatches, evaluation=evaluation, observers=history, config={"evaluate_every": "4ba"}).fit()
    assert [clock.step for clock, *_ in history.evaluations] == [4, 6]


@BOTH
def test_rows_and_tokens_are_counted_each_by_itself(num_microbatches: int) -> None:
    keeps, texts = Keeps(), [(torch.arange(24).view(4, 6), torch.zeros(4, 6, dtype=torch.int64))] * 2
    model = nn.Embedding(24, 2)
    make(
        num_microbatches,
        texts,
        "2ba",
        model=model,
        observers=keeps,
        loss=lambda model, data: model(data[0]).square().mean(),
    ).fit()
    assert [(one.clock.rows, one.clock.tokens) for one in keeps.outcomes] == [(4, 24), (8, 48)]


@BOTH
def test_a_batch_with_lineage_teaches_what_its_data_do(num_microbatches: int) -> None:
    known = Batch(ROWS[0], Lineage(torch.arange(4), torch.zeros(4, dtype=torch.int64)), None)
    trainers = [make(num_microbatches, data=None, budget="1ba") for _ in range(2)]
    for trainer, rows in zip(trainers, (ROWS[0], known), strict=True):
        with trainer:
            trainer.step(rows)
    assert weights(trainers[0]) == weights(trainers[1])


def test_between_bare_steps_kernels_are_as_the_user_left_them() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    trainer = make(data=None, budget="3ba")
    for step in range(2):
        trainer.step(ROWS[step])
        assert torch.are_deterministic_algorithms_enabled() == before
    with trainer:
        assert torch.are_deterministic_algorithms_enabled()
        trainer.step(ROWS[2])
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before


@BOTH
def test_fit_ends_with_a_checkpoint(num_microbatches: int, tmp_path: Path) -> None:
    make(num_microbatches, budget="3ba", config={"run_folder": tmp_path}).fit()
    newest, *_ = list_checkpoints(tmp_path / "checkpoints")
    assert newest.name == "step-00000003"
