"""Compositions of methods, by task and by how long one trains: `mild` for short runs, `hot` for long ones.

Each function returns a frozen `Composition`; `composition.on(recipe)` puts it on a recipe. Where others published a
composition, its settings are theirs. What these gain here stands in the findings.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from cosmati.core.method import Method
from cosmati.methods import (
    EMA,
    SAM,
    Alibi,
    BlurPool,
    ChannelsLast,
    ColOut,
    LabelSmoothing,
    MixUp,
    ProgressiveResizing,
    RandAugment,
    ScaleSchedule,
    SeqLengthWarmup,
    StochasticDepth,
)
from cosmati.optim import WSD, AdamW, Muon, Optimizer
from cosmati.optim.schedules import Schedule
from cosmati.recipes.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Methods that go together, and the optimizers where they belong to it.

    Args:
        name: of the composition.
        methods: in any order.
        optimizers: in place of the recipe's; empty keeps the recipe's own.
        source: who proposed it, and for what.
    """

    name: str
    methods: tuple[Method, ...]
    optimizers: tuple[Optimizer, ...] = ()
    source: str = ""

    def on(self, recipe: Recipe) -> Recipe:
        """Return a recipe with these methods after its own, and these optimizers if there are some."""
        return dataclasses.replace(
            recipe,
            name=f"{recipe.name}-{self.name}",
            methods=(*recipe.methods, *self.methods),
            optimizers=self.optimizers or recipe.optimizers,
        )


_RESNET_50 = "MosaicML's ResNet-50 recipes on ImageNet (2022): binary cross-entropy, batch 2048, 224 pixels"


def image_mild() -> Composition:
    """Return what helps image classification in short runs: cheap steps, little regularisation."""
    methods = (
        BlurPool(),
        ChannelsLast(),
        EMA(half_life="100ba", update_interval="20ba"),
        LabelSmoothing(smoothing=0.08),
        ProgressiveResizing(initial_scale=0.5, delay_fraction=0.4, finetune_fraction=0.2),
    )
    return Composition(name="mild", methods=methods, source=f"{_RESNET_50}, under 60 epochs")


def image_medium() -> Composition:
    """Return what helps image classification in runs of medium length: MixUp and SAM join in."""
    methods = (
        BlurPool(),
        ChannelsLast(),
        EMA(half_life="100ba", update_interval="20ba"),
        LabelSmoothing(smoothing=0.1),
        MixUp(alpha=0.2),
        ProgressiveResizing(initial_scale=0.5, delay_fraction=0.4, finetune_fraction=0.2),
        SAM(rho=0.5, interval=10),
    )
    return Composition(name="medium", methods=methods, source=f"{_RESNET_50}, 60 to 240 epochs")


def image_hot(
    residual_block: str | type[nn.Module] = "Bottleneck", *, value_range: tuple[float, float] = (0.0, 1.0)
) -> Composition:
    """Return what helps image classification in long runs: strong augmentation, skipped blocks, more of the rest.

    Args:
        residual_block: class of the model's residual blocks, or its name.
        value_range: of the pixels, black to white (see `RandAugment`).
    """
    methods = (
        BlurPool(),
        ChannelsLast(),
        ColOut(p_row=0.05, p_col=0.05),
        EMA(half_life="100ba", update_interval="20ba"),
        LabelSmoothing(smoothing=0.13),
        MixUp(alpha=0.25),
        ProgressiveResizing(initial_scale=0.6, delay_fraction=0.2, finetune_fraction=0.2),
        RandAugment(depth=1, value_range=value_range),
        SAM(rho=0.5, interval=5),
        StochasticDepth(target_layer_name=residual_block, stochastic_method="sample", drop_rate=0.1),
    )
    return Composition(name="hot", methods=methods, source=f"{_RESNET_50}, 270 epochs")


