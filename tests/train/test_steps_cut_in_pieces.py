"""A step for which memory is too short is taken anew, in pieces that add up to the same step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from cosmati.core.loss import Regression
from cosmati.core.plan import Promise
from cosmati.errors import OutOfMemoryError
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.cutting import Cuts
from cosmati.train.trainer import Trainer

GENERATOR = torch.Generator().manual_seed(5)
Rows = tuple[Tensor, Tensor]
ROWS: list[Rows] = [(torch.randn(8, 3, generator=GENERATOR), torch.randn(8, 1, generator=GENERATOR)) for _ in range(3)]
BAD: Rows = (torch.full((8, 3), math.nan), torch.zeros(8, 1))
BOTH = pytest.mark.parametrize("num_microbatches", [1, 2])


def make(num_microbatches: int = 1, **given: Any) -> Trainer:
    torch.manual_seed(1)
    settings = {"budget": "40ba", "num_microbatches": num_microbatches, "num_threads": 1, "seed": 7}
    config = RunConfig(**settings | given.pop("config", {}))
    model = given.pop("model", None) or nn.Linear(3, 1)
    return Trainer(model, given.pop("loss", Regression()), optimizers=[SGD(lr=0.1)], config=config, **given)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def stepped(model: nn.Linear, rows: Tensor, targets: Tensor) -> Tensor:
    """Return the weights of a layer after a step of gradient descent by hand, in float64."""
    weight, bias = (one.detach().double().requires_grad_() for one in (model.weight, model.bias))
    loss = (rows.double() @ weight.T + bias - targets.double()).square().mean()
    found = [one - 0.1 * g for one, g in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True)]
    return torch.cat([one.detach().flatten() for one in found])


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


class Short:
    """A squared error for which memory is too short beyond some rows, after some calls; notes what it's called with."""

    forward_caches = ("calls",)

    def __init__(self, limit: int, first: Callable[[Rows], object] = lambda _: None, after: int = 0) -> None:
        self.limit, self.calls, self.first, self.after = limit, list[int](), first, after

    def __call__(self, model: nn.Module, data: Rows) -> Tensor:
        self.calls.append(len(data[0]))
        self.first(data)
        if len(data[0]) > self.limit and len(self.calls) > self.after:
            msg = f"no room for {len(data[0])} rows"
            raise MemoryError(msg)
        return mse_loss(model(data[0]), data[1])


@pytest.mark.filterwarnings("ignore:Memory is too short")
@BOTH
def test_where_memory_is_short_a_step_is_taken_anew_in_smaller_pieces(num_microbatches: int) -> None:
    loss = Short(2)
    trainer = make(num_microbatches, loss=loss)
    layer = trainer.model
    assert isinstance(layer, nn.Linear)
    with trainer:
        expected = stepped(layer, *ROWS[0])
        with pytest.warns(UserWarning, match=r"Memory is too short for step 0 \(no room for \d rows\)"):
            done = trainer.step(ROWS[0])
        torch.testing.assert_close(weights(layer).double(), expected, rtol=1e-5, atol=1e-6)
        assert [len(batch.data[0]) for batch in done.given] == [2] * 4
        assert {1: [8, 4, 2, 2, 2, 2], 2: [4, 2, 2, 2, 2]}[num_microbatches] == loss.calls
        assert trainer.cuts.made == {1: [(0, 2), (0, 4)], 2: [(0, 2)]}[num_microbatches]
        loss.calls.clear()
        expected = stepped(layer, *ROWS[1])
        trainer.step(ROWS[1])
        assert loss.calls == [2] * 4, "from then on at once"
        torch.testing.assert_close(weights(layer).double(), expected, rtol=1e-5, atol=1e-6)
        assert trainer.clock.step == 2
        assert trainer.clock.rows == 16


@pytest.mark.filterwarnings("ignore:Memory is too short")
@BOTH
def test_a_step_that_an_earlier_attempt_has_cut_is_cut_at_once(num_microbatches: int) -> None:
    loss = Short(8)
    trainer = make(num_microbatches, loss=loss)
    with trainer:
        trainer.cuts = Cuts(coming=[(1, 4)])
        trainer.step(ROWS[0])
        assert loss.calls == [8 // num_microbatches] * num_microbatches
        loss.calls.clear()
        with pytest.warns(UserWarning, match=r"for step 1 \(as in an earlier attempt\)"):
            trainer.step(ROWS[1])
        assert loss.calls == [2 // num_microbatches] * 4 * num_microbatches
        assert trainer.cuts.made == [(1, 4)]


@pytest.mark.filterwarnings("ignore:Memory is too short")
@BOTH
def test_rows_that_cannot_be_cut_further_are_refused(num_microbatches: int) -> None:
    loss = Short(0)
    trainer = make(num_microbatches, loss=loss)
    said = r"also with microbatches of 1 rows: no room for 1 rows They aren't cut further: 1 rows can't be cut in two"
    with trainer, pytest.raises(OutOfMemoryError, match=said) as refused:
        trainer.step(ROWS[0])
    assert loss.calls == [8, 4, 2, 1][num_microbatches - 1 :]
    assert refused.value.__cause__ is None
    assert trainer.clock.step == 0


@BOTH
def test_rows_that_an_attempt_has_changed_are_not_taken_anew(num_microbatches: int) -> None:
    loss = Short(1, lambda data: data[0].mul_(2.0))
    trainer = make(num_microbatches, loss=loss)
    rows = (ROWS[0][0].clone(), ROWS[0][1])
    with trainer, pytest.raises(OutOfMemoryError, match=r"no room for \d rows It can't be taken anew"):
        trainer.step(rows)
    assert loss.calls == [8 // num_microbatches]


@pytest.mark.filterwarnings("ignore:Memory is too short")
@pytest.mark.parametrize("counts", [False, True])
@BOTH
def test_an_attempt_that_moved_what_is_no_statistic_cannot_be_resumed(num_microbatches: int, counts: bool) -> None:
    model = Counts() if counts else nn.Linear(3, 1)
    loss = Short(2, lambda data: model(data[0]), after=num_microbatches)
    with make(num_microbatches, loss=loss, model=model) as trainer:
        trainer.step(ROWS[0])
        before = trainer.plan.holds(Promise.RESUME), trainer.plan.holds(Promise.PARITY)
        with pytest.warns(UserWarning, match="cut in two"):
            trainer.step(ROWS[0])
        after = trainer.plan.holds(Promise.RESUME), trainer.plan.holds(Promise.PARITY)
    assert before == (True, True)
    assert after == (not counts, False)
