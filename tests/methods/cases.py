"""Every method with settings that act within five steps, and the small real runs that the contract is shown on."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from cosmati import methods as m
from cosmati.core.loss import Classification, LanguageModel
from cosmati.core.method import Method
from cosmati.data.in_memory import InMemory
from cosmati.methods.building_blocks.surgery import replace_modules
from cosmati.models.gpt import GPT, GPTConfig
from cosmati.models.resnet import ResNet, ResNetConfig
from cosmati.optim import AdamW, Cosine
from cosmati.train.config import RunConfig
from cosmati.train.observers import Observer, StepReport
from cosmati.train.trainer import Trainer

NUM_STEPS = 5

Outcome = Literal["trains", "refused", "nothing to change"]


@dataclass(frozen=True)
class Case:
    """A method with settings that act within five steps, its off-value, and what it trains on.

    Attributes:
        on: the settings.
        off: those that do nothing, where there are some.
        is_text: whether it's shown on the language model, not on the vision model.
        on_text: the settings for the language model, where they differ.
        vision: what becomes of it on the vision model.
        language: what becomes of it on the language model.
        learns: whether the loss falls.
        adds_parameters: whether the trained weights no longer fit the model that the user gave.
        precision: in which it acts.
        group_norm: whether it's shown on the vision model with GroupNorm in place of BatchNorm.
    """

    on: Method
    off: Method | None
    is_text: bool = False
    on_text: Method | None = None
    vision: Outcome = "trains"
    language: Outcome = "trains"
    learns: bool = True
    adds_parameters: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    group_norm: bool = False

    def __str__(self) -> str:
        return type(self.on).__name__

    def settings(self, *, is_text: bool) -> Method:
        """Return the settings for one of the models."""
        return (self.on_text or self.on) if is_text else self.on

    def outcome(self, *, is_text: bool) -> Outcome:
        """Return what becomes of it on one of the models."""
        return self.language if is_text else self.vision


_CASES = (
    Case(
        m.Alibi(max_sequence_length=15, train_sequence_length_scaling=0.2),
        None,
        is_text=True,
        vision="refused",
        adds_parameters=True,
    ),
    Case(m.AugMix(), m.AugMix(severity=0), language="refused"),
    Case(
        m.BlurPool(min_channels=1),
        m.BlurPool(replace_convs=False, replace_maxpools=False),
        language="nothing to change",
    ),
    Case(m.ChannelsLast(), None),
    Case(m.ColOut(), m.ColOut(p_row=0.0, p_col=0.0), language="refused"),
    Case(m.CropAndFlip(padding=2), m.CropAndFlip(padding=0, p=0.0), language="refused"),
    Case(m.CutMix(), m.CutMix(alpha=0.0), language="refused"),
    Case(m.CutOut(), m.CutOut(num_holes=0), language="refused"),
    Case(m.DepthCurriculum(end=0.8), m.DepthCurriculum(end=0.0)),
    Case(m.EMA(half_life="2ba"), m.EMA(half_life="0ba")),
    Case(
        m.Factorize(min_channels=4, latent_channels=0.5, min_features=4, latent_features=0.5),
        m.Factorize(factorize_convs=False, factorize_linears=False),
        adds_parameters=True,
    ),
    Case(m.GatedLinearUnits(), None, is_text=True, vision="nothing to change", adds_parameters=True),
    Case(m.GhostBatchNorm(ghost_batch_size=4), m.GhostBatchNorm(ghost_batch_size=1000), language="nothing to change"),
    Case(
        m.GradientClipping(clipping_type="norm", clipping_threshold=0.1),
        m.GradientClipping(clipping_type="norm", clipping_threshold=float("inf")),
    ),
    Case(m.GyroDropout(sigma=4, tau=2), m.GyroDropout(p=0.0), is_text=True, vision="nothing to change"),
    Case(m.IsolatedAdapters(classes="open/psf", rank=2), m.IsolatedAdapters(), adds_parameters=True),
    Case(m.LabelSmoothing(), m.LabelSmoothing(smoothing=0.0)),
    Case(m.LayerFreezing(freeze_start=0.1), m.LayerFreezing(freeze_level=0.0)),
    Case(
        m.LowPrecisionGroupNorm(),
        None,
        precision="bfloat16",
        group_norm=True,
        vision="nothing to change",
        language="nothing to change",
    ),
    Case(m.LowPrecisionLayerNorm(), None, is_text=True, precision="bfloat16", vision="nothing to change"),
    Case(m.MixUp(), m.MixUp(alpha=0.0), language="refused"),
    Case(m.NoOpModel(), None, learns=False),
    Case(m.ProgressiveResizing(delay_fraction=0.3), m.ProgressiveResizing(initial_scale=1.0), language="refused"),
    Case(m.RandAugment(), m.RandAugment(depth=0), language="refused"),
    Case(m.SAM(interval=2), m.SAM(rho=0.0)),
    Case(m.ScaleSchedule(ratio=0.5), m.ScaleSchedule(ratio=1.0)),
    Case(m.SelectiveBackprop(start=0.0, end=1.0), m.SelectiveBackprop(keep=1.0)),
    Case(
        m.SeqLengthWarmup(duration=0.5, min_seq_length=4, max_seq_length=15, step_size=4),
        m.SeqLengthWarmup(duration=0.0, max_seq_length=15),
        is_text=True,
        vision="refused",
    ),
    Case(
        m.SqueezeExcite(latent_channels=2, min_channels=4),
        None,
        language="nothing to change",
        adds_parameters=True,
    ),
    Case(
        m.StochasticDepth(target_layer_name="ResidualBlock", drop_rate=0.5, drop_warmup="2ba"),
        m.StochasticDepth(target_layer_name="ResidualBlock", drop_rate=0.0),
        on_text=m.StochasticDepth(target_layer_name="Block", stochastic_method="sample"),
    ),
    Case(
        m.SWA(swa_start="1ba", swa_end="4ba", update_interval="1ba", schedule_swa_lr=True, swa_lr=0.005),
        m.SWA(swa_start="1dur"),
    ),
    Case(m.WeightStandardization(), None, language="nothing to change"),
)
CASES = tuple(sorted(_CASES, key=lambda case: str(case).casefold()))


@cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:64] / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels[:64])


def text() -> tuple[Tensor, Tensor]:
    tokens = torch.tensor(list(b"marble of known origin, laid piece by piece into patterns. " * 20))[:1024].view(64, 16)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def network(*, is_text: bool, group_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if is_text:
        return GPT(GPTConfig(width=16, num_blocks=2, num_heads=2, sequence_length=15, dropout=0.1, rotary=False))
    model = ResNet(ResNetConfig(widths=(4, 8), stem_max_pool=True))
    if group_norm:
        norms = {n: nn.GroupNorm(2, n.num_features) for n in model.modules() if isinstance(n, nn.BatchNorm2d)}
        replace_modules(model, norms)
    return model


def network_of(case: Case) -> nn.Module:
    return network(is_text=case.is_text, group_norm=case.group_norm)


def trainer(
    chosen: Sequence[Method],
    *,
    is_text: bool = False,
    group_norm: bool = False,
    observers: Sequence[Observer] = (),
    **config: Any,
) -> Trainer:
    source = InMemory(text() if is_text else digits(), rows_per_step=16)
    loss = LanguageModel() if is_text else Classification(10)
    settings = {"budget": f"{NUM_STEPS}ba", "num_microbatches": 2, **config}
    optimizers = [AdamW(lr=0.01, schedule=Cosine(warmup="1ba"))]
    return Trainer(
        network(is_text=is_text, group_norm=group_norm),
        loss,
        source,
        optimizers=optimizers,
        methods=chosen,
        observers=observers,
        config=RunConfig(**settings),
    )


def run_of(case: Case, **options: Any) -> Trainer:
    """Return the run that shows a case."""
    return trainer([case.on], **{**setting_of(case), **options})


def without(case: Case, **options: Any) -> Trainer:
    """Return the same run without the method."""
    return trainer([], **{**setting_of(case), **options})


def setting_of(case: Case) -> dict[str, Any]:
    return {"is_text": case.is_text, "group_norm": case.group_norm, "precision": case.precision}


def everything(run: Trainer) -> dict[str, Tensor]:
    """Return all that a run ends with: weights, buffers, optimizer and method states."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    found: dict[str, Tensor] = dict(run.model.state_dict())
    for optimizer in run.assembly.optimizers:
        for parameter, state in optimizer.optimizer.state.items():
            found |= {f"{names[id(parameter)]}/{k}": v for k, v in state.items() if isinstance(v, Tensor)}
    for index, state in run.states.items():
        found |= {f"method {index}/{name}": value for name, value in state.items()}
    return found


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


@cache
def plain_end(*, is_text: bool, group_norm: bool = False, **config: Any) -> Mapping[str, Tensor]:
    """Return what a run without methods ends with. Many tests compare with the same one: nobody may write to it."""
    run = trainer([], is_text=is_text, group_norm=group_norm, **config)
    run.fit()
    return everything(run)


class StopAt(Observer):
    """Asks for a stop as an operating system does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Losses(Observer):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.values.append(float(report.loss))
