"""The headline's image task once more, of PyTorch, NumPy and gzip alone: nothing of ours.

A residual network of three blocks on Fashion-MNIST, read from its published files, in bfloat16 autocast with channels
last. The composition has Muon (PyTorch's own) for kernels, wider stages, and a stem of stride 2 that whitens patches.
Kernels are matrices [out, in x height x width], which is what Muon steps.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.headline.independent_loop import Settings, descend, matrices_and_vectors, trapezoid

ROWS_OF_FULL_BUDGET = 100_000
NUM_TRAINED_ON = 50_000
NUM_WHITENED = 2000
VARIANCE_FLOOR = 1e-2
MEAN, DEVIATION = 0.2860, 0.3530
"""Of the training part's grey levels in [0, 1]."""


@dataclass(frozen=True)
class Part:
    """Images, float32 [rows, 1, 28, 28], of mean 0 and deviation 1 over the training part; labels [rows]."""

    images: Tensor
    labels: Tensor


def read_part(folder: Path, name: str) -> Part:
    """Read `train` or `t10k`: after 16 bytes, or 8, all is pixels, or labels."""
    pixels = unpacked(folder / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    labels = unpacked(folder / f"{name}-labels-idx1-ubyte.gz", 8)
    images = torch.from_numpy((pixels.astype(np.float32) / 255 - MEAN) / DEVIATION)
    return Part(images, torch.from_numpy(labels.astype(np.int64)))


def unpacked(path: Path, start: int) -> NDArray[np.uint8]:
    return np.frombuffer(gzip.decompress(path.read_bytes())[start:], np.uint8)


class Kernel(nn.Module):
    """A convolution whose weights are a matrix; they start for a ReLU that follows, by the fan of what goes out."""

    def __init__(self, channels: int, width: int, side: int, stride: int = 1) -> None:
        super().__init__()
        self.shape, self.stride, self.padding = (width, channels, side, side), stride, (side - 1) // 2
        scale = (2 / (width * side * side)) ** 0.5
        self.weight = nn.Parameter(torch.randn(width, channels * side * side) * scale)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.weight.view(self.shape).contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, kernel, stride=self.stride, padding=self.padding)


class IndependentResidual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = Kernel(channels, width, 3, stride), Kernel(width, width, 3)
        self.norm, self.last_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if channels == width else Kernel(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.second(F.relu(self.norm(self.first(x))))
        return F.relu(self.last_norm(branch) + self.shortcut(x))


class IndependentResNet(nn.Module):
    """Stem, three blocks of which the second and third halve the resolution, average over places, linear head."""

    def __init__(self, widths: tuple[int, int, int], stem: Kernel, *, zero_init: bool) -> None:
        super().__init__()
        a, b, c = widths
        self.stem, self.stem_norm = stem, nn.BatchNorm2d(a)
        blocks = [IndependentResidual(a, a, 1), IndependentResidual(a, b, 2), IndependentResidual(b, c, 2)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(c, 10)
        if zero_init:
            for block in blocks:
                nn.init.zeros_(block.last_norm.weight)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem_norm(self.stem(images))))
        return self.head(x.mean((2, 3)))


def whitening(images: Tensor, side: int, stride: int) -> Tensor:
    """Return filters [side^2, side^2] whose outputs on patches are uncorrelated, those of most variance first."""
    patches = images.squeeze(1).unfold(1, side, stride).unfold(2, side, stride).reshape(-1, side * side).double()
    _, singular, directions = torch.linalg.svd(torch.cov(patches.T, correction=0))
    return (directions / (singular + VARIANCE_FLOOR).sqrt()[:, None]).float()


def composed(train: Part, *, zero_init: bool) -> IndependentResNet:
    """Return the composition's model: each whitening filter and its negative, since a ReLU follows; they stay so."""
    stem = Kernel(1, 32, 4, stride=2)
    filters = whitening(train.images[:NUM_WHITENED], 4, 2)
    stem.weight = nn.Parameter(torch.cat([filters, -filters]), requires_grad=False)
    return IndependentResNet((32, 48, 64), stem, zero_init=zero_init)


def optimizers_of(model: IndependentResNet, settings: Settings, *, is_composition: bool) -> list[torch.optim.Optimizer]:
    """Return SGD that decays matrices, or Muon for the kernels that learn, and SGD without decay for the rest."""
    lr, momentum, decay = (float(settings[name]) for name in ("lr", "momentum", "weight_decay"))
    learning = [p for p in model.parameters() if p.requires_grad]
    if not is_composition:
        groups = matrices_and_vectors(learning, decay)
        return [torch.optim.SGD(groups, lr, momentum=momentum, nesterov=momentum > 0)]
    kernels = [p for p in model.blocks.parameters() if p.ndim > 1]
    rest = [p for p in learning if all(p is not kernel for kernel in kernels)]
    return [
        torch.optim.Muon(kernels, lr, decay, momentum, nesterov=True, ns_steps=int(settings["num_iterations"])),
        torch.optim.SGD(rest, settings["rest_lr"], momentum=0.9, nesterov=True),
    ]


def run_images(
    folder: Path, settings: Settings, budget: float, seed: int, *, is_composition: bool, rows: str = "reported"
) -> tuple[float, int]:
    """Train, and return accuracy on the test part (or on the training part's last 10,000) and the number of steps."""
    torch.manual_seed(seed)
    train = read_part(folder, "train")
    learnt = Part(train.images[:NUM_TRAINED_ON], train.labels[:NUM_TRAINED_ON])
    held_out = Part(train.images[NUM_TRAINED_ON:], train.labels[NUM_TRAINED_ON:])
    measured = read_part(folder, "t10k") if rows == "reported" else held_out
    batch_size, zero_init = int(settings["batch_size"]), bool(settings["zero_init"])
    num_steps = max(1, round(ROWS_OF_FULL_BUDGET * budget / batch_size))
    model = composed(learnt, zero_init=zero_init) if is_composition else opponent(zero_init=zero_init)
    # What doesn't fill a step at the end of a pass is left out.
    passes = -(-num_steps // (NUM_TRAINED_ON // batch_size))
    steps = [step for _ in range(passes) for step in torch.randperm(NUM_TRAINED_ON).split(batch_size)]
    steps = [step for step in steps if len(step) == batch_size][:num_steps]
    warmup = float(settings["warmup"])
    decay, smoothing = min(float(settings["decay"]), 1 - warmup), float(settings["label_smoothing"])

    def loss(step: Tensor) -> Tensor:
        logits = model(learnt.images[step]).float()
        return F.cross_entropy(logits, learnt.labels[step], label_smoothing=smoothing)

    descend(
        model,
        optimizers_of(model, settings, is_composition=is_composition),
        lambda step: trapezoid(step, num_steps, warmup, decay),
        steps,
        loss,
        str(settings["clipping"]),
    )
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        guesses = torch.cat([model(images).argmax(1) for images in measured.images.split(500)])
    return (guesses == measured.labels).double().mean().item(), num_steps


def opponent(*, zero_init: bool) -> IndependentResNet:
    return IndependentResNet((16, 32, 64), Kernel(1, 16, 3), zero_init=zero_init)
