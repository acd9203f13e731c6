"""Built optimizers against torch's own, bit for bit, and the assignment of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from cosmati.errors import PlanError
from cosmati.optim import SGD, AdamW, Constant, Muon, Optimizer, assign_parameters, matrices

torch.set_num_threads(1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def trained(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 5) -> list[torch.Tensor]:
    net = model()
    optimizer = make(net)
    data = torch.randn(steps, 4, 5, generator=torch.Generator().manual_seed(1))
    for batch in data:
        net(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def built(configuration: Optimizer) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: configuration.build(list(net.named_parameters()))


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_sgd_has_torch_bits(fused: bool) -> None:
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    ours = trained(built(SGD(lr=0.01, fused=fused, **options)))  # type: ignore[arg-type]
    theirs = trained(lambda net: torch.optim.SGD(net.parameters(), 0.01, fused=fused, foreach=False, **options))  # type: ignore[arg-type]
    assert equal(ours, theirs)
    assert not equal(ours, list(model().parameters()))


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_has_torch_bits(fused: bool) -> None:
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours = trained(built(AdamW(lr=0.01, fused=fused, **options)))  # type: ignore[arg-type]
    theirs = trained(lambda net: torch.optim.AdamW(net.parameters(), 0.01, fused=fused, foreach=False, **options))  # type: ignore[arg-type]
    assert equal(ours, theirs)


def test_defaults_are_torch_defaults() -> None:
    assert equal(trained(built(SGD(lr=0.1))), trained(lambda net: torch.optim.SGD(net.parameters(), 0.1)))
    assert equal(trained(built(AdamW(lr=0.1))), trained(lambda net: torch.optim.AdamW(net.parameters(), 0.1)))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_vectors_can_be_spared_decay(kind: type[SGD | AdamW]) -> None:
    net = model()
    named = list(net.named_parameters())
    optimizer = kind(lr=0.1, weight_decay=0.5, decay_vectors=False).build(named)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    for old, parameter in zip(before, net.parameters(), strict=True):
        expected = old * 0.95 if parameter.ndim == 2 else old
        torch.testing.assert_close(parameter.detach(), expected)


def test_only_vectors_make_one_group() -> None:
    optimizer = AdamW(lr=0.1, decay_vectors=False).build([("bias", Parameter(torch.ones(3)))])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]


def test_what_has_no_gradient_does_not_move() -> None:
    net = model()
    optimizer = AdamW(lr=0.1, weight_decay=0.5).build(list(net.named_parameters()))
    net[2](torch.ones(1, 7)).sum().backward()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    moved = [not torch.equal(old, p) for old, p in zip(before, net.parameters(), strict=True)]
    assert moved == [False, False, False, False, True, True]


def test_first_match_wins() -> None:
    named = list(model().named_parameters())
    optimizers = [
        SGD(lr=1.0, parameters=("1.*", "*.bias")),
        Muon(lr=1.0, parameters=lambda _, parameter: parameter.shape[0] == 7),
        AdamW(lr=1.0),
    ]
    shares = assign_parameters(optimizers, named)
    assert [[name for name, _ in share] for share in shares] == [
        ["0.bias", "1.weight", "1.bias", "2.bias"],
        ["0.weight"],
        ["2.weight"],
    ]
    assert shares[1][0][1] is named[0][1]


def test_orphans_and_idle_optimizers_are_refused() -> None:
    named = list(model().named_parameters())
    with pytest.raises(PlanError, match=r"No optimizer takes 1\.weight, 1\.bias.*AdamW"):
        assign_parameters([SGD(lr=1.0, parameters=("0.*", "2.*"))], named)
    with pytest.raises(PlanError, match=r"Optimizer 1, Muon\(parameters=matrices\), gets no parameter"):
        assign_parameters([AdamW(lr=1.0), Muon(lr=1.0)], named)
    many = [(f"layer{i}", Parameter(torch.zeros(1))) for i in range(20)]
    with pytest.raises(PlanError, match="and 8 more"):
        assign_parameters([], many)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blocks.0.attention.query.weight", (8, 8), True),
        ("layer1.0.conv1.weight", (16, 8, 3, 3), True),
        ("blocks.0.mlp.bias", (8,), False),
        ("token_embedding.weight", (100, 8), False),
        ("transformer.wte.weight", (100, 8), False),
        ("model.embeddings.position.weight", (100, 8), False),
        ("lm_head.weight", (100, 8), False),
        ("heads.head.weight", (100, 8), False),
        ("unembed.weight", (100, 8), False),
        ("position.weight", (64, 8), False),
        ("overhead_projection.weight", (8, 8), True),
        ("gate.weight", (1, 8), False),
        ("scale", (8, 1), False),
        ("scalar", (), False),
    ],
)
def test_matrices(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert matrices(name, Parameter(torch.zeros(shape))) is expected


def test_configurations_are_frozen_and_checked() -> None:
    configuration = AdamW(lr=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        configuration.lr = 1.0  # type: ignore[misc]
    assert configuration.schedule == Constant()
    with pytest.raises(PlanError, match="learning rate"):
        SGD(lr=-1.0)
    with pytest.raises(PlanError, match="learning rate"):
        AdamW(lr=float("nan"))
