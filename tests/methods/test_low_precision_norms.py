"""Norms in autocast's precision: rounded inputs, the formula in float64, a rounded output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.methods import LowPrecisionGroupNorm, LowPrecisionLayerNorm
from cosmati.methods.low_precision_norms import (
    GroupNormInAutocast,
    LayerNormInAutocast,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
)


def formula(norm: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of what's left after rounding, in float64."""
    low = x.to(dtype).double()
    shape = (len(x), norm.num_groups, -1) if isinstance(norm, nn.GroupNorm) else (*x.shape[:-1], -1)
    grouped = low.view(shape)
    mean, variance = grouped.mean(-1, keepdim=True), grouped.var(-1, keepdim=True, correction=0)
    normal = ((grouped - mean) / (variance + norm.eps).sqrt()).view_as(low)
    weight, bias = norm.weight.to(dtype).double(), norm.bias.to(dtype).double()
    if isinstance(norm, nn.GroupNorm):
        weight, bias = (t.view(1, -1, *[1] * (x.ndim - 2)) for t in (weight, bias))
    return (normal * weight + bias).detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("norm", "apply", "shape"),
    [
        (nn.LayerNorm(16), apply_low_precision_layernorm, (4, 6, 16)),
        (nn.GroupNorm(4, 16), apply_low_precision_groupnorm, (4, 16, 5, 5)),
    ],
)
def test_is_the_formula_on_rounded_inputs(norm: nn.Module, apply: Any, shape: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = copy.deepcopy(norm)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2)
        layer.bias.normal_()
    x = 3 * torch.randn(shape) + 1
    apply(layer)
    with torch.autocast("cpu", dtype):
        output = layer(x)
    assert output.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), formula(layer, x, dtype), rtol=4 * eps, atol=8 * eps)
    output.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_without_autocast_no_bit_changes() -> None:
    x = torch.randn(4, 16)
    for dtype in (torch.float32, torch.float64):
        native = nn.LayerNorm(16, dtype=dtype)
        own = apply_low_precision_layernorm(copy.deepcopy(native))
        assert type(own) is LayerNormInAutocast
        assert torch.equal(own(x.to(dtype)), native(x.to(dtype)))


def test_norms_without_weights_and_with_their_own_precision() -> None:
    norm = apply_low_precision_layernorm(nn.LayerNorm(8, elementwise_affine=False), "amp_bf16")
    with torch.autocast("cpu", torch.float16):
        assert norm(torch.randn(2, 8)).dtype == torch.bfloat16
    group = apply_low_precision_groupnorm(nn.GroupNorm(2, 8, affine=False), torch.float16)
    assert type(group) is GroupNormInAutocast
    with torch.autocast("cpu", torch.bfloat16):
        assert group(torch.randn(2, 8, 3)).dtype == torch.float16


class OwnNorm(nn.LayerNorm):
    """A subclass, whose function nobody knows."""


def test_says_where_there_is_nothing_to_do() -> None:
    for model in (nn.Linear(2, 2), nn.RMSNorm(4), OwnNorm(4)):
        before = type(model)
        with pytest.warns(UserWarning, match="LowPrecisionLayerNorm changes nothing: .* has no LayerNorm"):
            assert type(LowPrecisionLayerNorm().apply(model)) is before
    with pytest.warns(UserWarning, match="LowPrecisionGroupNorm changes nothing"):
        LowPrecisionGroupNorm().apply(nn.LayerNorm(4))
    norm = nn.LayerNorm(4)
    with pytest.warns(UserWarning, match="precision=fp32 is what norms are computed in"):
        apply_low_precision_layernorm(norm, "fp32")
    assert type(norm) is nn.LayerNorm
    with pytest.raises(PlanError, match="knows no precision='int8'"):
        apply_low_precision_layernorm(norm, "int8")


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_hugging_face_models(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "llama":
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, intermediate_size=32))
        with pytest.warns(UserWarning, match="has no LayerNorm"):
            apply_low_precision_layernorm(model)
        return
    if family == "gpt2":
        model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2))
    else:
        model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=32))
    model.eval()
    tokens = torch.arange(12).view(2, 6)
    native = copy.deepcopy(model)
    apply_low_precision_layernorm(model)
    assert sum(isinstance(module, LayerNormInAutocast) for module in model.modules()) == 5
    assert torch.equal(model(tokens).last_hidden_state, native(tokens).last_hidden_state)
    with torch.autocast("cpu", torch.bfloat16):
        low, high = model(tokens).last_hidden_state, native(tokens).last_hidden_state
    assert low.dtype == torch.bfloat16
    assert not torch.equal(low.float(), high.float())
    torch.testing.assert_close(low.float(), high.float(), rtol=0.1, atol=0.1)
