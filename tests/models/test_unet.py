"""The U-Net against its formula, written out with functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cosmati.errors import BatchError, PlanError
from cosmati.models.size import count_parameters
from cosmati.models.unet import UNet, UNetConfig

torch.set_num_threads(1)


def stage(weights: dict[str, Tensor], name: str, images: Tensor) -> Tensor:
    """Two convolutions, each with what a fresh BatchNorm does in training, and ReLU."""
    for index in (1, 2):
        images = F.conv2d(images, weights[f"{name}.convolution_{index}.weight"], padding=1)
        mean = images.mean((0, 2, 3), keepdim=True)
        variance = (images - mean).square().mean((0, 2, 3), keepdim=True)
        images = ((images - mean) / (variance + 1e-5).sqrt()).clamp(min=0)
    return images


def test_it_is_the_formula() -> None:
    torch.manual_seed(0)
    model = UNet(UNetConfig(num_classes=5, in_channels=2, widths=(3, 4, 6))).double()
    weights = dict(model.named_parameters())
    images = torch.randn(2, 2, 8, 12, dtype=torch.float64)
    first = stage(weights, "encoder.0", images)
    second = stage(weights, "encoder.1", F.max_pool2d(first, 2))
    lowest = stage(weights, "encoder.2", F.max_pool2d(second, 2))
    hidden = lowest
    for index, beside in enumerate((second, first)):
        upper = weights[f"upsampling.{index}.weight"]
        # A transposed convolution of stride 2 and kernel 2 writes each pixel into a block of its own.
        wide = torch.einsum("nchw,cokl->nohkwl", hidden, upper).reshape(2, upper.shape[1], *beside.shape[2:])
        wide = wide + weights[f"upsampling.{index}.bias"][:, None, None]
        hidden = stage(weights, f"decoder.{index}", torch.cat([beside, wide], 1))
    expected = torch.einsum("nchw,oc->nohw", hidden, weights["head.weight"][:, :, 0, 0])
    torch.testing.assert_close(model(images), expected + weights["head.bias"][:, None, None])
    assert count_parameters(model) == sum(weight.numel() for weight in weights.values())


def test_every_parameter_learns_and_every_size_that_halves_fits() -> None:
    torch.manual_seed(0)
    model = UNet(UNetConfig(widths=(4, 8)))
    logits = model(torch.randn(2, 1, 6, 10))
    assert logits.shape == (2, 11, 6, 10)
    logits.square().mean().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())


def test_sizes_that_do_not_fit_are_said() -> None:
    with pytest.raises(BatchError, match=r"multiples of 4; the images are 8 x 10"):
        UNet(UNetConfig(widths=(4, 4, 4)))(torch.randn(1, 1, 8, 10))
    for options in ({"widths": (4,)}, {"widths": (4, 0)}, {"num_classes": 0}, {"in_channels": 0}):
        with pytest.raises(PlanError, match="two resolutions or more"):
            UNetConfig(**options)
