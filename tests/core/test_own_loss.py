"""Which labels a model of Hugging Face's form takes for probabilities of its classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.own_loss import are_probabilities

transformers = pytest.importorskip("transformers", reason="the extra `llm` isn't installed")

SIZE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 16}


def classifier(problem: str | None) -> nn.Module:
    config = transformers.BertConfig(**SIZE, num_labels=3, problem_type=problem)
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def tagger() -> nn.Module:
    return transformers.BertForTokenClassification(transformers.BertConfig(**SIZE, num_labels=3))  # type: ignore[no-any-return]


def language_model() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "labels", "expected"),
    [
        (classifier("single_label_classification"), torch.rand(2, 3), True),
        (classifier("single_label_classification"), torch.rand(2, 4), False),
        (classifier("single_label_classification"), torch.tensor([0, 1]), False),
        (classifier("single_label_classification"), torch.rand(3), False),
        (classifier("single_label_classification"), torch.rand(2, 3, 1, 1), False),
        (classifier("multi_label_classification"), torch.rand(2, 3), False),
        (classifier("regression"), torch.rand(2, 3), False),
        (classifier(None), torch.rand(2, 3), False),
        (tagger(), torch.rand(2, 3, 5), True),
        (tagger(), torch.rand(2, 5, 3), False),
        (classifier(None), torch.rand(2, 3, 5), False),
        (language_model(), torch.rand(2, 16, 5), True),
        (language_model(), torch.rand(2, 5, 16), False),
        (nn.Linear(2, 3), torch.rand(2, 3), False),
    ],
)
def test_labels_are_probabilities_of_the_models_classes(model: nn.Module, labels: Tensor, *, expected: bool) -> None:
    assert are_probabilities(model, labels) is expected
