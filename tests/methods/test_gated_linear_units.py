"""Gated linear units against the paper's formula in float64, on every feed-forward that's known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.methods import Factorize, GatedLinearUnits
from cosmati.methods.gated_linear_units import GatedBlock, GatedFeedForward, apply_gated_linear_units
from cosmati.models.gpt import GPT, FeedForward, GPTConfig


class Block(nn.Module):
    """A feed-forward of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.act = nn.Tanh()
        self.drop = nn.Dropout(0.0)
        self.second = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.act(self.first(x))))


def linear(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight.double()
    y = x @ (weight.T if isinstance(layer, nn.Linear) else weight)
    return y if layer.bias is None else y + layer.bias.double()


def test_a_named_block_is_the_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    apply_gated_linear_units(model, target_layer_name="Block", non_gated_layer_bias=True)
    x = torch.randn(3, 6)
    expected = x.double()
    for block in model:
        assert isinstance(block, GatedBlock)
        hidden = linear(block.first, expected).tanh() * linear(block.gate, expected)
        expected = linear(block.second, hidden)
    torch.testing.assert_close(model(x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("activation", "function"), [("gelu", F.gelu), ("relu_squared", lambda h: h.relu().square())])
def test_the_gpt_of_this_library(activation: Any, function: Any) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=8, num_blocks=2, num_heads=2, sequence_length=8, activation=activation))
    names = set(model.state_dict())
    apply_gated_linear_units(model)
    assert set(model.state_dict()) - names == {f"blocks.{i}.feed_forward.gate.weight" for i in range(2)}
    block = next(module for module in model.modules() if isinstance(module, FeedForward))
    x = torch.randn(2, 3, 8)
    expected = linear(block.down, function(linear(block.up, x.double())) * linear(block.gate, x.double()))
    torch.testing.assert_close(block(x).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(block.gate.weight.std(), block.up.weight.std(), rtol=0.2, atol=0)


def models(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))
    if family == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=24))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=24))


@pytest.mark.long
@pytest.mark.parametrize(("family", "first"), [("gpt2", "c_fc"), ("bert", "dense")])
def test_hugging_face_feed_forwards(family: str, first: str) -> None:
    model = models(family).eval()
    native = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_gated_linear_units(model, optimizer)
    blocks = [module for module in model.modules() if isinstance(module, GatedBlock)]
    assert len(blocks) == 2
    x = torch.randn(2, 3, 16)
    up = getattr(blocks[0], first)
    activation = blocks[0].act if family == "gpt2" else blocks[0].intermediate_act_fn
    hidden = activation(linear(up, x.double())) * linear(blocks[0].gate, x.double())
    expected = linear(blocks[0].c_proj, hidden) if family == "gpt2" else hidden
    torch.testing.assert_close(blocks[0](x).double(), expected, rtol=1e-4, atol=1e-5)
    tokens = torch.arange(12).view(2, 6)
    assert not torch.allclose(model(tokens).logits, native(tokens).logits)
    before = blocks[1].gate.weight.detach().clone()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert not torch.equal(blocks[1].gate.weight, before)


def test_a_gate_of_ones_is_the_block_as_it_was() -> None:
    model = models("gpt2").eval()
    native = copy.deepcopy(model)
    apply_gated_linear_units(model, non_gated_layer_bias=True)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, GatedBlock):
                module.gate.weight.zero_()
                module.gate.bias.fill_(1.0)
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(tokens).logits, native(tokens).logits)


def test_gated_already_or_nothing_to_gate() -> None:
    with pytest.warns(UserWarning, match="feed-forwards have gates already"):
        apply_gated_linear_units(models("llama"))
    with pytest.warns(UserWarning, match=r"GatedLinearUnits changes nothing: .* no feed-forward that is known"):
        GatedLinearUnits().apply(nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"can't gate Linear: it needs two linear layers"):
        apply_gated_linear_units(nn.Sequential(nn.Linear(2, 2)), target_layer_name=nn.Linear)
    with pytest.raises(PlanError, match="act_fn='swash' is no activation"):
        GatedLinearUnits(act_fn="swash")


def test_options_and_groups() -> None:
    model = GPT(GPTConfig(width=8, num_blocks=1, num_heads=2, sequence_length=8))
    block = model.blocks[0].feed_forward
    optimizer = torch.optim.AdamW(
        [{"params": [block.up.weight], "lr": 0.5}, {"params": [block.down.weight], "lr": 0.1}]
    )
    apply_gated_linear_units(model, [optimizer], "silu", gated_layer_bias=True, non_gated_layer_bias=True)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in (block.up.weight, block.gate.weight, block.gate.bias, block.up.bias)
    ]
    x = torch.randn(2, 8)
    torch.testing.assert_close(block(x), block.down(F.silu(block.up(x)) * block.gate(x)))


def test_the_layer_itself() -> None:
    torch.manual_seed(0)
    layer = GatedFeedForward(6, 10, torch.sigmoid, gated_layer_bias=True)
    x = torch.randn(2, 6)
    expected = linear(layer.down, linear(layer.up, x.double()).sigmoid() * linear(layer.gate, x.double()))
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_weights_follow_from_the_seed() -> None:
    def gates(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(width=8, num_blocks=2, num_heads=2, sequence_length=8))
        GatedLinearUnits(seed=seed).apply(model)
        return [p for n, p in model.named_parameters() if "gate" in n]

    assert all(torch.equal(a, b) for a, b in zip(gates(1), gates(1), strict=True))
    assert not torch.equal(gates(1)[0], gates(2)[0])
    assert not torch.equal(*gates(1))


def test_a_factorized_feed_forward_is_gated_too() -> None:
    model = GPT(GPTConfig(width=8, num_blocks=1, num_heads=2, sequence_length=8))
    Factorize(min_features=8, latent_features=2).apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GatedLinearUnits().apply(model, [optimizer])
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    assert model(torch.arange(8)[None]).shape == (1, 8, 256)
