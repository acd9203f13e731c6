"""Whitening stems, by what whitening means: outputs without correlation, of unit variance."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cosmati.errors import PlanError
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.models.whitening import whiten_stem, whitening_filters

torch.set_num_threads(1)


def correlated(rows: int = 40, channels: int = 2) -> torch.Tensor:
    noise = torch.randn(rows, channels, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return F.avg_pool2d(noise, 3, stride=1, padding=1) + 0.3 * noise.roll(1, 1) + 2


@pytest.mark.parametrize(("kernel", "stride"), [(2, 1), (3, 2), (4, 2)])
def test_outputs_are_white(kernel: int, stride: int) -> None:
    images = correlated()
    filters = whitening_filters(images, kernel, stride, eps=0.0)
    assert filters.shape == (2 * kernel**2, 2, kernel, kernel)
    outputs = F.conv2d(images, filters, stride=stride).transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.cov(outputs, correction=0), torch.eye(len(filters), dtype=torch.float64))


def test_eps_damps_faint_directions_and_the_order_is_by_variance() -> None:
    images = correlated()
    outputs = F.conv2d(images, whitening_filters(images, 2, eps=0.1)).transpose(0, 1).flatten(1)
    variances = torch.cov(outputs, correction=0).diagonal()
    plain = whitening_filters(images, 2, eps=0.0)
    # A filter's norm is one over its direction's standard deviation.
    raw = 1 / plain.flatten(1).square().sum(1)
    assert bool((raw.diff() < 0).all())
    torch.testing.assert_close(variances, raw / (raw + 0.1))


def test_a_stem_has_both_signs_and_stays() -> None:
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(widths=(12, 4), stem_kernel=2, stem_stride=2))
    before = model.stem.convolution.weight.detach().clone()
    images = correlated(channels=1).float()
    whiten_stem(model, images)
    weight = model.stem.convolution.weight
    expected = whitening_filters(images, 2, 2)
    assert torch.equal(weight[:4], expected)
    assert torch.equal(weight[4:8], -expected)
    assert torch.equal(weight[8:], before[8:])
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["stem.convolution.weight"]


def test_fewer_filters_take_the_largest_variances() -> None:
    model = ResNet(ResNetConfig(widths=(4,), stem_kernel=4, stem_stride=2))
    images = correlated(channels=1).float()
    whiten_stem(model, images)
    expected = whitening_filters(images, 4, 2)[:2]
    assert torch.equal(model.stem.convolution.weight, torch.cat([expected, -expected]))


def test_bad_input_is_refused() -> None:
    with pytest.raises(PlanError, match="No patches"):
        whitening_filters(torch.rand(3, 1, 3, 8), 4)
    with pytest.raises(PlanError, match="No patches"):
        whitening_filters(torch.rand(0, 1, 8, 8), 4)
    with pytest.raises(PlanError, match="even number"):
        whiten_stem(ResNet(ResNetConfig(widths=(5,))), torch.rand(3, 1, 8, 8))
    with pytest.raises(PlanError, match="as many channels"):
        whiten_stem(ResNet(ResNetConfig(widths=(4,))), torch.rand(3, 3, 8, 8))
