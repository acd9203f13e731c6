"""ALiBi against attention written as loops in float64, on this library's GPT and on Hugging Face's models."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import LanguageModel
from cosmati.core.method import Position
from cosmati.errors import BatchError, PlanError
from cosmati.methods import Alibi
from cosmati.methods.alibi import AlibiAttention, alibi_bias, alibi_slopes, apply_alibi
from cosmati.models.gpt import GPT, GPTConfig


def test_slopes_are_the_papers() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16).tolist() == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    assert alibi_slopes(12).tolist() == pytest.approx(
        [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    )
    assert alibi_slopes(1).tolist() == [2.0**-8]
    with pytest.raises(PlanError, match="num_heads=0"):
        alibi_slopes(0)


@pytest.mark.long
@given(heads=st.integers(1, 9), queries=st.integers(1, 6), past=st.integers(0, 5), causal=st.booleans())
def test_bias_is_minus_slope_times_distance(heads: int, queries: int, past: int, causal: bool) -> None:
    slopes = alibi_slopes(heads)
    bias = alibi_bias(slopes, queries, past + queries, is_causal=causal)
    for h in range(heads):
        for i in range(queries):
            for j in range(past + queries):
                distance = past + i - j
                expected = -math.inf if causal and distance < 0 else -float(slopes[h]) * abs(distance)
                assert float(bias[h, i, j]) == pytest.approx(expected)


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(**{"width": 12, "num_blocks": 2, "num_heads": 3, "sequence_length": 8, "rotary": False, **options})
    )


@torch.no_grad()
def attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, causal: bool) -> Tensor:
    """Attention by loops over heads and positions, float64: [heads, length, head_width]."""
    output = torch.zeros_like(query)
    for h in range(len(query)):
        for i in range(query.shape[1]):
            last = i + 1 if causal else query.shape[1]
            scores = [
                float(query[h, i] @ key[h, j]) / math.sqrt(query.shape[-1]) - float(slopes[h]) * abs(i - j)
                for j in range(last)
            ]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            output[h, i] = sum(w * value[h, j] for j, w in enumerate(weights))
    return output


def test_the_gpt_of_this_library_attends_by_the_formula() -> None:
    model = gpt()
    apply_alibi(model, 8)
    layer = model.blocks[0].attention.double()
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    heads = [part(x)[0].unflatten(-1, (3, 4)).transpose(0, 1) for part in (layer.query, layer.key, layer.value)]
    mixed = attention(*heads, alibi_slopes(3), causal=True)
    expected = layer.projection(mixed.transpose(0, 1).flatten(1))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-6, atol=1e-7)


def test_positions_are_gone_and_length_grows() -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert model.position is not None
    position = model.position.weight
    assert apply_alibi(model, 20, optimizer) is model
    assert "position.weight" not in model.state_dict()
    assert not any(p is position for group in optimizer.param_groups for p in group["params"])
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    tokens = torch.randint(0, 256, (2, 20))
    assert model(tokens).shape == (2, 20, 256)
    assert apply_alibi(model, 20) is model
    again = copy.deepcopy(model)
    torch.testing.assert_close(again(tokens), model(tokens))
    assert not [name for name, _ in model.named_buffers() if name in model.state_dict()]


@given(shift=st.integers(1, 5))
def test_where_a_text_stands_does_not_matter_to_its_distances(shift: int) -> None:
    long = alibi_bias(alibi_slopes(4), 9, 9, is_causal=True)
    short = alibi_bias(alibi_slopes(4), 9 - shift, 9 - shift, is_causal=True)
    assert torch.equal(long[:, shift:, shift:], short)


def hugging_face(family: str, implementation: str = "eager", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"attn_implementation": implementation, **options}
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_embd=12, n_layer=2, n_head=3, n_positions=16, **common)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {"vocab_size": 50, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    if family == "bert":
        config = transformers.BertConfig(**sizes, intermediate_size=24, max_position_embeddings=16, **common)
        return transformers.BertForMaskedLM(config).eval()
    sizes |= {"hidden_size": 12, "intermediate_size": 24}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common)).eval()


def known_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, AlibiAttention)]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_hugging_face_models_attend_by_the_formula(family: str, implementation: str) -> None:
    model = hugging_face(family, implementation)
    apply_alibi(model, 16)
    layers = known_layers(model)
    assert len(layers) == 2
    layer = layers[0].double()
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    if family == "gpt2":
        parts = layer.c_attn(x).split(12, dim=2)
    else:
        parts = [part(x) for part in (layer.query, layer.key, layer.value)]
    heads = [part[0].unflatten(-1, (3, 4)).transpose(0, 1) for part in parts]
    mixed = attention(*heads, alibi_slopes(3), causal=family == "gpt2").transpose(0, 1).flatten(1)
    expected = layer.c_proj(mixed[None])[0] if family == "gpt2" else mixed
    torch.testing.assert_close(layer(x)[0][0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_masks_still_act_and_positions_do_not(family: str, implementation: str) -> None:
    model = hugging_face(family, implementation)
    native = copy.deepcopy(model)
    apply_alibi(model, 24)
    tokens = torch.randint(0, 50, (1, 6))
    assert not torch.allclose(model(tokens).logits, native(tokens).logits)
    # A text behind padding is the text: only distances count.
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), tokens], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    alone = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 3:], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(padded).logits[:, 3:], alone)
    assert model(torch.randint(0, 50, (2, 24))).logits.shape == (2, 24, 50), "longer than the model was built for"
    assert not [name for name in model.state_dict() if "wpe" in name or "position" in name]


def test_generation_with_a_cache_is_generation_without() -> None:
    model = hugging_face("gpt2", "sdpa")
    apply_alibi(model, 16)
    tokens = torch.randint(0, 50, (1, 4))
    ids = [
        model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=c, pad_token_id=0) for c in (True, False)
    ]
    assert torch.equal(*ids)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)


def test_refuses_what_it_does_not_know_and_changes_nothing() -> None:
    for model, message in (
        (Unknown(), "no attention that is known"),
        (gpt(rotary=True), "positions are rotary"),
        (hugging_face("llama"), "positions are rotary"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(PlanError, match=message):
            apply_alibi(model, 8)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not known_layers(model)
    model = hugging_face("gpt2")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(PlanError, match="flash_attention_2' takes no bias"):
        apply_alibi(model, 8)
    assert not known_layers(model)


def position() -> Position:
    return Position(Clock(), Budget(Time.parse("2ba")), 0, 0, gpt(), LanguageModel())


def test_rows_are_cut_and_keep_their_ids() -> None:
    tokens = torch.arange(24).view(2, 12)
    batch = Batch({"input_ids": tokens, "labels": tokens + 1}, Lineage.of_rows(7, 2))
    cut = Alibi(max_sequence_length=12).batch(batch, position())
    assert cut.data["labels"].tolist() == (torch.arange(24).view(8, 3) + 1).tolist()
    assert cut.lineage.row_ids.tolist() == [7] * 4 + [8] * 4
    assert Alibi(max_sequence_length=12, train_sequence_length_scaling=1.0).batch(batch, position()) is batch
    with pytest.raises(BatchError, match="can't cut rows into 4 pieces"):
        Alibi(max_sequence_length=12).batch(Batch(tokens[:, :11], batch.lineage), position())
    with pytest.raises(BatchError, match="can't cut rows into 4 pieces"):
        Alibi(max_sequence_length=12).batch(Batch((tokens, torch.zeros(2)), batch.lineage), position())


def test_options() -> None:
    with pytest.raises(PlanError, match="max_sequence_length=0"):
        Alibi(max_sequence_length=0)
    for scale in (0.0, 0.3, 2.0, float("nan")):
        with pytest.raises(PlanError, match="train_sequence_length_scaling"):
            Alibi(max_sequence_length=8, train_sequence_length_scaling=scale)


def test_float64_and_bfloat16() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = gpt().to(dtype)
        apply_alibi(model, 8)
        output = model(torch.arange(8)[None])
        assert output.dtype == dtype
        assert bool(output.isfinite().all())
    bert = hugging_face("bert").to(torch.bfloat16)
    apply_alibi(bert, 16)
    assert bert(torch.arange(8)[None]).logits.dtype == torch.bfloat16
