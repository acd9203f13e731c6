"""A Hugging Face model's own loss row by row, so that label smoothing and selective backprop work on it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Loss, huggingface_loss, without_tombstones
from cosmati.core.method import Position
from cosmati.core.plan import Promise
from cosmati.errors import BatchError, PlanError
from cosmati.methods import CutMix, LabelSmoothing, MixUp, SelectiveBackprop
from cosmati.optim import SGD
from cosmati.train.config import RunConfig
from cosmati.train.evaluation import accuracy
from cosmati.train.observers import History
from cosmati.train.trainer import Trainer

transformers = pytest.importorskip("transformers", reason="the extra `llm` isn't installed")
pytestmark = pytest.mark.filterwarnings("ignore:::transformers")

VOCABULARY, ROWS, LENGTH, CLASSES = 24, 8, 6, 3
BERT: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BERT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
GPT2: dict[str, Any] = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
T5 = {
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
KINDS = {
    "BertForSequenceClassification": ("BertConfig", BERT, False),
    "GPT2ForSequenceClassification": ("GPT2Config", GPT2, False),
    "BertForTokenClassification": ("BertConfig", BERT, True),
    "BertForMaskedLM": ("BertConfig", BERT, True),
    "GPT2LMHeadModel": ("GPT2Config", GPT2, True),
    "T5ForConditionalGeneration": ("T5Config", T5, True),
}
CAUSAL = "GPT2LMHeadModel"


def made(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config, size, _ = KINDS[kind]
    given = {"vocab_size": VOCABULARY, "num_labels": CLASSES, "pad_token_id": 0, **size, **changes}
    model = getattr(transformers, kind)(getattr(transformers, config)(**given))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # logits that tell rows apart
    return model.train()


def labelled(kind: str, num_classes: int) -> dict[str, Tensor]:
    """Some ignored labels in rows 0 and 1, and none but ignored ones in row 2, where each position has a label."""
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=draws)
    if not KINDS[kind][2]:
        return {"input_ids": tokens, "labels": torch.arange(ROWS) % num_classes}
    labels = torch.randint(0, num_classes, (ROWS, LENGTH), generator=draws)
    labels[0, 3:], labels[1, :2], labels[2] = -100, -100, -100
    return {"input_ids": tokens, "labels": labels}


def classes_of(kind: str) -> int:
    return VOCABULARY if kind in ("BertForMaskedLM", CAUSAL, "T5ForConditionalGeneration") else CLASSES


def row(data: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    return {name: value[index : index + 1] for name, value in data.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_rows_loss_is_the_models_own_on_that_row(kind: str) -> None:
    model, data = made(kind), labelled(kind, classes_of(kind))
    with torch.no_grad():
        loss = huggingface_loss(model, data)
        whole = model(**data).loss
    assert loss.per_row is not None
    assert loss.per_row_weight is not None
    assert float(loss.sum / loss.weight) == float(whole * loss.weight / loss.weight), "the bits stay the model's own"
    torch.testing.assert_close(loss.per_row.sum(), loss.sum)
    assert float(loss.per_row_weight.sum()) == float(loss.weight)
    for index in range(ROWS):
        if loss.per_row_weight[index]:
            alone = model(**row(data, index)).loss
            torch.testing.assert_close(loss.per_row[index] / loss.per_row_weight[index], alone.detach())
        else:
            assert KINDS[kind][2]
            assert index == 2
            assert float(loss.per_row[index]) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first_seen", ["smoothed", "whole"])
def test_smoothed_labels_by_the_formula_in_float64(kind: str, first_seen: str) -> None:
    """Also where no labels but smoothed ones have ever been seen: the model tells by its first labels what they are."""
    model, num_classes, rate = made(kind), classes_of(kind), 0.25
    data = labelled(kind, num_classes)
    if first_seen == "whole":
        model(**data)
    config, history = RunConfig(budget="1ba", num_microbatches=2), History()
    trainer = Trainer(
        copy.deepcopy(model), huggingface_loss, [data], optimizers=SGD(lr=0.0),
        methods=LabelSmoothing(smoothing=rate), observers=[history], config=config,
    )  # fmt: skip
    trainer.fit()
    ((_, found),) = history.losses
    with torch.no_grad():
        logits = model(**data).logits.double()
    labels = data["labels"]
    if kind == CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    terms = []
    for scores, label in zip(logits.reshape(-1, num_classes), labels.reshape(-1), strict=True):
        if label != -100:
            log_shares = scores - math.log(sum(math.exp(score) for score in scores))
            terms.append(-((1 - rate) * log_shares[label] + rate * log_shares.mean()))
    assert found == pytest.approx(float(sum(terms)) / len(terms), rel=1e-5)
    assert trainer.plan.holds(Promise.RESUME), str(trainer.plan)


def test_labels_in_a_column_are_rows_too() -> None:
    model, data = made("BertForSequenceClassification"), labelled("BertForSequenceClassification", CLASSES)
    with torch.no_grad():
        flat, column = (huggingface_loss(model, data | {"labels": data["labels"].reshape(s)}) for s in ((-1,), (-1, 1)))
    assert flat.per_row is not None
    assert column.per_row is not None
    assert torch.equal(flat.per_row, column.per_row)
    assert column.per_row_weight is not None
    assert column.per_row_weight.shape == (ROWS,)


def classifier_rows() -> list[dict[str, Tensor]]:
    return [labelled("BertForSequenceClassification", CLASSES)] * 8


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fine_tuning_with_smoothing_and_selection(precision: Any) -> None:
    model = made("BertForSequenceClassification")
    methods = [LabelSmoothing(smoothing=0.1), SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0)]
    config = RunConfig(budget="8ba", num_microbatches=2, precision=precision)
    trainer = Trainer(
        model, huggingface_loss, classifier_rows(), optimizers=SGD(lr=0.1), methods=methods, config=config
    )
    trainer.fit()
    assert trainer.plan.holds(Promise.RESUME), str(trainer.plan)
    assert model.config.problem_type == "single_label_classification"


@pytest.mark.long
def test_selection_keeps_the_rows_that_the_model_finds_hard() -> None:
    """Oracle: rows that the model is sure of, and rows that are labelled wrong; the latter are kept."""
    model = made("BertForSequenceClassification")
    data = labelled("BertForSequenceClassification", CLASSES)
    with torch.no_grad():
        logits = 40 * model(input_ids=data["input_ids"]).logits
        model.classifier.weight.mul_(40)
        model.classifier.bias.mul_(40)
    data["labels"] = torch.where(torch.arange(ROWS) % 2 == 0, logits.argmax(1), logits.argmin(1))
    kept: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Loss:
        if torch.is_grad_enabled():
            kept.extend(batch["number"].tolist())
        return huggingface_loss(model, {name: value for name, value in batch.items() if name != "number"})

    batches = [data | {"number": torch.arange(ROWS)}] * 60
    methods = SelectiveBackprop(start=0.0, end=1.0, keep=0.25, interrupt=0)
    Trainer(model, loss, batches, optimizers=SGD(lr=0.0), methods=methods, config=RunConfig(budget="60ba")).fit()
    assert len(kept) == 120
    # Drawn by percentile cubed, without replacement: the easy half is kept about one time in nine.
    assert sum(number % 2 for number in kept) > 90


def test_a_row_that_isnt_there_is_left_out_of_a_classifiers_loss() -> None:
    kind = "BertForSequenceClassification"
    model, data = made(kind), labelled(kind, CLASSES)
    ids = torch.arange(ROWS)
    ids[-1] = TOMBSTONE
    batch = Batch(data, Lineage(ids, torch.zeros(ROWS, dtype=torch.int64)))
    whole = without_tombstones(huggingface_loss(model, data), batch.present)
    assert isinstance(whole, Loss)
    torch.testing.assert_close(whole.mean(), model(**{name: value[:-1] for name, value in data.items()}).loss)
    whole.mean().backward()
    assert model.classifier.weight.grad is not None


def test_a_language_models_rows_are_told_apart_where_no_graph_is_kept() -> None:
    """A second graph over every token's logits would double what a step holds of them."""
    model, data = made(CAUSAL), labelled(CAUSAL, VOCABULARY)
    assert huggingface_loss(model, data).per_row is None
    with torch.no_grad():
        assert huggingface_loss(model, data).per_row is not None