def image_whitepaper(*, ratio: float = 1.0) -> Composition:
    """Return the methodology whitepaper's best composition for a ResNet.

    Args:
        ratio: dilation of the whole run; a tradeoff curve has several.
    """
    methods = (
        BlurPool(),
        ChannelsLast(),
        LabelSmoothing(),
        MixUp(),
        ProgressiveResizing(),
        SAM(),
        ScaleSchedule(ratio=ratio),
    )
    return Composition(
        name="whitepaper", methods=methods, source="MosaicML's whitepaper (2022), ResNet-101 on ImageNet"
    )


def image_cifar() -> Composition:
    """Return the composition that others used for a ResNet-56 on CIFAR-10."""
    methods = (BlurPool(), ChannelsLast(), LabelSmoothing(), MixUp())
    return Composition(name="cifar", methods=methods, source="MosaicML's ResNet-56 on CIFAR-10")


def language_mild(sequence_length: int) -> Composition:
    """Return what helps a language model and leaves its optimizer alone: shorter sequences at the start.

    Args:
        sequence_length: tokens of a row, a multiple of 4.
    """
    return Composition(
        name="mild", methods=(_warmup(sequence_length),), source="what this project's own studies found to compose"
    )


def language_medium(
    sequence_length: int, *, lr: float = 0.03, rest_lr: float = 8e-3, schedule: Schedule | None = None
) -> Composition:
    """Return Muon for the hidden matrices, AdamW for the rest, and shorter sequences at the start.

    Args:
        sequence_length: tokens of a row, a multiple of 4.
        lr: Muon's learning rate; search it.
        rest_lr: AdamW's; search it.
        schedule: of both; None is warm-up and linear decay to zero.
    """
    return Composition(
        name="medium",
        methods=(_warmup(sequence_length),),
        optimizers=_muon(lr, rest_lr, schedule),
        source="what this project's own studies found to compose",
    )


def language_hot(
    sequence_length: int,
    *,
    lr: float = 0.03,
    rest_lr: float = 8e-3,
    schedule: Schedule | None = None,
    block: str | type[nn.Module] = "Block",
) -> Composition:
    """Return `language_medium` with skipped blocks and an average, for runs that pass over their data many times.

    Args:
        sequence_length: tokens of a row, a multiple of 4.
        lr: Muon's learning rate; search it.
        rest_lr: AdamW's; search it.
        schedule: of both; None is warm-up and linear decay to zero.
        block: class of the model's residual blocks, or its name.
    """
    methods = (
        _warmup(sequence_length),
        StochasticDepth(target_layer_name=block, stochastic_method="sample", drop_rate=0.1),
        EMA(half_life="0.02dur"),
    )
    return Composition(
        name="hot",
        methods=methods,
        optimizers=_muon(lr, rest_lr, schedule),
        source="regularisation for several passes over the data; no gain is shown in a single one",
    )


def language_whitepaper(sequence_length: int, *, ratio: float = 1.0) -> Composition:
    """Return the methodology whitepaper's composition for a GPT with learnt absolute positions.

    Args:
        sequence_length: tokens of a row, a multiple of 4.
        ratio: dilation of the whole run; a tradeoff curve has several.
    """
    methods = (
        Alibi(max_sequence_length=sequence_length),
        _warmup(sequence_length),
        ScaleSchedule(ratio=ratio),
    )
    return Composition(
        name="whitepaper", methods=methods, source="MosaicML's whitepaper (2022), GPT of 125M parameters"
    )


def _warmup(sequence_length: int) -> SeqLengthWarmup:
    quarter = max(1, sequence_length // 4)
    return SeqLengthWarmup(
        duration=0.4, min_seq_length=quarter, max_seq_length=sequence_length, step_size=quarter, truncate=False
    )


def _muon(lr: float, rest_lr: float, schedule: Schedule | None) -> tuple[Optimizer, ...]:
    schedule = schedule or WSD(warmup="0.05dur", decay="0.5dur")
    return Muon(lr=lr, schedule=schedule), AdamW(lr=rest_lr, betas=(0.9, 0.98), decay_vectors=False, schedule=schedule)
