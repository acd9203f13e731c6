"""Bare loops of `benchmarks.composed`: plain, and with five methods as functions that do what Composer's do."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.composed_task import NUM_CLASSES, Batches, Task, serve

SMOOTHING, ALPHA, HALF_LIFE = 0.1, 0.2, 100


def bare(task: Task, batches: Batches, num_batches: int) -> None:
    model = task.model()
    optimizer = task.sgd(model)
    for _, (images, labels) in zip(range(num_batches), batches, strict=False):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def functional(task: Task, batches: Batches, num_batches: int) -> None:
    model = blurred(task.model()).to(memory_format=torch.channels_last)
    optimizer = task.sgd(model)
    averages = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _, batch in zip(range(num_batches), batches, strict=False):
        images, labels, permuted, mixing = mixed(*batch)
        logits = model(images)
        target = (1 - mixing) * one_hot(labels) + mixing * one_hot(permuted)
        target = target * (1 - SMOOTHING) + SMOOTHING / NUM_CLASSES
        (-(target * logits.log_softmax(1)).sum(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        follow(averages, model, 2 ** (-1 / HALF_LIFE))


class Blurred(nn.Module):
    """A strided convolution of an image that was blurred, with zeros around it."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("filter", (row[:, None] * row).repeat(convolution.in_channels, 1, 1, 1))

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution."""
        return self.convolution(F.conv2d(input, self.filter, padding=1, groups=input.shape[1]))


def blurred(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d) and child.stride != (1, 1) and not isinstance(module, Blurred):
                setattr(module, name, Blurred(child))
    return model


def mixed(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    drawn = np.random.beta(ALPHA, ALPHA)  # noqa: NPY002  (as Composer draws)
    mixing = min(drawn, 1 - drawn)
    order = torch.randperm(len(images))
    return (1 - mixing) * images + mixing * images[order], labels, labels[order], mixing


def one_hot(labels: Tensor) -> Tensor:
    return torch.zeros(len(labels), NUM_CLASSES).scatter_(1, labels[:, None], 1.0)


@torch.no_grad()
def follow(averages: dict[str, Tensor], model: nn.Module, smoothing: float) -> None:
    for name, tensor in model.state_dict().items():
        averages[name].copy_(averages[name] * smoothing + tensor * (1 - smoothing))


if __name__ == "__main__":
    serve({"none": bare, "five": functional}, f"PyTorch {torch.__version__}")