def test_many_labels_a_row_are_no_probabilities() -> None:
    """Floating labels mean one thing to a model of several labels, and stay its own loss."""
    kind = "BertForSequenceClassification"
    model, data = made(kind), labelled(kind, CLASSES)
    data["labels"] = (torch.arange(ROWS * CLASSES).reshape(ROWS, CLASSES) % 2).float()
    loss = huggingface_loss(model, data)
    expected = nn.functional.binary_cross_entropy_with_logits(model(input_ids=data["input_ids"]).logits, data["labels"])
    torch.testing.assert_close(loss.mean(), expected)
    assert loss.per_row is None
    config = RunConfig(budget="1ba")
    whole = labelled(kind, CLASSES)
    with pytest.raises(PlanError, match=r"multi_label_classification.*single_label_classification"):
        Trainer(model, huggingface_loss, [whole], optimizers=SGD(lr=0.1), methods=LabelSmoothing(), config=config).fit()


def test_probabilities_of_the_users_own_where_the_model_says_what_they_are() -> None:
    kind = "BertForSequenceClassification"
    model, data = made(kind, problem_type="single_label_classification"), labelled(kind, CLASSES)
    data["labels"] = torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(2)).softmax(1)
    loss = huggingface_loss(model, data)
    logits = model(input_ids=data["input_ids"]).logits
    torch.testing.assert_close(loss.mean(), -(data["labels"] * logits.log_softmax(1)).sum(1).mean())


