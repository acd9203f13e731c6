"""Compositions: the plan takes them, they train, and the published ones have the published settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from cosmati.core.loss import Classification, LanguageModel
from cosmati.data.in_memory import InMemory
from cosmati.methods import EMA, SAM, Alibi, LabelSmoothing, MixUp, ProgressiveResizing, StochasticDepth
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import SGD, AdamW, Muon
from cosmati.recipes import compositions as c
from cosmati.recipes.recipe import Recipe
from cosmati.train.config import RunConfig

pytestmark = pytest.mark.long

IMAGE: dict[str, Callable[[], c.Composition]] = {
    "mild": c.image_mild,
    "medium": c.image_medium,
    "hot": lambda: c.image_hot("ResidualBlock"),
    "whitepaper": lambda: c.image_whitepaper(ratio=0.5),
    "cifar": c.image_cifar,
}
LANGUAGE: dict[str, Callable[[], c.Composition]] = {
    "mild": lambda: c.language_mild(16),
    "medium": lambda: c.language_medium(16),
    "hot": lambda: c.language_hot(16),
    "whitepaper": lambda: c.language_whitepaper(16, ratio=0.5),
}


def images() -> InMemory:
    generator = torch.Generator().manual_seed(0)
    return InMemory((torch.rand(32, 3, 16, 16, generator=generator), torch.arange(32) % 4), 16)


def text() -> InMemory:
    tokens = torch.randint(0, 256, (32, 17), generator=torch.Generator().manual_seed(0))
    return InMemory((tokens[:, :-1], tokens[:, 1:]), 16)


def base(*, is_text: bool) -> Recipe:
    gpt = GPTConfig(width=16, num_blocks=2, num_heads=2, sequence_length=16, rotary=False)
    return Recipe(
        name="base",
        model=(lambda: GPT(gpt))
        if is_text
        else (lambda: ResNet(ResNetConfig(in_channels=3, widths=(16, 16), num_classes=4))),
        loss=LanguageModel() if is_text else Classification(4),
        data=text if is_text else images,
        optimizers=(AdamW(lr=1e-3) if is_text else SGD(lr=0.01),),
        config=RunConfig(budget="4ba", num_microbatches=2),
    )


@pytest.mark.parametrize(("kind", "name"), [("image", n) for n in IMAGE] + [("language", n) for n in LANGUAGE])
def test_the_plan_takes_it_and_it_trains(kind: str, name: str) -> None:
    composition = (IMAGE if kind == "image" else LANGUAGE)[name]()
    assert composition.name == name
    assert composition.source
    with pytest.raises(dataclasses.FrozenInstanceError):
        composition.name = "other"  # type: ignore[misc]
    recipe = composition.on(base(is_text=kind == "language"))
    assert recipe.name == f"base-{name}"
    trainer = recipe.trainer()
    assert sorted(type(m).__name__ for m in trainer.plan.methods) == sorted(
        type(m).__name__ for m in composition.methods
    )
    assert trainer.fit().outcome == "completed"
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())


def settings(composition: c.Composition, kind: type) -> object:
    return next(method for method in composition.methods if isinstance(method, kind))


def test_published_settings() -> None:
    mild, medium, hot = c.image_mild(), c.image_medium(), c.image_hot()
    assert [settings(x, LabelSmoothing).smoothing for x in (mild, medium, hot)] == [0.08, 0.1, 0.13]  # type: ignore[attr-defined]
    assert [settings(x, SAM) for x in (medium, hot)] == [SAM(rho=0.5, interval=10), SAM(rho=0.5, interval=5)]
    assert [settings(x, MixUp).alpha for x in (medium, hot)] == [0.2, 0.25]  # type: ignore[attr-defined]
    assert settings(mild, EMA) == EMA(half_life="100ba", update_interval="20ba")
    assert settings(hot, ProgressiveResizing) == ProgressiveResizing(
        initial_scale=0.6, delay_fraction=0.2, finetune_fraction=0.2
    )
    assert settings(hot, StochasticDepth) == StochasticDepth(
        target_layer_name="Bottleneck", stochastic_method="sample", drop_rate=0.1
    )
    assert settings(c.language_whitepaper(64), Alibi) == Alibi(max_sequence_length=64)


def test_optimizers_are_replaced_where_they_belong_to_it() -> None:
    recipe = base(is_text=True)
    assert c.language_mild(16).on(recipe).optimizers == recipe.optimizers
    first, rest = c.language_medium(16, lr=0.05, rest_lr=0.001).on(recipe).optimizers
    assert isinstance(first, Muon)
    assert (first.lr, rest.lr) == (0.05, 0.001)
