"""Images, Fashion-MNIST: a tuned opponent and a composition, one CPU thread a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from cosmati import methods as m
from cosmati.core.method import Method
from cosmati.models.resnet import ResNetConfig
from cosmati.optim import SGD, WSD, Muon, Optimizer
from cosmati.recipes.fashion import FashionEvaluation, fashion_resnet
from cosmati.recipes.recipe import Recipe
from cosmati.records.study import Setting
from cosmati.study.search import Dimension

ArmName = Literal["opponent", "composition"]
Rows = Literal["selection", "reported"]
Settings = Mapping[str, Setting]

FULL_ROWS = 100_000
"""Rows of the largest budget: two passes over the training rows."""
BUDGETS = (0.25, 0.5, 1.0)

SHARED: tuple[Dimension, ...] = (
    Dimension(name="batch_size", choices=(64, 128, 256, 512)),
    Dimension(name="lr", low=0.01, high=2.0),
    Dimension(name="momentum", choices=(0.8, 0.85, 0.9, 0.95)),
    Dimension(name="weight_decay", low=1e-5, high=1e-2),
    Dimension(name="clipping", choices=(0.5, 2.0, 8.0, float("inf"))),
    Dimension(name="warmup", low=0.0, high=0.4, is_log=False),
    Dimension(name="decay", low=0.2, high=1.0, is_log=False),
    Dimension(name="zero_init", choices=(False, True)),
    Dimension(name="label_smoothing", low=0.0, high=0.2, is_log=False),
)
KNOWN: Mapping[ArmName, tuple[Settings, ...]] = {
    "opponent": (
        {
            "batch_size": 128,
            "lr": 0.2,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "clipping": float("inf"),
            "warmup": 0.1,
            "decay": 0.9,
            "zero_init": False,
            "label_smoothing": 0.0,
        },
    ),
}


def shared_methods(settings: Settings) -> tuple[Method, ...]:
    """Return what every arm may use."""
    found: list[Method] = []
    if settings["label_smoothing"]:
        found.append(m.LabelSmoothing(smoothing=float(settings["label_smoothing"])))
    if float(settings["clipping"]) < float("inf"):
        found.append(m.GradientClipping(clipping_type="norm", clipping_threshold=float(settings["clipping"])))
    return tuple(found)


def recipe(arm: ArmName, settings: Settings, budget: float, seed: int, *, rows: Rows) -> Recipe:
    """Return an arm's recipe at a share of the full budget."""
    batch = int(settings["batch_size"])
    warmup = float(settings["warmup"])
    schedule = WSD(warmup=f"{warmup}dur", decay=f"{min(float(settings['decay']), 1 - warmup)}dur")
    sgd = SGD(
        lr=float(settings["lr"]),
        momentum=float(settings["momentum"]),
        nesterov=True,
        weight_decay=float(settings["weight_decay"]),
        decay_vectors=False,
        schedule=schedule,
    )
    made = fashion_resnet(
        num_steps=max(1, round(FULL_ROWS * budget / batch)),
        seed=seed,
        rows_per_step=batch,
        model=ResNetConfig(zero_init_residual=bool(settings["zero_init"])),
        optimizers=(sgd,),
        methods=shared_methods(settings),
        evaluation=FashionEvaluation(rows=rows),
    )
    return replace(made, name=arm, config=replace(made.config, num_threads=1))