def image_classifier() -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(
        **sizes,
        image_size=8,
        patch_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config).train(), {
        "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(3)),
        "labels": torch.arange(ROWS) % CLASSES,
    }


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_images_are_mixed_for_transformers_too(interpolate_loss: bool, smoothing: float) -> None:
    """Oracle: cross-entropy on the mixed pixels against both labels, in the shares that made them."""
    model, data = image_classifier()
    at = Position(Clock(), Budget(Time.parse("1ba")), 0, 0, model, huggingface_loss)
    batch = Batch(data, Lineage.of_rows(0, ROWS))
    mixed = MixUp(alpha=1.0, interpolate_loss=interpolate_loss).batch(batch, at)
    mixed = LabelSmoothing(smoothing=smoothing).batch(mixed, at)
    found = huggingface_loss(model, mixed.data).mean()
    pixels, labels = mixed.data["pixel_values"], mixed.data["labels"]
    assert not torch.equal(pixels, data["pixel_values"])
    shares = model(pixel_values=pixels).logits.log_softmax(1)
    if interpolate_loss:
        whole = [one if one.ndim == 2 else nn.functional.one_hot(one, CLASSES) for one in (labels.first, labels.second)]
        target = labels.mixing * whole[0] + (1 - labels.mixing) * whole[1]
    else:
        target = labels
    torch.testing.assert_close(target.sum(1), torch.ones(ROWS))
    torch.testing.assert_close(found, -(target * shares).sum(1).mean())


