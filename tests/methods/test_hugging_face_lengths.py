"""Sequence-length warm-up on Hugging Face's models, from configuration and without a network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cosmati import InMemory, RunConfig, Trainer, huggingface_loss
from cosmati.methods import SeqLengthWarmup
from cosmati.methods.seq_length_warmup import set_batch_sequence_length
from cosmati.optim import AdamW

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.long


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    match family:
        case "gpt2":
            config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)
            return transformers.GPT2LMHeadModel(config)
        case "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=32))
        case _:
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=32))


def rows() -> dict[str, Tensor]:
    tokens = torch.randint(0, 50, (16, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_the_model_sees_the_lengths_of_the_schedule(family: str, truncate: bool) -> None:
    model = model_of(family)
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    method = SeqLengthWarmup(duration=0.5, min_seq_length=6, max_seq_length=24, step_size=6, truncate=truncate)
    trainer = Trainer(
        model,
        huggingface_loss,
        InMemory(rows(), rows_per_step=4),
        optimizers=[AdamW(lr=1e-3)],
        methods=[method],
        config=RunConfig(budget="8ba"),
    )
    assert trainer.fit().outcome == "completed"
    lengths = [method.length(step / 8) for step in range(8)]
    assert sorted(set(lengths)) == [6, 12, 18, 24]
    if not truncate:  # The greatest length that divides a row: no token is dropped.
        lengths = [max(d for d in range(1, length + 1) if 24 % d == 0) for length in lengths]
    assert seen == [(4 if truncate else 4 * 24 // length, length) for length in lengths]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_truncated_row_has_the_logits_of_its_start(family: str) -> None:
    """A causal model can't tell a cut row from a longer one."""
    model = model_of(family).eval()
    whole, cut = rows(), set_batch_sequence_length(rows(), 10)
    assert cut["input_ids"].shape == (16, 10)
    logits = model(input_ids=cut["input_ids"]).logits
    torch.testing.assert_close(logits, model(input_ids=whole["input_ids"]).logits[:, :10], rtol=1e-4, atol=1e-5)
