"""A loss is the sum over its rows by the textbook, over a weight that is sound, and says what it can't be."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import (
    Classification,
    LanguageModel,
    Loss,
    MixedTarget,
    Regression,
    as_loss,
    huggingface_loss,
    without_tombstones,
)
from cosmati.errors import BatchError


class Same(nn.Module):
    def forward(self, x: Any, **told: Any) -> Any:
        return told or x


def with_graph(value: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, requires_grad=True) * 1


def textbook(logits: list[float], target: list[float]) -> float:
    """Soft cross-entropy in float64, by its definition."""
    total = math.log(sum(math.exp(x) for x in logits))
    return sum(p * (total - x) for p, x in zip(target, logits, strict=True))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_scalar_with_a_graph_is_taken_as_it_is(dtype: torch.dtype) -> None:
    for loss in (
        with_graph(dtype=dtype),
        with_graph(dtype=dtype).reshape(1),
        nn.Parameter(torch.ones((), dtype=dtype)),
    ):
        assert as_loss(loss) is loss


@pytest.mark.parametrize("wrap", [dict, UserDict, lambda held: SimpleNamespace(**held)])
def test_what_has_a_loss_is_taken_for_that(wrap: Any) -> None:
    scalar, whole = with_graph(), Loss(with_graph(), 3.0)
    assert as_loss(wrap({"loss": scalar, "logits": torch.ones(2)})) is scalar
    assert as_loss(wrap({"loss": whole})) is whole
    assert as_loss(whole) is whole


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (3.0, "returned a float, and not a scalar tensor"),
        (None, "returned a NoneType, and"),
        ({"a": with_graph(), "b": 1}, "returned a dict of 'a', 'b', and not"),
        ({"loss": 3.0}, "returned a dict of 'loss', and"),
        (SimpleNamespace(loss=[1]), "returned a SimpleNamespace, and"),
        ((with_graph(), with_graph()), r"returned a tuple, and.*aux=\{name: term\}"),
        (torch.ones(2, requires_grad=True) * 1, r"has shape \(2,\), and a loss is a scalar. Return its mean"),
        (torch.ones(0, requires_grad=True) * 1, r"has shape \(0,\)"),
        (Loss(torch.ones(1, 3, requires_grad=True) * 1, 3.0), r"has shape \(1, 3\)"),
        (torch.tensor(3), "is of type torch.int64, which has no gradient"),
        (Loss(torch.tensor(3), 1.0), "is of type torch.int64"),
        (torch.tensor(3.0), "has no graph, so nothing could learn from it"),
        (Loss(torch.tensor(3.0), 1.0), "has no graph"),
        (Loss(torch.tensor(3.0), torch.tensor(1)), "has no graph"),
        (Loss(with_graph(), -1.0), "has weight -1.0. A weight is what the mean divides by"),
        (Loss(with_graph(), -1), "has weight -1.0"),
        (Loss(with_graph(), torch.tensor(-0.5)), "has weight -0.5"),
        (Loss(with_graph(), math.nan), "has weight nan"),
        (Loss(with_graph(), torch.tensor(math.inf)), "has weight inf"),
        (Loss(with_graph(), math.inf), "has weight inf"),
    ],
)
def test_what_is_no_loss_is_refused_with_the_mend(result: Any, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        as_loss(result)


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_a_microbatch_without_anything_to_learn_from_needs_no_graph(weight: Any) -> None:
    loss = Loss(torch.tensor(0.0), weight)
    assert as_loss(loss) is loss
    graph = Loss(with_graph(), weight)
    assert as_loss(graph) is graph


@pytest.mark.parametrize("weight", [0.5, 1, torch.tensor(7), torch.tensor(0.25)])
def test_any_weight_from_nothing_up_is_sound(weight: Any) -> None:
    loss = Loss(with_graph(), weight)
    assert as_loss(loss) is loss


class Elsewhere(Tensor):
    """Stands for a tensor on an accelerator."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]


