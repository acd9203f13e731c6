"""Factorization against the tail of the singular values, and what it leaves alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cosmati.errors import PlanError
from cosmati.methods import Factorize
from cosmati.methods.factorize import FactorizedConv2d, FactorizedLinear, apply_factorization, best_factors


def small(model: nn.Module, **options: Any) -> nn.Module:
    return apply_factorization(model, **{"min_channels": 2, "min_features": 2, **options})


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), rank=st.integers(1, 12), seed=st.integers(0, 99))
def test_error_is_the_tail_of_the_singular_values(rows: int, columns: int, rank: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    reduce, expand = best_factors(matrix, rank)
    tail = torch.linalg.svdvals(matrix)[rank:]
    error = torch.linalg.matrix_norm(matrix - expand @ reduce)
    torch.testing.assert_close(error, tail.square().sum().sqrt(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(reduce @ reduce.T, expand.T @ expand, rtol=1e-9, atol=1e-9)


def test_error_falls_with_rank_and_full_rank_is_exact() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(12, 10).double(), torch.randn(5, 12, dtype=torch.float64)
    errors = [float((FactorizedLinear.of(layer, rank)(x) - layer(x)).detach().norm()) for rank in range(1, 11)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12
    conv, image = nn.Conv2d(6, 8, 3, 2, 1, 1).double(), torch.randn(2, 6, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(FactorizedConv2d.of(conv, 8)(image), conv(image), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": 1},
        {"padding": "same"},
        {"dilation": 2, "bias": False},
        {"padding": 1, "padding_mode": "circular"},
    ],
)
def test_a_convolution_of_low_rank_is_reproduced(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, **options).double()
    low = torch.randn(8, 2, dtype=torch.float64) @ torch.randn(2, 72, dtype=torch.float64)
    layer.weight.data = low.view_as(layer.weight)
    expected = layer(image := torch.randn(2, 8, 9, 9, dtype=torch.float64))
    new = small(nn.Sequential(layer), latent_channels=2)
    assert isinstance(new[0], FactorizedConv2d)
    torch.testing.assert_close(new(image), expected, rtol=1e-9, atol=1e-9)


def test_the_weight_is_the_product_and_the_bias_the_very_one() -> None:
    layer = nn.Linear(8, 8)
    new = FactorizedLinear.of(layer, 3)
    assert new.bias is layer.bias
    torch.testing.assert_close(new.weight, new.expand.weight @ new.reduce.weight)
    x = torch.randn(4, 8)
    torch.testing.assert_close(new(x), nn.functional.linear(x, new.weight, new.bias))
    fresh = FactorizedLinear(8, 6, latent_features=0.5)
    assert fresh(x).shape == (4, 6)
    assert fresh.reduce.out_features == 3
    assert FactorizedConv2d(8, 6, 3, padding=1)(torch.randn(1, 8, 5, 5)).shape == (1, 6, 5, 5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight


def test_leaves_alone_what_it_does_not_know() -> None:
    for model in (
        Tied(),
        nn.Sequential(nn.Conv2d(8, 8, 3, groups=2)),
        nn.Sequential(nn.Linear(8, 2)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
        nn.MultiheadAttention(8, 2),
    ):
        before = str(model)
        with pytest.warns(UserWarning, match="Factorize changes nothing"):
            assert str(small(model, latent_features=0.9, min_features=8)) == before


def test_replaces_the_root_shared_layers_and_keeps_hooks() -> None:
    calls: list[str] = []
    root = nn.Linear(8, 8)
    root.register_forward_hook(lambda *_: calls.append("root"))
    new = small(root)
    assert isinstance(new, FactorizedLinear)
    new(torch.randn(1, 8))
    assert calls == ["root"]
    layer = nn.Linear(8, 8)
    model = small(nn.Sequential(layer, nn.ReLU(), layer))
    assert model[0] is model[2]


def test_weights_take_their_place_in_the_groups() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    first, second = model
    optimizer = torch.optim.SGD(
        [{"params": [first.weight, first.bias], "lr": 0.5}, {"params": [second.weight, second.bias]}],
        lr=0.1,
        momentum=0.9,
    )
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"SGD had stepped a weight .* Apply methods before"):
        new = small(model, optimizers=optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in new[0].parameters()]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert first.weight not in optimizer.state
    assert first.bias in optimizer.state


def test_off_and_refusals() -> None:
    model = nn.Linear(512, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Factorize(factorize_convs=False, factorize_linears=False).apply(model) is model
    for options in (
        {"latent_features": 0},
        {"min_channels": -1},
        {"min_features": 0.5},
        {"latent_channels": float("nan")},
    ):
        with pytest.raises(PlanError, match=next(iter(options))):
            Factorize(**options)
    with pytest.raises(PlanError, match="latent size of -1"):
        FactorizedLinear(4, 4, latent_features=-1)
