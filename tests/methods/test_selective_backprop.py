"""Selective backprop: who is kept, how often, and what the scoring pass leaves behind."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, LanguageModel, Regression
from cosmati.core.method import Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.selective_backprop import SelectiveBackprop, select_using_loss, should_selective_backprop

torch.set_num_threads(1)
ON: dict[str, Any] = {"start": 0.0, "end": 1.0, "interrupt": 0}


def position(model: nn.Module, loss: Any, step: int = 0, epoch: int = 0) -> Position:
    clock = Clock(step=step, epoch=epoch, step_in_epoch=step)
    return Position(clock, Budget(Time.parse("10ba")), 3, 0, model, loss)


def absolute(output: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    assert reduction == "none"
    return (output - target).abs()


def batch_of_losses(losses: Tensor) -> Batch:
    """Make a regression batch whose rows have these losses under the identity."""
    return Batch((losses.sqrt(), torch.zeros(len(losses))), Lineage.of_rows(50, len(losses)))


def sequential_probabilities(num_rows: int, num_kept: int, keep: float) -> dict[frozenset[int], float]:
    """Return the probability of each set of ranks, drawing one after the other without replacement."""
    weights = ((np.arange(num_rows) + 0.5) / num_rows) ** (1 / keep - 1)
    result: dict[frozenset[int], float] = collections.defaultdict(float)
    for order in itertools.permutations(range(num_rows), num_kept):
        probability, left = 1.0, weights.sum()
        for rank in order:
            probability *= weights[rank] / left
            left -= weights[rank]
        result[frozenset(order)] += probability
    return result


@pytest.mark.long
@pytest.mark.parametrize("keep", [0.4, 0.6])
def test_rows_are_drawn_by_percentile(keep: float) -> None:
    losses = torch.tensor([3.0, 1.0, 9.0, 0.1, 4.0])
    ranks = {value: rank for rank, value in enumerate(sorted(losses.tolist()))}
    num_kept, num_draws = round(5 * keep), 4000
    counts: collections.Counter[frozenset[int]] = collections.Counter()
    generator = torch.Generator().manual_seed(8)
    for _ in range(num_draws):
        kept, target = select_using_loss(losses, torch.zeros(5), lambda x: x, absolute, keep, generator=generator)
        assert len(kept) == len(target) == num_kept
        counts[frozenset(ranks[value] for value in kept.tolist())] += 1
    for ranks_kept, probability in sequential_probabilities(5, num_kept, keep).items():
        deviation = (probability * (1 - probability) / num_draws) ** 0.5
        assert abs(counts[ranks_kept] / num_draws - probability) < 4.5 * deviation


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 20), st.floats(0.01, 1), st.integers(0, 99))
def test_a_fixed_number_in_their_order(num_rows: int, keep: float, seed: int) -> None:
    batch = batch_of_losses(torch.rand(num_rows, generator=torch.Generator().manual_seed(seed)))
    result = SelectiveBackprop(**ON, keep=keep).batch(batch, position(nn.Identity(), Regression(), epoch=seed))
    assert result.num_rows == max(1, int(keep * num_rows + 0.5))
    chosen = result.lineage.row_ids - 50
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert torch.equal(result.input, batch.input[chosen])


def test_method_equals_function_given_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of_losses(torch.rand(12))
    at = position(nn.Identity(), Regression())
    result = SelectiveBackprop(**ON, keep=0.3).batch(batch, at)
    draws = at.row_uniform("selective_backprop", batch)[:, 0]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: draws)
    kept, _ = select_using_loss(batch.input, batch.target, lambda x: x, absolute, 0.3)
    assert torch.equal(result.input, kept)


def test_choice_belongs_to_the_rows_and_the_epoch() -> None:
    batch, method = batch_of_losses(torch.rand(16)), SelectiveBackprop(**ON)
    at = position(nn.Identity(), Regression())
    first = method.batch(batch, at).lineage.row_ids
    order = torch.randperm(16)
    assert torch.equal(method.batch(batch.select(order), at).lineage.row_ids.sort().values, first)
    epochs = [method.batch(batch, position(nn.Identity(), Regression(), epoch=epoch)) for epoch in range(5)]
    assert len({tuple(result.lineage.row_ids.tolist()) for result in epochs}) > 1


def test_tombstones_are_the_last_resort() -> None:
    losses = torch.rand(8)
    for num_gone in (3, 6):
        row_ids = torch.arange(8)
        row_ids[:num_gone] = TOMBSTONE
        data = (losses.index_fill(0, torch.arange(num_gone), torch.nan), torch.zeros(8))
        batch = Batch(data, Lineage(row_ids, torch.zeros(8, dtype=torch.int64)))
        for epoch in range(20):
            at = position(nn.Identity(), Regression(), epoch=epoch)
            kept = SelectiveBackprop(**ON).batch(batch, at).lineage.row_ids
            assert len(kept) == 4
            assert int((kept != TOMBSTONE).sum()) == min(4, 8 - num_gone)


def test_tombstones_leave_the_odds_of_the_others() -> None:
    row_ids = torch.tensor([TOMBSTONE, 5, 6, TOMBSTONE])
    batch = Batch(
        (torch.tensor([9.0, 1.0, 2.0, 9.0]), torch.zeros(4)),
        Lineage(row_ids, torch.zeros(4, dtype=torch.int64)),
    )
    method = SelectiveBackprop(**ON, keep=0.25)
    hard = sum(
        int(method.batch(batch, position(nn.Identity(), Regression(), epoch=epoch)).lineage.row_ids[0] == 6)
        for epoch in range(1000)
    )
    probability = 0.75**3 / (0.75**3 + 0.25**3)
    assert hard / 1000 == pytest.approx(probability, abs=0.03)


def test_scoring_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = Batch((torch.randn(8, 4), torch.randint(3, (8,))), Lineage.of_rows(0, 8))
    state = torch.get_rng_state()
    result = SelectiveBackprop(**ON).batch(batch, position(model, Classification(3)))
    assert result.num_rows == 4
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())

    def broken(*_: object) -> Any:
        msg = "broken"
        raise KeyError(msg)

    with pytest.raises(KeyError):
        SelectiveBackprop(**ON).batch(batch, position(model, broken))
    assert [module.training for module in model.modules()] == modes


def test_sequences_are_scored_by_their_mean_token() -> None:
    loss, model = LanguageModel(num_classes=5), nn.Embedding(5, 5)
    input, target = torch.randint(5, (6, 7)), torch.randint(5, (6, 7))
    target[0] = -100
    target[1, 1:] = -100
    with torch.no_grad():
        model.weight[:, 0] = -5.0
    target[1, 0] = 0
    target[2:] = target[2:].clamp(min=1)
    batch = Batch((input, target), Lineage.of_rows(0, 6))
    kept = collections.Counter[int]()
    for epoch in range(50):
        kept.update(
            SelectiveBackprop(**ON, keep=0.17).batch(batch, position(model, loss, epoch=epoch)).lineage.row_ids.tolist()
        )
    assert kept[1] > 15
    assert kept[0] == 0


def test_small_images_are_scored_and_full_ones_kept() -> None:
    seen: list[tuple[int, ...]] = []

    class Watch(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(tuple(input.shape))
            return input.mean((1, 2, 3))

    batch = Batch((torch.rand(6, 3, 8, 8), torch.zeros(6)), Lineage.of_rows(0, 6))
    result = SelectiveBackprop(**ON, scale_factor=0.5).batch(batch, position(Watch(), Regression()))
    assert seen == [(6, 3, 4, 4)]
    assert torch.equal(result.input, batch.input[result.lineage.row_ids])
    kept, _ = select_using_loss(torch.rand(4, 2, 8), torch.zeros(4), lambda x: x.mean((1, 2)), absolute, 0.5, 0.25)
    assert kept.shape == (2, 2, 8)
    maps, _ = select_using_loss(torch.rand(4, 2), torch.zeros(4, 2), lambda x: x, absolute, 0.5)
    assert maps.shape == (2, 2)


@given(st.floats(0, 1), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1), st.integers(0, 5))
def test_interval_and_interruptions(elapsed: float, index: int, start: float, end: float, interrupt: int) -> None:
    expected = start <= elapsed < end and (interrupt == 0 or index % interrupt != interrupt - 1)
    assert should_selective_backprop(elapsed, index, start, end, interrupt) is expected


def test_method_keeps_to_its_interval() -> None:
    batch = batch_of_losses(torch.rand(4))
    sizes = [
        SelectiveBackprop().batch(batch, position(nn.Identity(), Regression(), step)).num_rows for step in range(10)
    ]
    assert sizes == [4, 4, 4, 4, 4, 4, 2, 4, 2, 4]
    assert SelectiveBackprop().batch(batch, position(nn.Identity(), Regression())) is batch
    assert SelectiveBackprop(**ON, keep=1.0).batch(batch, position(nn.Identity(), Regression())) is batch


def test_declarations() -> None:
    method, budget = SelectiveBackprop(), Budget(Time.parse("10ba"))
    assert (method.stage, method.couples, method.claims) == (Stage.SELECT, frozenset({"rows"}), frozenset())
    assert method.shapes(budget) == 2
    assert (SelectiveBackprop(keep=1.0).couples, SelectiveBackprop(keep=1.0).shapes(budget)) == (
        frozenset(),
        1,
    )


def test_bad_input_is_refused() -> None:
    for options in (
        {"keep": 0.0},
        {"keep": 1.2},
        {"scale_factor": 2.0},
        {"start": 0.9, "end": 0.5},
        {"interrupt": -1},
    ):
        with pytest.raises(PlanError):
            SelectiveBackprop(**options)
    input, target = torch.rand(4, 2), torch.zeros(4, 2)
    with pytest.raises(BatchError, match="keep"):
        select_using_loss(input, target, lambda x: x, absolute, 0.0)
    with pytest.raises(BatchError, match="scale"):
        select_using_loss(input, target, lambda x: x, absolute, 0.5, 0.5)
    with pytest.raises(BatchError, match="scale"):
        select_using_loss(input[..., None], target, lambda x: x, absolute, 0.5, 2.0)
    with pytest.raises(BatchError, match="reduction"):
        select_using_loss(input, target, lambda x: x, lambda *_, **__: torch.zeros(()), 0.5)
    scalar = position(nn.Identity(), lambda model, data: model(data[0]).mean())
    with pytest.raises(PlanError, match="per_row"):
        SelectiveBackprop(**ON).batch(batch_of_losses(torch.rand(4)), scalar)
