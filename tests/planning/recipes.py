"""Small recipes of several kinds, all of V = 8 microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cosmati.core.loss import Classification
from cosmati.core.method import Method
from cosmati.data.in_memory import InMemory
from cosmati.methods import EMA, SAM, GradientClipping
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.mlp import MLP
from cosmati.optim import SGD, AdamW, Muon
from cosmati.optim.optimizers import Optimizer
from cosmati.recipes.recipe import Recipe
from cosmati.train.config import RunConfig

V = 8


class ConvNet(nn.Module):
    """A convolution and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).mean((2, 3)))


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def next_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Buffered(nn.Module):
    """A buffer that is larger than all else, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 1)
        self.register_buffer("table", torch.zeros(1000, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Narrow(nn.Module):
    """Parameters in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP((32, 512, 512, 1)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.bfloat16()).float()


def dense(
    *, optimizer: Optimizer | None = None, methods: tuple[Method, ...] = (), width: int = 128, rows: int = 128
) -> Recipe:
    x = torch.linspace(-1, 1, 2 * rows * 32).reshape(-1, 32)
    return Recipe(
        name="dense",
        model=lambda: MLP((32, width, width, 1)),
        loss=squares,
        data=lambda: InMemory((x, x[:, :1]), rows_per_step=rows),
        optimizers=(optimizer or AdamW(lr=1e-3),),
        methods=methods,
        config=RunConfig(budget="4ba", num_microbatches=V, num_threads=1),
    )


def changed(model: Callable[[], nn.Module], **config: Any) -> Recipe:
    """A dense recipe with another model, and other settings."""
    recipe = dense()
    return dataclasses.replace(recipe, model=model, config=dataclasses.replace(recipe.config, **config))


def averaged() -> Recipe:
    clipping = GradientClipping(clipping_type="norm", clipping_threshold=1.0)
    return dense(methods=(clipping, EMA(half_life="20ba")))


def twice() -> Recipe:
    return dense(optimizer=SGD(lr=0.1, momentum=0.9), methods=(SAM(rho=0.05),))


def images(*methods: Method, side: int = 16, budget: str = "4ba") -> Recipe:
    pixels = torch.linspace(-1, 1, 64 * 3 * side * side).reshape(64, 3, side, side)
    return Recipe(
        name="images",
        model=ConvNet,
        loss=Classification(4),
        data=lambda: InMemory((pixels, torch.arange(64) % 4), rows_per_step=32),
        optimizers=(SGD(lr=0.1),),
        methods=methods,
        config=RunConfig(budget=budget, num_microbatches=V, num_threads=1),
    )


def text(*methods: Method) -> Recipe:
    tokens = (torch.arange(64 * 65) * 7 % 61).reshape(64, 65)
    return Recipe(
        name="text",
        model=lambda: GPT(GPTConfig(vocabulary_size=64, sequence_length=64, width=32, num_heads=2, num_blocks=3)),
        loss=next_tokens,
        data=lambda: InMemory(tokens, rows_per_step=16),
        optimizers=(Muon(lr=0.01), AdamW(lr=1e-3)),
        methods=methods,
        config=RunConfig(budget="4ba", num_microbatches=V, num_threads=1),
    )
