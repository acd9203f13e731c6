"""The contract of a loss: sums, weights, rows and tombstones."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.loss import (
    Classification,
    LanguageModel,
    Loss,
    MixedTarget,
    Regression,
    huggingface_loss,
    without_tombstones,
)
from cosmati.errors import BatchError


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_classification_sums_over_rows_that_count() -> None:
    x, y = logits(5, 3), torch.tensor([0, 1, -100, 2, 1])
    loss = Classification(3)(Identity(), (x, y))
    assert float(loss.weight) == 4
    torch.testing.assert_close(loss.mean(), F.cross_entropy(x, y))
    assert loss.per_row is not None
    torch.testing.assert_close(loss.per_row.sum(), loss.sum)


def test_probabilities_of_an_ignored_position_have_no_weight() -> None:
    x = logits(4, 3)
    soft = torch.eye(3)[[0, 1, 2, 0]]
    soft[3] = 0
    loss = Classification(3)(Identity(), (x, soft))
    assert float(loss.weight) == 3
    torch.testing.assert_close(loss.mean(), F.cross_entropy(x[:3], torch.tensor([0, 1, 2])))


def test_mixed_targets_interpolate_sums_and_weights() -> None:
    x, first, second = logits(4, 3), torch.tensor([0, 1, -100, 2]), torch.tensor([1, 1, 2, -100])
    loss = Classification(3).compare(x, MixedTarget(first, second, torch.tensor(0.25)))
    expected = 0.25 * F.cross_entropy(x, first, reduction="sum") + 0.75 * F.cross_entropy(x, second, reduction="sum")
    torch.testing.assert_close(loss.sum, expected)
    assert float(loss.weight) == 3


def test_language_model_predicts_the_next_token() -> None:
    tokens = torch.randint(0, 7, (3, 9), generator=torch.Generator().manual_seed(1))

    class Bigram(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.one_hot(tokens.long(), 7) * 2.0

    loss = LanguageModel(7)(Bigram(), tokens)
    manual = sum(
        float(torch.log_softmax(F.one_hot(tokens[r, t], 7) * 2.0, 0)[tokens[r, t + 1]])
        for r in range(3)
        for t in range(8)
    )
    assert float(loss.weight) == 24
    assert float(loss.sum) == pytest.approx(-manual, rel=1e-5)


def test_regression_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(BatchError, match="the shapes must be equal"):
        Regression()(Identity(), (torch.ones(4, 1), torch.ones(4)))
    loss = Regression()(Identity(), (torch.ones(4, 2), torch.zeros(4, 2)))
    assert float(loss.mean()) == 1.0


def test_tombstones_leave_even_where_the_loss_is_infinite() -> None:
    per_row = torch.tensor([1.0, float("inf"), 3.0])
    lineage = Lineage(torch.tensor([5, TOMBSTONE, 6]), torch.zeros(3, dtype=torch.int64))
    loss = without_tombstones(Loss(per_row.sum(), 3.0, per_row), Batch(torch.ones(3), lineage).present)
    assert isinstance(loss, Loss)
    assert (float(loss.sum), float(loss.weight)) == (4.0, 2.0)
    with pytest.raises(BatchError, match="doesn't tell rows apart"):
        without_tombstones(per_row.sum(), Batch(torch.ones(3), lineage).present)


def test_hugging_face_weight_is_the_number_of_predicted_labels() -> None:
    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    class TinyForCausalLM(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
            x = F.one_hot(input_ids, 5) * 1.0
            return Output(F.cross_entropy(x[:, :-1].movedim(-1, 1), labels[:, 1:]))

    ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    labels = ids.clone()
    labels[0, 3] = -100
    loss = huggingface_loss(TinyForCausalLM(), {"input_ids": ids, "labels": labels})
    assert int(loss.weight) == 5
    torch.testing.assert_close(loss.mean(), TinyForCausalLM()(ids, labels).loss)
    with pytest.raises(BatchError, match="labels"):
        huggingface_loss(TinyForCausalLM(), {"input_ids": ids})


def test_probabilities_of_other_classes_are_refused() -> None:
    with pytest.raises(BatchError, match=r"don't fit logits \(2, 5\).* here 5"):
        Classification(3).compare(torch.zeros(2, 5), torch.full((2, 3), 1 / 3))