def elsewhere(value: Any) -> Tensor:
    return torch.as_tensor(value).as_subclass(Elsewhere)


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0, -1.0, -0.1, math.inf, math.nan])
def test_an_accelerators_weight_is_not_looked_at_but_spoils_the_sum(weight: float) -> None:
    loss = Loss(with_graph(), elsewhere(weight), torch.ones(3), aux={"z": torch.tensor(1.0)})
    found = as_loss(loss)
    assert isinstance(found, Loss)
    assert math.isnan(found.sum.item()) == (not 0 <= weight < math.inf)
    assert (found.weight is loss.weight, found.per_row is loss.per_row, found.aux is loss.aux) == (True, True, True)
    assert math.isnan(found.sum.item()) or found.sum.item() == 2
    detached = as_loss(Loss(torch.tensor(3.0), elsewhere(weight)))
    assert isinstance(detached, Loss), "whether it weighs nothing isn't known, so a graph isn't asked for"


def test_a_mean_is_the_sum_over_the_weight_and_every_term_beside_it() -> None:
    assert float(Loss(torch.tensor(6.0), 4).mean()) == 1.5
    terms = {"a": torch.tensor(0.25), "b": torch.tensor(-1.0)}
    whole = Loss(torch.tensor(6.0), torch.tensor(4.0), aux=terms)
    assert float(whole.mean()) == 0.75
    assert (Loss(torch.tensor(1.0), 1.0).per_row, dict(Loss(torch.tensor(1.0), 1.0).aux)) == (None, {})


def test_without_tombstones_each_row_that_is_there_keeps_its_part() -> None:
    rows, weights = torch.tensor([1.0, math.nan, 4.0]), torch.tensor([2.0, math.inf, 3.0])
    present, aux = torch.tensor([True, False, True]), {"z": torch.tensor(1.0)}
    for given, kept in ((weights, [2, 0, 3]), (None, [1, 0, 1])):
        found = without_tombstones(Loss(rows.sum(), 9.0, rows, given, aux), present)
        assert isinstance(found, Loss)
        assert (float(found.sum), float(found.weight), found.aux is aux) == (5, sum(kept), True)
        assert found.per_row is not None
        assert found.per_row_weight is not None
        assert (found.per_row.tolist(), found.per_row_weight.tolist()) == ([1, 0, 4], kept)
    scalar = with_graph()
    assert without_tombstones(scalar, None) is scalar
    for loss in (scalar, Loss(scalar, 3.0)):
        with pytest.raises(BatchError, match=r"tombstone rows, and the loss doesn't tell rows apart.*tail='drop'"):
            without_tombstones(loss, present)


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 2), (3, 4, 2, 2)])
def test_soft_and_hard_targets_are_compared_by_the_textbook(shape: tuple[int, ...]) -> None:
    logits, hard = (
        drawn(*shape),
        torch.randint(0, 4, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(1)),
    )
    soft = drawn(*shape).softmax(1)
    one_hot = nn.functional.one_hot(hard, 4).movedim(-1, 1)
    flat = [t.flatten(2).movedim(1, -1) if t.ndim > 2 else t.unsqueeze(1) for t in (logits, one_hot, soft)]
    wanted = [
        [sum(map(textbook, x, y)) for x, y in zip(flat[0].tolist(), target.tolist(), strict=True)]
        for target in (flat[1], flat[2])
    ]
    places = math.prod(shape[2:])
    for target, expected in ((hard, wanted[0]), (hard.byte(), wanted[0]), (one_hot, wanted[0]), (soft, wanted[1])):
        loss = Classification(4)(Same(), (logits, target))
        assert loss.per_row is not None
        assert loss.per_row_weight is not None
        assert loss.per_row.tolist() == pytest.approx(expected, rel=1e-5)
        assert float(loss.sum) == pytest.approx(sum(expected), rel=1e-5)
        assert (float(loss.weight), loss.per_row_weight.tolist()) == (3 * places, [places] * 3)
        assert loss.per_row_weight.dtype == torch.float32


