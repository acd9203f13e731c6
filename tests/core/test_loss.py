"""The contract of a loss: sums, weights, rows and tombstones."""

import types
from typing import NamedTuple

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
from cosmati.core.own_loss import own_mixed_logits
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


def test_a_mean_has_its_auxiliary_terms() -> None:
    loss = Loss(torch.tensor(6.0), 4.0, aux={"balance": torch.tensor(0.5), "z": torch.tensor(0.25)})
    assert float(loss.mean()) == 2.25
    assert float(Loss(torch.tensor(6.0), torch.tensor(4.0)).mean()) == 1.5


def test_tombstones_take_their_weight_along_and_leave_the_auxiliary_terms() -> None:
    lineage = Lineage(torch.tensor([5, TOMBSTONE, 6]), torch.zeros(3, dtype=torch.int64))
    batch, aux = Batch(torch.ones(3), lineage), {"balance": torch.tensor(0.5)}
    per_row, weights = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    loss = without_tombstones(Loss(per_row.sum(), weights.sum(), per_row, weights, aux), batch.present)
    assert isinstance(loss, Loss)
    assert (float(loss.sum), float(loss.weight), loss.aux) == (4.0, 40.0, aux)
    assert loss.per_row is not None
    assert loss.per_row_weight is not None
    assert (loss.per_row.tolist(), loss.per_row_weight.tolist()) == ([1, 0, 3], [10, 0, 30])
    whole = Loss(per_row.sum(), 3.0)
    assert without_tombstones(whole, Batch(torch.ones(3), Lineage.of_rows(0, 3)).present) is whole
    with pytest.raises(BatchError, match="doesn't tell rows apart"):
        without_tombstones(whole, batch.present)


def test_rows_are_interpolated_as_the_sums_are() -> None:
    x, mixing = logits(3, 4, 2), torch.tensor(0.25)
    first, second = torch.tensor([[0, 1], [-100, 2], [3, 3]]), torch.tensor([[1, 1], [2, 0], [0, -100]])
    loss = Classification(4).compare(x, MixedTarget(first, second, mixing))
    rows = [F.cross_entropy(x, t, reduction="none").sum(1) for t in (first, second)]
    assert loss.per_row is not None
    assert loss.per_row_weight is not None
    torch.testing.assert_close(loss.per_row, 0.25 * rows[0] + 0.75 * rows[1])
    assert loss.per_row_weight.tolist() == [2, 0.25 + 1.5, 0.5 + 0.75]
    assert float(loss.weight) == 5


def test_regression_interpolates_between_two_targets() -> None:
    x, first, second = logits(3, 2), torch.zeros(3, 2), torch.ones(3, 2)
    loss = Regression().compare(x, MixedTarget(first, second, torch.tensor(0.25)))
    expected = 0.25 * x.square().mean(1) + 0.75 * (x - 1).square().mean(1)
    torch.testing.assert_close(loss.per_row, expected)
    torch.testing.assert_close(loss.sum, expected.sum())
    assert float(loss.weight) == 3
    assert loss.per_row_weight is None


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2, 3)])
def test_regressions_rows_are_means_over_their_outputs(shape: tuple[int, ...]) -> None:
    x, y = logits(*shape).double(), torch.full(shape, 0.5).double()
    loss = Regression()(Identity(), (x, y))
    expected = [sum((float(v) - 0.5) ** 2 for v in row.flatten()) / row.numel() for row in x]
    assert loss.per_row is not None
    assert loss.per_row.tolist() == pytest.approx(expected, rel=1e-5)
    assert (loss.per_row.dtype, loss.weight) == (torch.float32, 5.0)


def test_ignored_targets_are_minus_100_unless_said_otherwise() -> None:
    x, target = logits(3, 4), torch.tensor([0, 1, 2])
    assert Classification(4).ignore_index == LanguageModel(4).ignore_index == F.cross_entropy.__defaults__[2]  # type: ignore[index]
    loss = Classification(4, ignore_index=1).compare(x, target)
    assert float(loss.weight) == 2
    torch.testing.assert_close(loss.sum, F.cross_entropy(x[[0, 2]], target[[0, 2]], reduction="sum"))
    tokens = torch.tensor([[0, 1, 2, 1]])
    table = nn.Embedding(4, 4)
    assert float(LanguageModel(4, ignore_index=1)(table, tokens).weight) == 1
    assert LanguageModel().num_classes == 256, "bytes"


def test_a_language_models_targets_may_be_given_and_its_output_may_be_an_object() -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 5)

        def forward(self, tokens: Tensor) -> object:
            return types.SimpleNamespace(logits=self.table(tokens))

    model, tokens = Output(), torch.tensor([[0, 1, 2], [4, 3, 2]])
    given = LanguageModel(5)(model, (tokens[:, :-1], tokens[:, 1:].int()))
    assert torch.equal(given.sum, LanguageModel(5)(model, tokens).sum)
    soft = LanguageModel(5)(model, (tokens[:, :-1], F.one_hot(tokens[:, 1:], 5).movedim(-1, 1).float()))
    torch.testing.assert_close(soft.sum, given.sum)
    assert float(soft.weight) == float(given.weight) == 4


def test_half_precision_logits_are_compared_in_float32() -> None:
    x, y = logits(4, 3).bfloat16(), torch.tensor([0, 1, 2, 0])
    assert torch.equal(Classification(3).compare(x, y).sum, F.cross_entropy(x.float(), y, reduction="none").sum())


def test_hugging_face_labels_are_shifted_in_causal_models_alone() -> None:
    class Output(NamedTuple):
        loss: Tensor

    class BertForMaskedLM(nn.Module):
        def forward(self, labels: Tensor) -> Output:
            seen.append(labels)
            return Output(torch.tensor(2.0))

    class GPT2LMHeadModel(BertForMaskedLM): ...

    seen: list[Tensor] = []
    labels = torch.tensor([[7, -100, 3, -100]])
    masked, causal = (huggingface_loss(model(), {"labels": labels}) for model in (BertForMaskedLM, GPT2LMHeadModel))
    assert (int(masked.weight), float(masked.sum)) == (2, 4.0)
    assert (int(causal.weight), float(causal.sum)) == (1, 2.0)
    assert all(torch.equal(given, labels) for given in seen)
    nothing = huggingface_loss(BertForMaskedLM(), {"labels": torch.full((1, 3), -100)})
    assert (int(nothing.weight), float(nothing.sum)) == (0, 0.0)
    assert seen[-1].tolist() == [[0, 0, 0]], "a mean over no labels would be NaN"


def test_labels_of_two_rows_are_mixed_by_models_with_a_loss_of_their_own() -> None:
    with pytest.raises(BatchError, match="The Identity isn't a Hugging Face model with a loss of its own"):
        own_mixed_logits(Identity(), {"x": torch.ones(2)}, torch.tensor([0, 1]))
