"""A step that is left out leaves nothing behind but its place, its rows and what it withdraws."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import Regression
from cosmati.core.plan import Guarantee, Promise
from cosmati.errors import DivergenceError
from cosmati.optim import SGD
from cosmati.train import trainer as loop
from cosmati.train.config import RunConfig
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


class Counts(nn.Module):
    """Counts its forward passes in a buffer and in an attribute."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.layer(rows)
        return out


@BOTH
def test_what_a_step_has_moved_that_is_left_out_is_put_back(num_microbatches: int) -> None:
    trainer = make(num_microbatches, model=Counts(), config={"on_divergence": "skip"})
    passes = list[float]()
    with trainer:
        for rows in (ROWS[0], BAD, ROWS[1]):
            trainer.step(rows)
            passes.append(float(trainer.model.seen) / num_microbatches)  # type: ignore[arg-type]
    assert passes == [1, 1, 2]


def _noted(calls: list[int], remember: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    calls.append(1)
    return remember()


@BOTH
def test_only_who_leaves_steps_out_copies_what_they_may_move(
    num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = list[int]()
    for choice in ("stop", "skip"):
        trainer = make(num_microbatches, config={"on_divergence": choice})
        monkeypatch.setattr(trainer, "_remember", partial(_noted, copied, trainer._remember))
        with trainer:
            trainer.step(ROWS[0])
        assert len(copied) == (choice == "skip")


@BOTH
def test_a_good_step_sets_the_number_of_those_left_out_to_nothing(
    num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_LEFT_OUT", 1)
    trainer = make(num_microbatches, config={"on_divergence": "skip"})
    with trainer:
        for rows in (BAD, ROWS[0], BAD, ROWS[0], BAD):
            trainer.step(rows)
        with pytest.raises(DivergenceError):
            trainer.step(BAD)
        assert trainer.clock.step == 5


@BOTH
def test_a_step_that_is_left_out_withdraws_what_follows_from_its_rows(num_microbatches: int) -> None:
    trainer = make(num_microbatches, config={"on_divergence": "skip"})
    pairs = [("free", "body"), ("bound", "head"), ("late", "head")]
    held = [Guarantee(promise, True, "so far") for promise in Promise if promise is not Promise.NO_DIRECT_WRITE]
    held += [Guarantee(Promise.NO_DIRECT_WRITE, pair != pairs[1], f"of {pair}", pair) for pair in pairs]
    with trainer:
        trainer.step(ROWS[0])
        trainer._plan = dataclasses.replace(trainer._plan, guarantees=tuple(held))
        done = trainer.step(BAD)
        found = {(g.promise, g.pair): (g.holds, g.because) for g in trainer._plan.guarantees}
    assert done.left_out.startswith("The loss is nan at step 1")
    gone = (False, f"step 1 was left out: {done.left_out}")
    kept = (True, "so far")
    expected: dict[tuple[Promise, tuple[str, str] | None], tuple[bool, str]] = {
        **{(promise, None): kept for promise in (Promise.RESUME, Promise.ELASTIC, Promise.REPLAYABLE)},
        **{(promise, None): gone for promise in (Promise.PARITY, Promise.ISOLATED)},
        (Promise.NO_DIRECT_WRITE, pairs[0]): gone,
        (Promise.NO_DIRECT_WRITE, pairs[1]): (False, f"of {pairs[1]}"),
        (Promise.NO_DIRECT_WRITE, pairs[2]): gone,
    }
    assert found == expected


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_step_that_is_left_out_tells_which_rows_it_had(num_microbatches: int) -> None:
    keeps = Keeps()
    trainer = make(num_microbatches, config={"on_divergence": "skip"}, observers=keeps)
    with trainer:
        trainer.step(ROWS[0])
        trainer.step(BAD)
        trainer.step(BAD)
    for number, one in enumerate(keeps.outcomes[1:], start=1):
        assert (one.clock.step, one.clock.rows, one.clock.tokens) == (number + 1, 8 * (number + 1), 8 * (number + 1))
        assert [route.offered for route in one.routes] == [False] * num_microbatches
        assert [id_ for batch in one.batches for id_ in batch.lineage.row_ids.tolist()] == [
            *range(8 * number, 8 * number + 8)
        ]
        for zeros in (one.weights, one.num_rows):
            assert zeros is not None
            assert zeros.dtype is torch.float64
            assert zeros.tolist() == [0] * num_microbatches
        assert (len(one.sub_losses), one.taught, one.learning_rates) == (0, (), [0.1])
        assert math.isnan(one.loss)
        assert math.isnan(one.gradient_norm())


def test_rows_beside_which_others_are_given_can_be_left_out() -> None:
    """The short road asks of the first tensor alone how many rows there are."""

    def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(data["x"]).square().mean() * data["by"].mean()
        return found

    with make(loss=loss, config={"on_divergence": "skip"}) as trainer:
        done = [trainer.step({"x": rows, "by": torch.ones(3)}) for rows, _ in (ROWS[0], BAD)]
    assert [bool(one.left_out) for one in done] == [False, True]
    assert done[1].clock.rows == 16


@BOTH
def test_rows_and_tokens_of_a_step_that_is_left_out_are_counted_each_by_itself(num_microbatches: int) -> None:
    settings = {"on_divergence": "skip"}
    loss = lambda model, data: model(data).mean() * math.nan  # noqa: E731
    with make(num_microbatches, model=nn.Embedding(24, 2), loss=loss, config=settings) as trainer:
        done = trainer.step(torch.arange(24).view(4, 6))
    assert (bool(done.left_out), done.clock.rows, done.clock.tokens) == (True, 4, 24)