def test_a_vision_model_is_fine_tuned_with_cutmix() -> None:
    model, data = image_classifier()
    config = RunConfig(budget="3ba", num_microbatches=2)
    methods = [CutMix(alpha=1.0), LabelSmoothing(smoothing=0.1)]
    trainer = Trainer(model, huggingface_loss, [data] * 3, optimizers=SGD(lr=0.1), methods=methods, config=config)
    trainer.fit()
    assert trainer.plan.holds(Promise.RESUME), str(trainer.plan)
    assert model.config.problem_type == "single_label_classification"


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy_of_a_hugging_face_model_by_hand(kind: str) -> None:
    model, data = made(kind), labelled(kind, classes_of(kind))
    with torch.no_grad():
        found = accuracy(model, data)
        guesses, labels = model(**data).logits.argmax(-1), data["labels"]
    if kind == CAUSAL:
        guesses, labels = guesses[:, :-1], labels[:, 1:]
    pairs = [(g, t) for g, t in zip(guesses.flatten().tolist(), labels.flatten().tolist(), strict=True) if t != -100]
    assert (float(found.sum), float(found.weight)) == (sum(g == t for g, t in pairs), len(pairs))


def test_accuracy_of_scores_that_are_not_of_the_labels_is_refused() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made("BertForMaskedLM")

        def forward(self, **data: Tensor) -> Any:
            output = self.inner(**data)
            output.logits = output.logits[:, :2]
            return output

    with pytest.raises(BatchError, match="Write a metric of your own"):
        accuracy(Pooled(), labelled("BertForMaskedLM", VOCABULARY))


class Weighted(nn.Module):
    """A model whose own loss isn't the mean cross-entropy of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = made("BertForSequenceClassification")

    def forward(self, **data: Tensor) -> Any:
        output = self.inner(**data)
        output.loss = 2 * output.loss
        return output


def test_another_loss_of_the_models_own_is_found_out() -> None:
    model, data = Weighted(), classifier_rows()[0]
    assert huggingface_loss(model, data).per_row is None
    config = RunConfig(budget="1ba")
    with pytest.raises(PlanError, match="doesn't tell them apart"):
        Trainer(
            model, huggingface_loss, [data], optimizers=SGD(lr=0.1),
            methods=SelectiveBackprop(start=0.0, interrupt=0), config=config,
        ).fit()  # fmt: skip
    with pytest.raises(BatchError, match="isn't the mean cross-entropy of its logits"):
        Trainer(
            Weighted(), huggingface_loss, [data], optimizers=SGD(lr=0.1), methods=LabelSmoothing(), config=config
        ).fit()


def test_a_loss_with_a_balancing_term_is_found_out() -> None:
    """However small: an expert's is a hundredth of the loss, which rounding could hide."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
        router_aux_loss_coef=1e-6,
    )  # fmt: skip
    torch.manual_seed(0)
    model, data = transformers.MixtralForCausalLM(config), labelled(CAUSAL, VOCABULARY)
    with torch.no_grad():
        assert huggingface_loss(model, data).per_row is None
    soft = nn.functional.one_hot(data["labels"].clamp(0), VOCABULARY).float().movedim(-1, 1)
    with pytest.raises(BatchError, match="isn't the mean cross-entropy of its logits"):
        huggingface_loss(model, data | {"labels": soft})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_any_label_weigh_nothing(kind: str) -> None:
    shape = (ROWS, classes_of(kind), LENGTH) if KINDS[kind][2] else (ROWS, CLASSES)
    model = made(kind, problem_type="single_label_classification")
    for labels in (torch.zeros(shape), torch.full((ROWS, *shape[2:]), -100)):
        loss = huggingface_loss(model, labelled(kind, classes_of(kind)) | {"labels": labels})
        assert float(loss.weight) == 0
        assert float(loss.sum.detach()) == 0


def test_a_model_without_classes_is_told() -> None:
    config = RunConfig(budget="1ba")
    rows = {"x": torch.ones(4, 2), "labels": torch.arange(4)}
    with pytest.raises(PlanError, match=r"number of classes.*Classification\(num_classes=\.\.\.\)"):
        Trainer(
            nn.Linear(2, 2), huggingface_loss, [rows], optimizers=SGD(lr=0.1), methods=LabelSmoothing(), config=config
        ).fit()
