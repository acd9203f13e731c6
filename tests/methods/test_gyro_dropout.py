"""Gyro dropout: masks are a fixed set, take turns, and are what they'd be after a restart."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Position
from cosmati.errors import PlanError
from cosmati.methods import GyroDropout
from cosmati.methods.gyro_dropout import GyroDropoutLayer, apply_gyro_dropout


def pattern(layer: nn.Module, rows: int, features: int = 40) -> list[tuple[bool, ...]]:
    return [tuple(row) for row in (layer(torch.ones(rows, features)) > 0).tolist()]


@settings(deadline=None, max_examples=25)
@given(p=st.floats(0.1, 0.9), sigma=st.integers(1, 12), tau=st.integers(1, 12), interval=st.integers(1, 4))
def test_masks_are_a_fixed_set_and_stay_in_use_for_an_interval(p: float, sigma: int, tau: int, interval: int) -> None:
    tau = min(tau, sigma)
    layer = GyroDropoutLayer(p, sigma, tau, interval)
    everyone = {tuple((layer._subnetwork(k, 40) > 0).tolist()) for k in range(sigma)}
    seen = [pattern(layer, 2 * tau) for _ in range(3 * interval)]
    assert {mask for masks in seen for mask in masks} <= everyone
    for phase in range(3):
        inside = seen[phase * interval : (phase + 1) * interval]
        assert all(masks == inside[0] for masks in inside)
    assert all(masks[:tau] == masks[tau:] for masks in seen)


def test_what_is_kept_is_scaled_and_the_mean_stays() -> None:
    layer = GyroDropoutLayer(0.25, 64, 64)
    output = layer(torch.ones(64, 500))
    assert output.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(output.mean()) == pytest.approx(1, abs=0.02)
    assert torch.equal(layer.eval()(x := torch.randn(3, 7)), x)


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5), (6, 5, 2, 2)])
def test_masks_are_over_features(shape: tuple[int, ...]) -> None:
    output = GyroDropoutLayer(0.5, 8, 3)(torch.ones(shape))
    features = output.movedim(1, -1) if len(shape) == 4 else output
    assert features.shape[-1] == 5
    flat = features.reshape(6, -1, 5)
    assert torch.equal(flat, flat[:, :1].expand_as(flat)), "the same at every position"
    assert torch.equal(flat[:3], flat[3:])


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.2), nn.Dropout1d())


def test_replaces_dropout_in_place_with_masks_of_its_own_each() -> None:
    net = model()
    first, second = net[1], net[3]
    calls: list[int] = []
    first.register_forward_hook(lambda *_: calls.append(1))
    assert apply_gyro_dropout(net, 10, 2, 0.5, 8, 4) is net
    assert net[1] is first
    assert isinstance(first, GyroDropoutLayer)
    assert isinstance(second, GyroDropoutLayer)
    assert type(net[4]) is nn.Dropout1d
    assert (first.interval, first.p, first.tau) == (10, 0.5, 4)
    assert pattern(first, 4) != pattern(second, 4)
    assert calls == [1]


def at(step: int, microbatch: int, net: nn.Module, span: str = "32ba") -> Position:
    return Position(Clock(step=step), Budget(Time.parse(span)), 0, microbatch, net, Classification(2))


def masks_of(step: int, microbatch: int, rows: int = 4, before: int = 0) -> Tensor:
    method, net = GyroDropout(sigma=16, tau=8), nn.Sequential(nn.Dropout())
    method.apply(net)
    for _ in range(before):
        net(torch.ones(rows, 9))
    method.batch(Batch((torch.ones(rows, 9), torch.ones(rows)), Lineage.of_rows(0, rows)), at(step, microbatch, net))
    net(torch.ones(rows, 9))
    return net(torch.ones(rows, 9))


def test_the_method_gives_masks_by_position_alone() -> None:
    assert torch.equal(masks_of(5, 1), masks_of(5, 1, before=7))
    # 32 steps for 16 subnetworks, 8 at a time: 16 steps each.
    assert torch.equal(masks_of(0, 0), masks_of(15, 0))
    assert not torch.equal(masks_of(15, 0), masks_of(16, 0))
    # Eight subnetworks over two microbatches of four rows, and then from the start.
    assert not torch.equal(masks_of(0, 0), masks_of(0, 1))
    assert torch.equal(torch.cat([masks_of(0, 0), masks_of(0, 1)]), masks_of(0, 0, rows=8))
    assert torch.equal(masks_of(0, 0), masks_of(0, 2))


def test_copies_and_compiles() -> None:
    net = model()
    apply_gyro_dropout(net, 10, 1, sigma=8, tau=4)
    copied = copy.deepcopy(net)
    x = torch.randn(4, 8)
    net[4].p = copied[4].p = 0.0
    assert torch.equal(net(x), copied(x))
    exported = torch.export.export(net.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), net(x))


def test_off_and_refusals() -> None:
    net = model()
    GyroDropout(p=0.0).apply(net)
    assert type(net[1]) is nn.Dropout
    with pytest.warns(UserWarning, match="GyroDropout changes nothing: Linear has no Dropout"):
        GyroDropout().apply(nn.Linear(2, 2))
    for options in ({"p": 1.0}, {"p": float("nan")}, {"tau": 0}, {"sigma": 4, "tau": 5}):
        with pytest.raises(PlanError, match="GyroDropout can't use p="):
            GyroDropout(**options)
    with pytest.raises(PlanError, match="no known number of steps"):
        GyroDropout().batch(Batch(torch.ones(1), Lineage.of_rows(0, 1)), at(0, 0, net, "9sec"))
