"""MixUp against the formula, and its draws against the Beta distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.mixup import MixUp, mixup_batch, sample_mixing

torch.set_num_threads(1)


def position(loss: Any = None, step: int = 0, microbatch: int = 0) -> Position:
    return Position(
        Clock(step=step), Budget(Time.parse("10ba")), 3, microbatch, nn.Identity(), loss or Classification(4)
    )


def batch_of(input: Tensor, target: Tensor) -> Batch:
    return Batch((input, target), Lineage.of_rows(100, len(input)))


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 4.0])
def test_draws_are_folded_beta(alpha: float) -> None:
    generator = torch.Generator().manual_seed(int(alpha * 100))
    draws = np.array([sample_mixing(alpha, generator) for _ in range(4000)])
    assert draws.min() >= 0
    assert draws.max() <= 0.5
    folded = stats.kstest(draws, lambda x: 2 * stats.beta.cdf(np.minimum(x, 0.5), alpha, alpha))
    assert folded.pvalue > 1e-3
    second_moment = ((draws - 0.5) ** 2).mean()
    assert second_moment == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)


def test_draws_at_the_ends_of_alpha() -> None:
    assert sample_mixing(0.0) == 0.0
    tiny = [sample_mixing(1e-4, torch.Generator().manual_seed(seed)) for seed in range(50)]
    assert max(tiny) < 0.5
    assert min(tiny) == 0.0
    assert sample_mixing(1e8, torch.Generator().manual_seed(0)) == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(BatchError, match="alpha"):
        sample_mixing(-1.0)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 99))
def test_function_follows_the_formula(rows: int, mixing: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn(rows, 2, 3, generator=generator)
    target = torch.randint(4, (rows,), generator=generator)
    indices = torch.randperm(rows, generator=generator)
    mixed, permuted, used = mixup_batch(input, target, mixing, indices=indices)
    old = input.double().numpy()
    for row in range(rows):
        expected = (1 - mixing) * old[row] + mixing * old[int(indices[row])]
        np.testing.assert_allclose(mixed[row].numpy(), expected, atol=1e-5)
        assert permuted[row] == target[indices[row]]
    assert used == mixing


def test_function_draws_what_is_missing() -> None:
    input, target = torch.randn(16, 2), torch.arange(16)
    first = mixup_batch(input, target, generator=torch.Generator().manual_seed(5))
    second = mixup_batch(input, target, generator=torch.Generator().manual_seed(5))
    assert torch.equal(first[0], second[0])
    assert first[2] == second[2]
    assert sorted(first[1].tolist()) == list(range(16))
    torch.manual_seed(0)
    default = mixup_batch(input, target)
    torch.manual_seed(0)
    assert torch.equal(mixup_batch(input, target)[0], default[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_method_equals_function(dtype: torch.dtype) -> None:
    input, target = torch.randn(8, 3).to(dtype), torch.randint(4, (8,))
    at = position()
    result = MixUp(alpha=0.4).batch(batch_of(input, target), at)
    mixed, permuted, mixing = mixup_batch(input, target, alpha=0.4, generator=at.generator("mixup"))
    assert torch.equal(result.input, mixed)
    assert result.input.dtype == dtype
    eye = torch.eye(4)
    torch.testing.assert_close(result.target, (1 - mixing) * eye[target] + mixing * eye[permuted])


def test_interpolated_loss_equals_loss_of_mixed_targets() -> None:
    input, target, logits = torch.randn(8, 3), torch.randint(4, (8, 5)), torch.randn(8, 4, 5)
    loss, batch = Classification(4), batch_of(input, target)
    soft = MixUp(alpha=1.0).batch(batch, position())
    hard = MixUp(alpha=1.0, interpolate_loss=True).batch(batch, position())
    assert torch.equal(soft.input, hard.input)
    torch.testing.assert_close(loss.compare(logits, soft.target).per_row, loss.compare(logits, hard.target).per_row)
    assert hard.target.first is target


def test_probabilities_are_mixed_as_they_are() -> None:
    target = torch.softmax(torch.randn(6, 4), 1)
    result = MixUp(alpha=1.0).batch(batch_of(torch.randn(6, 2), target), position(loss=lambda *_: None))
    torch.testing.assert_close(result.target.sum(1), torch.ones(6))
    assert not torch.equal(result.target, target)


def test_ignored_targets_have_no_probability() -> None:
    target = torch.tensor([[-100, 1], [-100, 2]])
    soft = MixUp(alpha=1.0).batch(batch_of(torch.randn(2, 2), target), position()).target
    assert float(soft[:, :, 0].abs().sum()) == 0
    torch.testing.assert_close(soft[:, :, 1].sum(1), torch.ones(2))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(0, 50))
def test_lineage_names_both_parents(rows: int, step: int) -> None:
    ids = torch.arange(rows, dtype=torch.float64)[:, None] + 100
    result = MixUp(alpha=1.0).batch(batch_of(ids, torch.zeros(rows, dtype=torch.int64)), position(step=step))
    parents = result.lineage.parents
    assert parents is not None
    mixing = sample_mixing(1.0, position(step=step).generator("mixup"))
    pixels = (1 - mixing) * parents[:, 0].double() + mixing * parents[:, 1].double()
    torch.testing.assert_close(result.input[:, 0], pixels, rtol=0, atol=1e-9)
    assert torch.equal(result.lineage.row_ids, torch.arange(rows) + 100)


def test_tombstones_mix_with_nobody() -> None:
    batch = batch_of(torch.randn(12, 3), torch.randint(4, (12,)))
    gone = torch.tensor([2, 7])
    row_ids = batch.lineage.row_ids.clone()
    row_ids[gone] = TOMBSTONE
    deleted = Batch(
        (batch.input.index_fill(0, gone, torch.nan), batch.target),
        Lineage(row_ids, torch.zeros(12, dtype=torch.int64)),
    )
    whole, result = MixUp(alpha=1.0).batch(batch, position()), MixUp(alpha=1.0).batch(deleted, position())
    present = row_ids != TOMBSTONE
    assert bool(result.input[present].isfinite().all())
    parents, old = result.lineage.parents, whole.lineage.parents
    assert parents is not None
    assert old is not None
    assert not bool((parents[present] == TOMBSTONE).any())
    others = present & ~torch.isin(old[:, 1], gone + 100)
    assert torch.equal(result.input[others], whole.input[others])
    assert int(others.sum()) >= 8


def test_draws_belong_to_the_position() -> None:
    batch = batch_of(torch.randn(8, 3), torch.randint(4, (8,)))
    method = MixUp(alpha=1.0)
    first = method.batch(batch, position(step=4)).input
    assert torch.equal(first, method.batch(batch, position(step=4)).input)
    assert not torch.equal(first, method.batch(batch, position(step=5)).input)
    assert not torch.equal(first, method.batch(batch, position(step=4, microbatch=1)).input)


def test_off_is_the_same_batch_and_declarations() -> None:
    batch = batch_of(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64))
    off = MixUp(alpha=0.0, interpolate_loss=True)
    assert off.batch(batch, position()) is batch
    assert (off.couples, off.claims) == (frozenset(), frozenset())
    assert (MixUp().stage, MixUp().couples, MixUp().claims) == (Stage.MIX, frozenset({"rows"}), frozenset())
    assert MixUp(interpolate_loss=True).claims == {"loss interpolation"}
    assert "tokens" not in MixUp().reads


def test_bad_input_is_refused() -> None:
    for alpha in (-0.1, float("inf"), float("nan")):
        with pytest.raises(PlanError, match="alpha"):
            MixUp(alpha=alpha)
    with pytest.raises(BatchError, match="token"):
        mixup_batch(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2))
    with pytest.raises(BatchError, match="mixing"):
        mixup_batch(torch.zeros(2, 3), torch.zeros(2), 1.2)
    nest = Batch(({"a": torch.zeros(2, 3)}, torch.zeros(2)), Lineage.of_rows(0, 2))
    with pytest.raises(BatchError, match="one input tensor"):
        MixUp().batch(nest, position())
    with pytest.raises(PlanError, match="num_classes"):
        MixUp().batch(batch_of(torch.zeros(2, 3), torch.tensor([0, 1])), position(loss=lambda *_: None))