def test_a_place_with_no_probability_or_an_ignored_label_has_no_weight() -> None:
    logits, soft = drawn(2, 3, 2), torch.full((2, 3, 2), 1 / 3)
    soft[0, :, 1] = 0
    negative = Classification(3).compare(logits, soft)
    hard = Classification(3, ignore_index=1).compare(logits, torch.tensor([[0, 1], [2, 0]]))
    for loss in (negative, hard):
        assert loss.per_row_weight is not None
        assert (loss.per_row_weight.tolist(), float(loss.weight)) == ([1, 2], 3)


def test_logits_of_single_rows_and_labels_that_do_not_fit() -> None:
    one = Classification(4).compare(torch.zeros(4), torch.tensor(2))
    assert float(one.sum) == pytest.approx(math.log(4))
    with pytest.raises(BatchError, match=r"Labels \(3,\) don't fit logits \(2, 4\), .*: give one .* position, \(2,\)."):
        Classification(4).compare(torch.zeros(2, 4), torch.tensor([0, 1, 2]))
    with pytest.raises(BatchError, match=r"Labels \(2,\) don't fit logits \(2, 4, 5\).*\(2, 5\)"):
        Classification(4).compare(torch.zeros(2, 4, 5), torch.tensor([0, 1]))
    with pytest.raises(BatchError, match=r"probabilities \(2, 3\) don't fit logits \(2, 4\).*Classification.*here 4"):
        Classification(3).compare(torch.zeros(2, 4), torch.ones(2, 3))


def test_labels_out_of_range_are_refused_and_other_errors_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatchError, match="4"):
        Classification(4).compare(torch.zeros(2, 4), torch.tensor([0, 4]))

    def refuse(*given: Any, **more: Any) -> Tensor:
        raise IndexError("something else")

    monkeypatch.setattr("cosmati.core.loss.F", SimpleNamespace(cross_entropy=refuse))
    with pytest.raises(IndexError, match="something else"):
        Classification(4).compare(torch.zeros(2, 4), torch.tensor([0, 1]))


def test_an_accelerators_labels_are_looked_at_unless_a_subclass_compares_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "cosmati.core.loss.look_once",
        lambda model, found, target, ignored: seen.append((type(model), found is logits, len(target), ignored)),
    )

    monkeypatch.setattr(Classification, "compare", lambda self, logits, target: Loss(logits.sum(), 1.0))

    class Own(Classification):
        def compare(self, logits: Tensor, target: Any) -> Loss:
            return Loss(logits.sum(), 1.0)

    logits, labels = torch.zeros(2, 4), elsewhere([0, 1])
    Classification(4, ignore_index=7)(Same(), (logits, labels))
    assert seen == [(Same, True, 2, 7)]
    Own(4)(Same(), (logits, labels))
    Classification(4)(Same(), (logits, elsewhere(torch.zeros(2, 4))))
    Classification(4)(Same(), (torch.zeros(2, 4), torch.tensor([0, 1])))
    mixed = MixedTarget(labels, labels, torch.tensor(0.5))
    Classification(4)(Same(), (logits, mixed))
    assert seen == [(Same, True, 2, 7)]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_mixed_targets_share_everything_of_both(share: float) -> None:
    logits, mixing = drawn(3, 4), torch.tensor(share)
    first, second = torch.tensor([0, -100, 2]), torch.tensor([3, 1, -100])
    parts = [Classification(4).compare(logits, one) for one in (first, second)]
    loss = Classification(4).compare(logits, MixedTarget(first, second, mixing))
    for name in ("sum", "weight", "per_row", "per_row_weight"):
        one, other = (getattr(part, name) for part in parts)
        expected = (share * one.double() + (1 - share) * other.double()).tolist()
        assert getattr(loss, name).tolist() == pytest.approx(expected, rel=1e-5)
    rows = Regression().compare(drawn(3), MixedTarget(torch.zeros(3), torch.ones(3), mixing))
    assert (float(rows.weight), rows.per_row_weight) == (3, None)


