"""Hugging Face batches of every kind: dictionaries, masks, labels of unequal number, classifiers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.core.loss import huggingface_loss
from cosmati.errors import BatchError
from cosmati.optim import SGD, AdamW
from cosmati.testing.bare_loop import bare_loop
from cosmati.train.config import RunConfig
from cosmati.train.observers import History
from cosmati.train.trainer import Trainer

transformers = pytest.importorskip("transformers", reason="the extra `llm` isn't installed")
pytestmark = [pytest.mark.filterwarnings("ignore:::transformers"), pytest.mark.long]

VOCABULARY, ROWS, LENGTH, STEPS = 64, 8, 12, 5
SIZE = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def _model(*, dropout: float = 0.1, kind: str = "GPT2LMHeadModel") -> Any:
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, use_cache=False, num_labels=3, pad_token_id=0, **SIZE, **rates
    )
    return getattr(transformers, kind)(config).train()


def _batch(seed: int) -> dict[str, Tensor]:
    """Rows padded on the right to lengths of their own, the longer ones first."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    lengths = torch.arange(LENGTH, LENGTH - ROWS, -1)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _cut(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    return [{name: value.chunk(parts)[i] for name, value in batch.items()} for i in range(parts)]


def _fit(model: nn.Module, steps: list[Any], num_microbatches: int, optimizer: Any) -> list[float]:
    history = History()
    config = RunConfig(budget=f"{len(steps)}ba", seed=3, num_microbatches=num_microbatches, num_threads=1)
    Trainer(model, huggingface_loss, steps, optimizers=[optimizer], observers=[history], config=config).fit()
    return [loss for _, loss in history.losses]


def _differing(a: nn.Module, b: nn.Module) -> list[str]:
    other = b.state_dict()
    return [name for name, value in a.state_dict().items() if not torch.equal(value, other[name])]


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_batch_encoding_is_a_dictionary_is_the_bare_loop(num_microbatches: int) -> None:
    model = _model()
    encoded, plain, chosen = copy.deepcopy(model), copy.deepcopy(model), AdamW(lr=1e-2)
    steps = [_batch(seed) for seed in range(STEPS)]
    losses = _fit(model, steps, num_microbatches, chosen)
    assert _fit(encoded, [transformers.BatchEncoding(step) for step in steps], num_microbatches, chosen) == losses
    cut = [_cut(step, num_microbatches) for step in steps]
    built = chosen.build(list(plain.named_parameters()))
    assert bare_loop(plain, huggingface_loss, cut, built, seed=3) == losses
    assert _differing(model, encoded) == []
    assert _differing(model, plain) == []


def test_labels_are_averaged_over_the_step_and_not_by_microbatch() -> None:
    """One step of plain SGD: the gradient is the model's own on the whole batch, whatever V is."""
    batch = _batch(1)
    labels = [int((part["labels"][:, 1:] != -100).sum()) for part in _cut(batch, 4)]
    assert len(set(labels)) == 4
    whole = _model(dropout=0.0)
    loss = whole(**batch).loss
    loss.backward()
    for num_microbatches in (1, 4):
        model = _model(dropout=0.0)
        assert _fit(model, [batch], num_microbatches, SGD(lr=1.0)) == [pytest.approx(loss.item(), rel=1e-5)]
        for trained, own in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(trained.detach(), own.detach() - own.grad, rtol=1e-4, atol=1e-6)


def test_a_classifier_weighs_rows() -> None:
    batch = _batch(2)
    batch["labels"] = torch.arange(ROWS) % 3
    whole = _model(dropout=0.0, kind="GPT2ForSequenceClassification")
    loss = whole(**batch).loss
    loss.backward()
    model = _model(dropout=0.0, kind="GPT2ForSequenceClassification")
    assert _fit(model, [batch], 4, SGD(lr=1.0)) == [pytest.approx(loss.item(), rel=1e-5)]
    for (name, trained), own in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            trained.detach(), own.detach() - own.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_batch_without_labels() -> None:
    batch = _batch(3)
    del batch["labels"]
    with pytest.raises(BatchError, match=r"the batch has none\. Add labels=input_ids"):
        _fit(_model(), [batch], 1, SGD(lr=1.0))


def test_a_microbatch_without_a_label_weighs_nothing() -> None:
    batch = _batch(4)
    batch["labels"][: ROWS // 2] = -100
    whole, model = _model(dropout=0.0), _model(dropout=0.0)
    loss = whole(**batch).loss
    assert _fit(model, [batch], 2, SGD(lr=1.0)) == [pytest.approx(loss.item(), rel=1e-5)]
