"""Clipping against torch's own, loops in float64, and what regions may know of one another."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError
from cosmati.methods.gradient_clipping import GradientClipping, apply_gradient_clipping
from cosmati.testing.pieces import gradients_of, weights_of

torch.set_num_threads(1)


def model(seed: int = 0, scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2, bias=False))
    net.register_parameter("gain", nn.Parameter(torch.tensor(0.5)))
    for parameter in net.parameters():
        parameter.grad = scale * torch.randn_like(parameter)
    nn.init.zeros_(net[0].bias)  # type: ignore[arg-type]
    return net


def held(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def position(net: nn.Module) -> Position:
    return Position(Clock(), Budget(Time.parse("10ba")), 0, 0, net, None)


def clip(method: GradientClipping, net: nn.Module, regions: dict[str, int] | None = None) -> dict[str, Tensor]:
    values = held(net)
    given_values = gradients_of(net, regions)
    found = method.gradients(given_values, weights_of(net, regions), position(net)).tensors
    assert all(torch.equal(value, values[name]) for name, value in given_values.tensors.items()), "given values stay"
    return dict(found)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 50), st.floats(0.01, 20), st.sampled_from(["norm", "value"]))
def test_method_has_torch_bits(seed: int, threshold: float, kind: Any) -> None:
    net = model(seed)
    found = clip(GradientClipping(clipping_type=kind, clipping_threshold=threshold), net)
    if kind == "norm":
        nn.utils.clip_grad_norm_(net.parameters(), threshold)
    else:
        nn.utils.clip_grad_value_(net.parameters(), threshold)
    assert all(torch.equal(value, found[name]) for name, value in held(net).items())


@pytest.mark.long
@given(st.integers(0, 50), st.floats(0.01, 5), st.floats(0.1, 10))
def test_norm_is_at_most_the_threshold(seed: int, threshold: float, scale: float) -> None:
    net = model(seed, scale)
    before = math.sqrt(sum(float(value.double().square().sum()) for value in held(net).values()))
    found = clip(GradientClipping(clipping_type="norm", clipping_threshold=threshold), net)
    after = math.sqrt(sum(float(value.double().square().sum()) for value in found.values()))
    assert after == pytest.approx(min(before, threshold), rel=1e-4)


def units(tensor: Tensor) -> Iterator[tuple[Any, Tensor]]:
    if tensor.ndim <= 1:
        yield ..., tensor
    else:
        yield from enumerate(tensor)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 50), st.floats(1e-3, 2), st.floats(0.01, 10))
def test_adaptive_unit_by_unit(seed: int, threshold: float, scale: float) -> None:
    net = model(seed, scale)
    found = clip(GradientClipping(clipping_type="adaptive", clipping_threshold=threshold), net)
    for name, parameter in net.named_parameters():
        for index, unit in units(held(net)[name]):
            gradient = unit.double()
            weight = max(float(parameter.detach()[index].double().norm()), 1e-3)
            norm = float(gradient.norm())
            expected = gradient * (threshold * weight / norm) if norm > threshold * weight else gradient
            torch.testing.assert_close(found[name][index].double(), expected, atol=1e-7, rtol=1e-4)


def test_adaptive_lets_weights_of_zero_learn_and_zero_gradients_be() -> None:
    net = model()
    nn.init.zeros_(net[3].weight)  # type: ignore[arg-type]
    net[0].weight.grad = torch.zeros_like(net[0].weight)  # type: ignore[arg-type]
    for threshold in (0.01, 0.0):
        found = clip(GradientClipping(clipping_type="adaptive", clipping_threshold=threshold), net)
        assert torch.equal(found["0.weight"], torch.zeros_like(found["0.weight"]))
        assert bool(found["3.weight"].any()) is (threshold > 0)


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_function_equals_method(kind: Any) -> None:
    net = model(3, 2.0)
    found = clip(GradientClipping(clipping_type=kind, clipping_threshold=0.2), net)
    apply_gradient_clipping(net, kind, 0.2)
    assert list(found) == list(held(net))
    assert all(torch.equal(value, held(net)[name]) for name, value in found.items())


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_below_the_threshold_and_at_infinity_nothing_changes(kind: Any) -> None:
    net = model()
    found = clip(GradientClipping(clipping_type=kind, clipping_threshold=1e6), net)
    assert all(torch.equal(value, held(net)[name]) for name, value in found.items())
    off = GradientClipping(clipping_type=kind, clipping_threshold=math.inf)
    values = gradients_of(net)
    assert off.gradients(values, weights_of(net), position(net)) is values
    assert off.couples == frozenset()
    empty = Pieces({})
    on = GradientClipping(clipping_type=kind, clipping_threshold=1.0)
    assert on.gradients(empty, weights_of(net), position(net)) is empty


def test_a_region_does_not_feel_another_one() -> None:
    net = model()
    regions = {name: int(name.startswith("3")) for name, _ in net.named_parameters()}
    own = GradientClipping(clipping_type="norm", clipping_threshold=0.5, per_region=True)
    found = clip(own, net, regions)
    for region in (0, 1):
        members = [found[name].double().norm() for name, index in regions.items() if index == region]
        assert float(torch.stack(members).norm()) == pytest.approx(0.5, rel=1e-4)
    net[3].weight.grad *= 100  # type: ignore[operator]
    again = clip(own, net, regions)
    assert all(torch.equal(again[name], found[name]) for name, index in regions.items() if index == 0)
    assert own.couples == frozenset()
    common = GradientClipping(clipping_type="norm", clipping_threshold=0.5)
    assert common.couples == {"regions"}
    assert not torch.equal(clip(common, net, regions)["0.weight"], found["0.weight"])


def test_absent_stays_absent() -> None:
    net = model()
    net[0].weight.grad = None  # type: ignore[union-attr]
    for kind in ("norm", "value", "adaptive"):
        method = GradientClipping(clipping_type=kind, clipping_threshold=0.1)  # type: ignore[arg-type]
        assert "0.weight" not in clip(method, net)
        apply_gradient_clipping(net, kind, 0.1)  # type: ignore[arg-type]
        assert net[0].weight.grad is None
    untouched = nn.Linear(2, 2)
    apply_gradient_clipping(untouched, "norm", 1.0)
    assert untouched.weight.grad is None


def test_refuses() -> None:
    assert GradientClipping.stage is Stage.GRADIENT
    with pytest.raises(PlanError, match="'norm', 'value' or 'adaptive'"):
        GradientClipping(clipping_type="soft", clipping_threshold=1.0)  # type: ignore[arg-type]
    for bad in (-1.0, math.nan):
        with pytest.raises(PlanError, match="no bound"):
            GradientClipping(clipping_type="norm", clipping_threshold=bad)
    with pytest.raises(PlanError, match="per_region"):
        GradientClipping(clipping_type="value", clipping_threshold=1.0, per_region=True)
    with pytest.raises(PlanError, match="not known"):
        apply_gradient_clipping(model(), "soft", 1.0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="whole units"):
        apply_gradient_clipping(model(), "adaptive", 1.0, fsdp_enabled=True)


def test_shards(tmp_path: Path) -> None:
    """One rank: the norm of shards goes through torch's own reduction."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        plain = copy.deepcopy(net)
        fully_shard(net, mesh=mesh)
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
        for each in (net, plain):
            (each(data).square().sum() * 100).backward()
        apply_gradient_clipping(net, "norm", 0.5, fsdp_enabled=True)
        apply_gradient_clipping(plain, "norm", 0.5)
        for sharded, whole in zip(net.parameters(), plain.parameters(), strict=True):
            assert isinstance(sharded.grad, DTensor)
            torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)
        apply_gradient_clipping(net, "value", 0.01, fsdp_enabled=True)
        assert all(float(p.grad.full_tensor().abs().max()) <= 0.01 for p in net.parameters())  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
