"""ALiBi against attention written as loops in float64, on this library's GPT and on Hugging Face's models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.errors import BatchError, PlanError
from cosmati.methods.alibi import AlibiAttention, alibi_bias, alibi_slopes
from cosmati.models.gpt import GPT, Attention, GPTConfig

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:::transformers")

CAUSAL, BOTH_WAYS = ("gpt2", "opt"), ("bert", "roberta")
families = pytest.mark.parametrize("family", [*CAUSAL, *BOTH_WAYS])
implementations = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def test_slopes_are_the_papers() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16).tolist() == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    assert alibi_slopes(12).tolist() == pytest.approx(
        [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    )
    assert alibi_slopes(1).tolist() == [2.0**-8]
    with pytest.raises(PlanError, match="num_heads=0"):
        alibi_slopes(0)


@given(heads=st.integers(1, 9), queries=st.integers(1, 6), past=st.integers(0, 5), causal=st.booleans())
def test_bias_is_minus_slope_times_distance(heads: int, queries: int, past: int, causal: bool) -> None:
    slopes = alibi_slopes(heads)
    bias = alibi_bias(heads, queries, past + queries, is_causal=causal)
    for h in range(heads):
        for i in range(queries):
            for j in range(past + queries):
                distance = past + i - j
                expected = -math.inf if causal and distance < 0 else -float(slopes[h]) * abs(distance)
                assert float(bias[h, i, j]) == pytest.approx(expected)
    with pytest.raises(BatchError, match="don't stand at the end"):
        alibi_bias(heads, queries + 1, queries)


@given(shift=st.integers(1, 5), causal=st.booleans())
def test_where_a_text_stands_does_not_matter_to_its_distances(shift: int, causal: bool) -> None:
    long = alibi_bias(4, 9, 9, is_causal=causal)
    assert torch.equal(long[:, shift:, shift:], alibi_bias(4, 9 - shift, 9 - shift, is_causal=causal))


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(**{"width": 12, "num_blocks": 2, "num_heads": 3, "sequence_length": 8, "rotary": False, **options})
    ).eval()


def hugging_face(family: str, implementation: str = "sdpa", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    common = {"vocab_size": 50, "attn_implementation": implementation, "initializer_range": 0.5, **ends, **options}
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=12, n_layer=2, n_head=3, n_positions=16, **common)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 16}
    if family == "opt":
        config = transformers.OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=12, init_std=0.5, **common)
        return transformers.OPTForCausalLM(config).eval()
    sizes |= {"intermediate_size": 24}
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common)).eval()
    head = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"}[family]
    config = getattr(transformers, head).config_class(**sizes, **common)
    return getattr(transformers, head)(config).eval()


def known_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, AlibiAttention)]


def attend(query: Tensor, key: Tensor, value: Tensor, present: Tensor, *, causal: bool) -> Tensor:
    """Attention by loops over rows, heads and positions: [rows, heads, length, head_width] to [rows, length, width]."""
    rows, heads, length, width = query.shape
    output = torch.zeros_like(query)
    for r in range(rows):
        for h in range(heads):
            slope = 2.0 ** -[4, 8, 2][h]  # Three heads: the paper's two, and the first of its four.
            for i in range(length):
                seen = [j for j in range(i + 1 if causal else length) if present[r, j]]
                scores = [float(query[r, h, i] @ key[r, h, j]) / math.sqrt(width) - slope * abs(i - j) for j in seen]
                weights = torch.tensor(scores, dtype=query.dtype).softmax(0)
                for w, j in zip(weights, seen, strict=True):
                    output[r, h, i] += w * value[r, h, j]
    return output.transpose(1, 2).flatten(2)


ATTENTION = {
    "Attention": (("query", "key", "value"), "projection", True),
    "GPT2Attention": (("c_attn",), "c_proj", True),
    "OPTAttention": (("q_proj", "k_proj", "v_proj"), "out_proj", True),
    "BertSelfAttention": (("query", "key", "value"), "", False),
    "RobertaSelfAttention": (("query", "key", "value"), "", False),
}


def by_loops(layer: nn.Module, present: Tensor) -> Callable[..., Any]:
    inputs, output, causal = ATTENTION[type(layer).__name__]

    def forward(hidden_states: Tensor, **_: Any) -> Any:
        parts = torch.cat([layer.get_submodule(name)(hidden_states) for name in inputs], -1).chunk(3, -1)
        heads = [part.unflatten(-1, (3, 4)).transpose(1, 2) for part in parts]
        mixed = attend(*heads, present, causal=causal)
        mixed = layer.get_submodule(output)(mixed) if output else mixed
        return mixed if isinstance(layer, Attention) else (mixed, None)

    return forward


@torch.no_grad()
def reference(native: nn.Module, tokens: Tensor, present: Tensor) -> Tensor:
    """Return the logits of an unchanged model with positions of zero and attention by loops."""
    for name, weight in native.named_parameters():
        if "wpe" in name or "position" in name:
            weight.zero_()
    for layer in native.modules():
        if type(layer).__name__ in ATTENTION:
            layer.forward = by_loops(layer, present)  # type: ignore[method-assign]
    return logits_of(native, tokens, present)


def logits_of(model: nn.Module, tokens: Tensor, present: Tensor) -> Tensor:
    logits: Tensor = model(tokens) if isinstance(model, GPT) else model(tokens, attention_mask=present.long()).logits
    return logits


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(3))


def test_the_gpt_of_this_library_has_the_logits_of_the_formula() -> None:
    model = gpt().double()
    tokens, present = random_tokens(2, 7), torch.ones(2, 7, dtype=torch.bool)
    plain, expected = model(tokens), reference(copy.deepcopy(model), tokens, present)
    output = apply_alibi(model, 8)(tokens)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(output, plain, atol=1e-3)


@implementations
@families
@pytest.mark.parametrize("padded", [False, True])
def test_hugging_face_models_have_the_logits_of_the_formula(family: str, implementation: str, padded: bool) -> None:
    model = hugging_face(family, implementation).double()
    tokens, present = random_tokens(2, 7), torch.ones(2, 7, dtype=torch.bool)
    if padded:
        present[0, :2] = False
        present[1, 5:] = False
    plain = logits_of(model, tokens, present)
    expected = reference(copy.deepcopy(model), tokens, present)
    apply_alibi(model, 16)
    assert len(known_layers(model)) == 2
    output = logits_of(model, tokens, present)
    torch.testing.assert_close(output[present], expected[present], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(output[present], plain[present], atol=1e-3)


@implementations
@families
def test_only_distances_count_and_length_has_no_end(family: str, implementation: str) -> None:
    model = hugging_face(family, implementation)
    apply_alibi(model, 24)
    tokens = random_tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), tokens], 1)
    alone = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    behind = model(padded, attention_mask=(torch.arange(9) >= 3).long()[None]).logits[:, 3:]
    torch.testing.assert_close(behind, alone, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(model(padded, attention_mask=torch.ones(1, 9)).logits[:, 3:], alone, atol=1e-2)
    for length in (24, 30):
        assert model(random_tokens(2, length)).logits.shape == (2, length, 50)
    assert model.config.max_position_embeddings == 24
    assert not [name for name in model.state_dict() if "wpe" in name or "position" in name]


@implementations
@pytest.mark.parametrize("family", CAUSAL)
def test_generation_with_a_cache_is_generation_without(family: str, implementation: str) -> None:
    model = hugging_face(family, implementation)
    apply_alibi(model, 40)
    tokens = random_tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "eos_token_id": 99}
    plain = model.generate(tokens, **options, use_cache=False)
    assert plain.shape == (2, 20)
    assert torch.equal(model.generate(tokens, **options), plain)
    static = model.generate(tokens, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, plain)
    whole = model(plain).logits
    first = model(plain[:, :9], use_cache=True)
    rest = model(plain[:, 9:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=1e-3, atol=1e-4)


def test_positions_are_gone_and_length_grows() -> None:
    model = gpt()
    assert model.position is not None
    position = model.position.weight
    rest = [parameter for parameter in model.parameters() if parameter is not position]
    optimizers = [torch.optim.AdamW([{"params": [position], "lr": 0.5}, {"params": rest}]), torch.optim.SGD([position])]
    assert apply_alibi(model, 20, optimizers) is model
    assert "position.weight" not in model.state_dict()
    held = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    assert held == [[0, len(rest)], [0]]
    assert {id(p) for p in model.parameters()} == {id(p) for p in rest}
    tokens = random_tokens(2, 20)
    output = model(tokens)
    assert output.shape == (2, 20, 256)
    with pytest.raises(BatchError, match="sequence_length of 20"):
        model(random_tokens(2, 21))
    torch.testing.assert_close(copy.deepcopy(model)(tokens), output)
    assert not [name for name, _ in model.named_buffers() if name in model.state_dict()]
    # Once more is no other model, though it may be longer.
    kinds = [type(module) for module in model.modules()]
    assert apply_alibi(apply_alibi(model, 30), 10) is model
    assert [type(module) for module in model.modules()] == kinds
    assert model.config.sequence_length == 30
    assert torch.equal(model(tokens), output)


@families
def test_hugging_face_models_keep_hooks_and_optimizers_and_come_back(family: str, tmp_path: Path) -> None:
    model = hugging_face(family)
    seen: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.update([name]))
    model(random_tokens(1, 4))
    before, rest = dict(seen), {n: p for n, p in model.named_parameters() if "wpe" not in n and "position" not in n}
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    apply_alibi(model, 24, optimizer)
    apply_alibi(model, 24, optimizer)
    tokens = random_tokens(2, 20)
    seen.clear()
    output = model(tokens).logits
    assert dict(seen) == before
    assert len(known_layers(model)) == 2
    assert len({type(layer) for layer in known_layers(model)}) == 1, "compiled once"
    assert dict(model.named_parameters()).keys() == rest.keys()
    assert all(rest[name] is parameter for name, parameter in model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == list(rest)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in rest.values()]
    assert torch.equal(copy.deepcopy(model)(tokens).logits, output)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(apply_alibi(again, 24)(tokens).logits, output)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)


def of_an_own_forward(model: Any, layer: Any) -> Any:
    class Windowed(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options)

    layer.__class__ = Windowed
    return model


def of_an_own_bias() -> GPT:
    class Windowed(Attention):
        def bias(self, query: Tensor) -> Tensor | None:
            return torch.zeros(query.shape[-2], query.shape[-2]).to(query)

    model = gpt()
    model.blocks[1].attention.__class__ = Windowed
    return model


def with_a_wrapped_forward() -> Any:
    model = hugging_face("bert")
    layer = model.bert.encoder.layer[0].attention.self
    layer.forward = layer.forward
    return model


def encoder_and_decoder() -> Any:
    transformers = pytest.importorskip("transformers")
    parts = [hugging_face("bert").config, hugging_face("bert", is_decoder=True, add_cross_attention=True).config]
    model = transformers.EncoderDecoderModel(
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    ).eval()
    model.decoder.config._attn_implementation = "flash_attention_2"
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (Unknown, "no attention that is known"),
    "rotary": (lambda: gpt(rotary=True), "positions are rotary"),
    "llama": (lambda: hugging_face("llama"), "positions are rotary"),
    "one layer": (
        lambda: of_an_own_forward(model := hugging_face("gpt2"), model.transformer.h[1].attn),
        "its attention Windowed isn't one that is known",
    ),
    "own layer": (of_an_own_bias, "its attention Windowed isn't one that is known"),
    "wrapped": (with_a_wrapped_forward, "its attention BertSelfAttention isn't one that is known"),
    "flash in one part": (encoder_and_decoder, "'flash_attention_2' takes no bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_does_not_know_and_changes_nothing(name: str) -> None:
    build, message = REFUSED[name]
    model = build()
    kinds = [type(module) for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match=message):
        apply_alibi(model, 8, optimizer)
    assert [type(module) for module in model.modules()] == kinds
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_learnt_positions_must_be_there() -> None:
    model = gpt()
    model.position = None
    with pytest.raises(PlanError, match="no learnt positions to take out"):
        apply_alibi(model, 8)


def test_cross_attention_has_no_distances() -> None:
    model = encoder_and_decoder()
    model.decoder.config._attn_implementation = "sdpa"
    apply_alibi(model, 24)
    assert len(known_layers(model)) == 4
    crossed = [layer for layer in model.modules() if type(layer).__name__ == "BertCrossAttention"]
    assert len(crossed) == 2
    tokens = random_tokens(1, 5)
    one, other = (model(input_ids=tokens, decoder_input_ids=t).logits for t in (tokens, tokens.roll(-1)))
    assert not torch.allclose(one, other, atol=1e-3)
    later = tokens.clone()
    later[0, 4] += 1 - 2 * int(later[0, 4] == 49)
    torch.testing.assert_close(model(input_ids=tokens, decoder_input_ids=later).logits[:, :4], one[:, :4])


def test_an_implementation_that_is_chosen_later_is_refused_too() -> None:
    model = hugging_face("gpt2")
    apply_alibi(model, 8)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(PlanError, match="'flash_attention_2' takes no bias"):
        known_layers(model)[0](torch.randn(1, 4, 12))


def position() -> Position:
    return Position(Clock(), Budget(Time.parse("2ba")), 0, 0, gpt(), LanguageModel())


def cut(batch: Batch, scale: float = 0.25) -> Batch:
    return Alibi(max_sequence_length=12, train_sequence_length_scaling=scale).batch(batch, position())


def test_rows_are_cut_and_keep_their_ids() -> None:
    tokens = torch.arange(24).view(2, 12)
    mask, soft = tokens < 20, torch.rand(2, 12, 3)
    lineage = Lineage(torch.tensor([7, TOMBSTONE]), torch.tensor([2, 3]), digests=torch.arange(64).view(2, 32).byte())
    batch = Batch({"input_ids": tokens, "labels": tokens + 1, "attention_mask": mask, "soft": soft}, lineage, 2)
    short = cut(batch)
    assert short.data["labels"].tolist() == (torch.arange(24).view(8, 3) + 1).tolist()
    assert torch.equal(short.data["attention_mask"], mask.view(8, 3))
    assert torch.equal(short.data["soft"], soft.view(8, 3, 3))
    assert short.lineage.row_ids.tolist() == [7] * 4 + [TOMBSTONE] * 4
    assert short.lineage.class_ids.tolist() == [2] * 4 + [3] * 4
    assert short.lineage.digests is not None
    assert short.lineage.digests[:, 0].tolist() == [0] * 4 + [32] * 4
    assert (short.num_rows, short.class_id, short.num_tokens) == (8, 2, batch.num_tokens)
    assert cut(batch, 1.0) is batch
    for data in (tokens, (tokens[:, :11], tokens[:, 1:]), (tokens, torch.zeros(2)), {"x": tokens[:, :0]}):
        with pytest.raises(BatchError, match="can't cut rows into 4 pieces"):
            cut(Batch(data, batch.lineage))


@given(rows=st.integers(1, 3), pieces=st.integers(1, 5), size=st.integers(1, 4), alone=st.booleans())
def test_every_token_is_predicted_once_from_the_one_before(rows: int, pieces: int, size: int, alone: bool) -> None:
    tokens = torch.arange(rows * (pieces * size + 1)).view(rows, -1)
    whole = (tokens[:, :-1], tokens[:, 1:])
    short = cut(Batch(tokens if alone else whole, Lineage.of_rows(0, rows)), 1 / pieces)
    data = (short.data[:, :-1], short.data[:, 1:]) if alone else short.data
    assert [part.shape for part in data] == [(rows * pieces, size)] * 2
    assert all(torch.equal(ours.flatten(), theirs.flatten()) for ours, theirs in zip(data, whole, strict=True))
    assert short.lineage.row_ids.tolist() == [row for row in range(rows) for _ in range(pieces)]


def test_a_run_trains_on_pieces_and_is_used_on_whole_rows() -> None:
    model, seen = gpt(sequence_length=16), []
    model.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    tokens = torch.arange(8 * 17).view(8, 17) % 256
    method = Alibi(max_sequence_length=32)
    source = InMemory(tokens, rows_per_step=4)
    config = RunConfig(budget="2ba", num_microbatches=2, num_threads=1)
    trainer = Trainer(model, LanguageModel(), source, optimizers=[AdamW(lr=0.01)], methods=[method], config=config)
    assert trainer.fit().outcome == "completed"
    assert set(seen) == {(8, 4)}
    assert trainer.model(tokens[:, :16].repeat(1, 2)).shape == (8, 32, 256)


def test_options() -> None:
    with pytest.raises(PlanError, match="max_sequence_length=0"):
        Alibi(max_sequence_length=0)
    for scale in (0.0, 0.3, 2.0, float("nan")):
        with pytest.raises(PlanError, match="train_sequence_length_scaling"):
            Alibi(max_sequence_length=8, train_sequence_length_scaling=scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    model = apply_alibi(gpt(num_heads=4), 600).to(dtype)
    assert model(random_tokens(1, 8)).dtype == dtype
    bias = model.blocks[0].attention.bias(torch.zeros(1, 4, 600, 3, dtype=dtype))  # type: ignore[index,union-attr,operator]
    far = torch.arange(600, dtype=torch.float64)
    assert torch.equal(bias[3, -1], (-(far.flip(0)) / 256).to(dtype)), "rounded once, however far"
    for family in ("gpt2", "bert"):
        theirs = apply_alibi(hugging_face(family), 16).to(dtype)
        logits = theirs(random_tokens(2, 8), attention_mask=(torch.arange(8) > 3).long().expand(2, -1)).logits
        assert logits.dtype == dtype
        assert bool(logits.isfinite().all())


@families
def test_autocast_and_gradient_checkpoints(family: str) -> None:
    tokens = random_tokens(2, 8)
    gradients = []
    for checkpointed in (False, True):
        model = apply_alibi(hugging_face(family), 16).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens, use_cache=False).logits
        logits.float().square().mean().backward()
        gradients.append(next(model.parameters()).grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0] is not None
    assert bool(gradients[0].any())


def test_attention_weights_can_still_be_recorded() -> None:
    model = hugging_face("gpt2", "eager")
    apply_alibi(model, 16)
    recorded = model(random_tokens(2, 5), output_attentions=True).attentions
    assert [weights.shape for weights in recorded] == [(2, 3, 5, 5)] * 2
    torch.testing.assert_close(recorded[0].sum(-1), torch.ones(2, 3, 5))
    assert not bool(recorded[0].triu(1).any())


@pytest.mark.parametrize("family", ["own", "gpt2", "bert"])
def test_exports_and_traces_whole(family: str) -> None:
    model = gpt() if family == "own" else hugging_face(family, use_cache=False)
    apply_alibi(model, 16)
    tokens = random_tokens(2, 8)
    exported = torch.export.export(model, (tokens,)).module()
    assert not [module for module in exported.modules() if type(module).__module__.startswith("cosmati")]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = model(tokens)
    for output in (exported(tokens), compiled(tokens)):
        ours, theirs = (output, expected) if family == "own" else (output.logits, expected.logits)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
