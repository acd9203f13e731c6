"""A first layer that whitens: its filters decorrelate patches of the data, and needn't be learnt.

Page (2019), How to train your ResNet, DAWNBench; Jordan (2024), 94% on CIFAR-10 in 3.29 seconds, arXiv 2404.00498,
section 3.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.models.resnet import ResNet


def whitening_filters(images: Tensor, kernel: int, stride: int = 1, *, eps: float = 1e-2) -> Tensor:
    """Return filters whose outputs on patches of the images are uncorrelated and of unit variance.

    Args:
        images: [rows, channels, height, width]; a few thousand do.
        kernel: side of a patch.
        stride: between patches.
        eps: added to each variance, in the images' units squared, so that faint directions aren't all noise.

    Returns:
        [channels x kernel x kernel, channels, kernel, kernel], those of the largest variance first. An eigenvector's
        sign is chosen so that its largest component is positive.

    Raises:
        PlanError: these aren't images, or they're smaller than a patch.
    """
    if images.ndim != 4 or min(images.shape[2:]) < kernel or not len(images):
        msg = f"No patches of {kernel} pixels a side in {tuple(images.shape)}. Give [rows, channels, height, width]."
        raise PlanError(msg)
    patches = F.unfold(images.double(), kernel, stride=stride).transpose(1, 2).flatten(0, 1)
    centred = patches - patches.mean(0)
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    filters: Tensor = (directions * largest.sign() / (variances.clamp(min=0) + eps).sqrt()).T.flip(0)
    return filters.view(-1, images.shape[1], kernel, kernel).to(images.dtype)


def whiten_stem(model: ResNet, images: Tensor, *, eps: float = 1e-2) -> None:
    """Set a ResNet's stem to whitening filters and their negatives, and freeze it, in place.

    Both signs, since a ReLU follows. Filters beyond twice the numbers of a patch keep their initial values.

    Args:
        model: its stem's filters are taken up half by half.
        images: [rows, channels, height, width], of those that it trains on.
        eps: see `whitening_filters`.

    Raises:
        PlanError: the stem has an odd number of filters, or reads other channels.
    """
    convolution = model.stem.convolution
    width, channels, kernel, _ = convolution.weight.shape
    if width % 2 or images.ndim != 4 or images.shape[1] != channels:
        msg = (
            f"A stem of {width} filters over {channels} channels can't whiten {tuple(images.shape)}. Use an even "
            "number of filters, and images of as many channels."
        )
        raise PlanError(msg)
    half = whitening_filters(images, kernel, convolution.stride[0], eps=eps)[: width // 2]
    with torch.no_grad():
        convolution.weight[: 2 * len(half)] = torch.cat([half, -half])
    convolution.weight.requires_grad_(False)  # noqa: FBT003  (PyTorch's own)