def test_regression_is_the_mean_square_of_each_row_in_float32() -> None:
    output, target = drawn(3, 2, 2), drawn(3, 2, 2).flip(0)
    loss = Regression()(Same(), {"x": output.bfloat16(), "y": target.double()})
    differences = (output.bfloat16().double() - target.double()).square().flatten(1)
    assert loss.per_row is not None
    assert loss.per_row.tolist() == pytest.approx((differences.sum(1) / 4).tolist(), rel=1e-5)
    assert (loss.weight, loss.per_row_weight, loss.per_row.dtype) == (3.0, None, torch.float32)
    flat = Regression()(Same(), (torch.tensor([3.0, 1.0]), torch.tensor([1, 1])))
    assert (float(flat.sum), flat.weight) == (4.0, 2.0)
    with pytest.raises(BatchError, match=r"outputs \(2, 1\) with targets \(2,\): the shapes must be equal"):
        Regression().compare(torch.ones(2, 1), torch.ones(2))


class Table(nn.Module):
    """Logits of the next token by the last one, with what stands beside them."""

    def __init__(self, aux: Any = None, *, is_object: bool = True) -> None:
        super().__init__()
        self.table, self.aux, self.is_object = drawn(5, 5), aux, is_object
        self.told: dict[str, Any] = {}

    def forward(self, tokens: Tensor, **told: Any) -> Any:
        self.told, logits = told, self.table[tokens.long()]
        return SimpleNamespace(logits=logits, aux=self.aux) if self.is_object else logits


def test_a_language_model_is_told_of_documents_and_adds_what_stands_beside_its_logits() -> None:
    tokens, documents = torch.tensor([[0, 4, 2], [1, 1, 3]]), torch.zeros(2, 2, dtype=torch.int64)
    table = drawn(5, 5).tolist()
    expected = [
        sum(textbook(table[a], [float(i == b) for i in range(5)]) for a, b in pairs)
        for pairs in (((0, 4), (4, 2)), ((1, 1), (1, 3)))
    ]
    model, aux = Table(aux={"z": torch.tensor(1.0)}), {"z": torch.tensor(1.0)}
    plain = LanguageModel(5)(model, tokens)
    assert plain.per_row is not None
    assert plain.per_row.tolist() == pytest.approx(expected, rel=1e-5)
    assert (float(plain.weight), plain.aux, model.told) == (4, aux, {})
    data = {"x": tokens[:, :-1], "y": tokens[:, 1:].byte(), "documents": documents}
    told = LanguageModel(5)(model, data)
    assert float(told.sum) == pytest.approx(sum(expected), rel=1e-5)
    assert list(model.told) == ["documents"]
    assert model.told["documents"] is documents
    assert torch.equal(LanguageModel(5)(model, {"x": tokens[:, :-1], "y": tokens[:, 1:]}).sum, told.sum)
    assert model.told == {}
    for other in (Table(aux=3.0), Table(), Table(is_object=False)):
        found = LanguageModel(5)(other, (tokens[:, :-1], tokens[:, 1:]))
        assert (found.aux, other.told, float(found.weight)) == ({}, {}, 4)
        assert float(found.sum) == pytest.approx(sum(expected), rel=1e-5)


def test_a_language_models_targets_may_be_probabilities_and_be_ignored() -> None:
    tokens = torch.tensor([[0, 4, 2]])
    soft = torch.full((1, 5, 2), 0.2)
    loss = LanguageModel(5)(Table(), (tokens[:, :-1], soft))
    table = drawn(5, 5).tolist()
    assert float(loss.sum) == pytest.approx(sum(textbook(table[i], [0.2] * 5) for i in (0, 4)), rel=1e-5)
    ignored = LanguageModel(5, ignore_index=4)(Table(), tokens)
    assert float(ignored.weight) == 1
    assert (LanguageModel().num_classes, LanguageModel().ignore_index, Classification(2).ignore_index) == (
        256,
        -100,
        -100,
    )


