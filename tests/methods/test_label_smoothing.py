"""Label smoothing against the formula, written out element by element."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification, LanguageModel, MixedTarget, Regression
from cosmati.core.method import Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.label_smoothing import LabelSmoothing, smooth_labels

torch.set_num_threads(1)


def position(loss: Any) -> Position:
    return Position(Clock(), Budget(Time.parse("10ba")), 3, 0, nn.Identity(), loss)


def batch_of(input: Tensor, target: Any) -> Batch:
    return Batch((input, target), Lineage.of_rows(0, len(input)))


def reference(target: Tensor, num_classes: int, smoothing: float, ignore: int = -100) -> np.ndarray:
    """One position after the other, in float64."""
    result = np.zeros((target.shape[0], num_classes, *target.shape[1:]))
    for where in itertools.product(*map(range, target.shape)):
        for class_index in range(num_classes):
            if target[where] != ignore:
                hit = float(class_index == int(target[where]))
                result[where[0], class_index, *where[1:]] = (1 - smoothing) * hit + smoothing / num_classes
    return result


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([(), (3,), (2, 2)]),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_indices_follow_the_formula(
    rows: int, num_classes: int, positions: tuple[int, ...], smoothing: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(num_classes, (rows, *positions), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.3] = -100
    logits = torch.empty(rows, num_classes, *positions)
    soft = smooth_labels(logits, target, smoothing)
    np.testing.assert_allclose(soft.numpy(), reference(target, num_classes, smoothing), atol=1e-6)
    learnt = target != -100
    torch.testing.assert_close(soft.sum(1)[learnt], torch.ones(int(learnt.sum())))
    assert soft.dtype == torch.float32


def test_equals_torch_cross_entropy_with_label_smoothing() -> None:
    logits, target = torch.randn(8, 5, 3), torch.randint(5, (8, 3))
    expected = nn.functional.cross_entropy(logits, target, label_smoothing=0.2)
    loss = Classification(5).compare(logits, smooth_labels(logits, target, 0.2))
    torch.testing.assert_close(loss.mean(), expected)


def test_soft_targets_keep_their_type() -> None:
    target = torch.softmax(torch.randn(4, 3, dtype=torch.float64), 1)
    soft = smooth_labels(target, target, 0.25)
    torch.testing.assert_close(soft, 0.75 * target + 0.25 / 3, rtol=0, atol=1e-12)
    ones = torch.tensor([[0, 1, 0]])
    assert smooth_labels(torch.zeros(1, 3), ones, 0.3).tolist()[0] == pytest.approx([0.1, 0.8, 0.1])
    assert smooth_labels(torch.zeros(1, 3), torch.tensor([1])).tolist()[0] == pytest.approx([1 / 30, 28 / 30, 1 / 30])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_method_equals_function(dtype: torch.dtype) -> None:
    target = torch.tensor([0, 3, 2], dtype=dtype)
    result = LabelSmoothing(smoothing=0.3).batch(batch_of(torch.zeros(3, 2), target), position(Classification(4)))
    assert torch.equal(result.target, smooth_labels(torch.zeros(3, 4), target, 0.3))


def test_mixed_targets_are_smoothed_both() -> None:
    first, second = torch.tensor([0, 1]), torch.tensor([1, 2])
    mixed = MixedTarget(first, second, torch.tensor(0.7))
    at = position(Classification(3))
    target = LabelSmoothing().batch(batch_of(torch.zeros(2, 2), mixed), at).target
    logits = torch.randn(2, 3)
    assert torch.equal(target.first, smooth_labels(logits, first))
    assert torch.equal(target.second, smooth_labels(logits, second))
    soft = 0.7 * target.first + 0.3 * target.second
    torch.testing.assert_close(
        Classification(3).compare(logits, target).sum, Classification(3).compare(logits, soft).sum
    )


def test_language_model_smooths_along_the_classes() -> None:
    loss = LanguageModel(num_classes=6)
    tokens = torch.randint(6, (3, 5))
    model = nn.Embedding(6, 6)
    result = LabelSmoothing(smoothing=0.2).batch(Batch(tokens, Lineage.of_rows(0, 3)), position(loss))
    logits = model(tokens[:, :-1]).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.2)
    torch.testing.assert_close(loss(model, result.data).mean(), expected)
    pair = LabelSmoothing(smoothing=0.2).batch(batch_of(tokens[:, :-1], tokens[:, 1:]), position(loss))
    assert torch.equal(pair.target, result.target)


def test_ignored_positions_have_neither_loss_nor_gradient() -> None:
    target = torch.tensor([[1, -7, 0], [-7, -7, 2]])
    loss = Classification(3, ignore_index=-7)
    logits = torch.randn(2, 3, 3, requires_grad=True)
    method, at = LabelSmoothing(smoothing=0.5), position(loss)
    batch = method.batch(batch_of(torch.zeros(2, 1), target), at)
    (gradient,) = torch.autograd.grad(loss.compare(logits, batch.target).sum, logits)
    learnt = (target != -7)[:, None].expand(2, 3, 3)
    assert bool((gradient[~learnt] == 0).all())
    assert bool((gradient[learnt] != 0).all())
    again = method.batch(batch, at).target
    assert torch.equal(again == 0, ~learnt)


def test_rows_without_labels_are_smoothed_where_nothing_is_ignored() -> None:
    target = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    result = LabelSmoothing(smoothing=0.2).batch(batch_of(torch.zeros(2, 2), target), position(lambda *_: None))
    torch.testing.assert_close(result.target, torch.tensor([[0.1, 0.1], [0.9, 0.9]]))


def test_off_is_the_same_batch_and_declarations() -> None:
    batch = batch_of(torch.zeros(2, 2), torch.tensor([0, 1]))
    assert LabelSmoothing(smoothing=0.0).batch(batch, position(None)) is batch
    method = LabelSmoothing()
    assert (method.stage, method.couples, method.claims, method.reads) == (
        Stage.LABEL,
        frozenset(),
        frozenset(),
        frozenset(),
    )


def test_bad_input_is_refused() -> None:
    with pytest.raises(PlanError, match="smoothing"):
        LabelSmoothing(smoothing=1.5)
    with pytest.raises(BatchError, match="don't fit"):
        smooth_labels(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))
    batch = batch_of(torch.zeros(2, 2), torch.tensor([0, 1]))
    with pytest.raises(PlanError, match="num_classes"):
        LabelSmoothing().batch(batch, position(lambda *_: None))
    with pytest.raises(BatchError, match="Regression"):
        LabelSmoothing().batch(batch_of(torch.zeros(2, 2), torch.zeros(2, 2)), position(Regression()))
    with pytest.raises(BatchError, match="class dimension"):
        LabelSmoothing().batch(batch_of(torch.zeros(2, 2), torch.zeros(2)), position(Classification(3)))
    with pytest.raises(BatchError, match="the loss has 3 classes"):
        smooth_labels(torch.zeros(2, 3), torch.tensor([0, 3]))