class Answer(UserDict[str, Tensor]):
    @property
    def loss(self) -> Tensor:
        return self["loss"]


class TinyForTokenClassification(nn.Module):
    """As transformers' classifiers are: the mean over labels that aren't -100."""

    __module__ = "transformers.models.tiny"

    def __init__(self) -> None:
        super().__init__()
        self.config, self.seen = SimpleNamespace(num_labels=3, problem_type="single_label_classification"), Tensor()

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, x: Tensor, labels: Tensor) -> Answer:
        self.seen = labels
        return Answer(loss=nn.functional.cross_entropy(x, labels), logits=x)


def test_a_hugging_face_classifiers_rows_are_told_apart_and_soft_or_mixed_labels_compared() -> None:
    logits, labels = drawn(4, 3), torch.tensor([0, 2, -100, 1])
    one_hot = [[float(i == label) for i in range(3)] for label in labels.tolist()]
    rows = [textbook(x, y) for x, y in zip(logits.tolist(), one_hot, strict=True)]
    loss = huggingface_loss(TinyForTokenClassification(), {"x": logits, "labels": labels})
    assert (float(loss.weight), float(loss.sum)) == (3, pytest.approx(sum(rows), rel=1e-5))
    assert loss.per_row is not None
    assert loss.per_row_weight is not None
    assert loss.per_row.tolist() == pytest.approx(rows, rel=1e-5)
    assert loss.per_row_weight.tolist() == [1, 1, 0, 1]
    soft = torch.tensor(one_hot) * 0.5 + 1 / 6
    expected = [textbook(x, y) for x, y in zip(logits.tolist(), soft.tolist(), strict=True)]
    found = huggingface_loss(TinyForTokenClassification(), {"x": logits, "labels": soft})
    assert (float(found.weight), float(found.sum)) == (4, pytest.approx(sum(expected), rel=1e-5))
    whole, other = torch.tensor([0, 2, 2, 1]), torch.tensor([1, 1, 0, 0])
    mixed = MixedTarget(whole, other, torch.tensor(0.25))
    both = huggingface_loss(TinyForTokenClassification(), {"x": logits, "labels": mixed})
    shares = [[0.25 * (i == a) + 0.75 * (i == b) for i in range(3)] for a, b in zip(whole, other, strict=True)]
    expected = [textbook(x, [*map(float, y)]) for x, y in zip(logits.tolist(), shares, strict=True)]
    assert (float(both.weight), float(both.sum)) == (4, pytest.approx(sum(expected), rel=1e-5))


def test_a_hugging_face_model_without_labels_is_told_of_them() -> None:
    for data in ({"x": torch.ones(1)}, (torch.ones(1), torch.ones(1)), None):
        with pytest.raises(BatchError, match=r"from `labels`; the batch has none. Add labels=input_ids"):
            huggingface_loss(TinyForTokenClassification(), data)


def test_a_batch_without_labels_that_count_gives_the_model_some_and_weighs_nothing() -> None:
    model = TinyForTokenClassification()
    loss = huggingface_loss(model, {"x": drawn(2, 3), "labels": torch.tensor([-100, -100])})
    assert (float(loss.weight), float(loss.sum), model.seen.tolist()) == (0, 0, [0, 0])


def test_losses_are_values() -> None:
    for value in (Loss(with_graph(), 1.0), Classification(3), LanguageModel()):
        with pytest.raises(FrozenInstanceError):
            value.__setattr__(fields(value)[0].name, 3)
    assert not hasattr(Loss(with_graph(), 1.0), "__dict__")
    assert Classification(3) == Classification(3, -100) != Classification(3, 1)
