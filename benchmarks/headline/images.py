"""Images, Fashion-MNIST: a tuned opponent, a plain recipe, a composition and its parts; one CPU thread a run.

Quality is accuracy on 10,000 rows. Cross-entropy would be less noisy from seed to seed, but label smoothing, which all
arms may use, and mixed targets move it by what they are; accuracy moves by definition with none of the parts. Settings
are chosen on the last 10,000 rows of the training part, and reported on the test part; nothing is trained on either.
All arms run in bfloat16 with channels last, which is plainly faster here, whatever else they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

from cosmati import methods as m
from cosmati.core.method import Method
from cosmati.corpora.fashion_mnist import load_fashion_mnist
from cosmati.errors import PlanError
from cosmati.models.resnet import ResNetConfig
from cosmati.optim import SGD, WSD, Cosine, Muon, Optimizer
from cosmati.recipes.compositions import image_whitepaper
from cosmati.recipes.fashion import BuildWhitenedResNet, FashionEvaluation, fashion_resnet
from cosmati.recipes.recipe import Recipe
from cosmati.records.study import Setting
from cosmati.study.search import Dimension

ArmName = Literal["opponent", "composition"]
Rows = Literal["selection", "reported"]
Settings = Mapping[str, Setting]

QUALITY = "accuracy"
FULL_ROWS = 100_000
"""Rows of the largest budget: two passes over the training rows."""
BUDGETS = (0.25, 0.5, 1.0)
OFF = "off"
"""No clipping."""

SHARED: tuple[Dimension, ...] = (
    Dimension(name="batch_size", choices=(64, 128, 256), wider=((16, 32), (512, 1024))),
    Dimension(name="lr", low=0.02, high=1.0),
    Dimension(name="momentum", choices=(0.7, 0.8, 0.85, 0.9, 0.95), wider=((0.0, 0.5), (0.98,))),
    Dimension(name="weight_decay", low=1e-5, high=1.0, widest=(0.0, 10.0)),
    Dimension(name="clipping", choices=("1", "4", OFF), wider=(("0.25",), ())),
    Dimension(name="warmup", low=0.0, high=0.4, is_log=False, widest=(0.0, 0.8)),
    Dimension(name="decay", low=0.2, high=1.0, is_log=False, widest=(0.0, 1.0)),
    Dimension(name="zero_init", choices=(False, True)),
    Dimension(name="label_smoothing", low=0.0, high=0.2, is_log=False, widest=(0.0, 0.5)),
)
"""Of the opponent and the composition alike. Weight decay reaches from SGD's, added to gradients, to Muon's, which the
learning rate multiplies; `lr` and `momentum` are SGD's or Muon's."""
OWN: tuple[Dimension, ...] = (
    Dimension(name="rest_lr", low=0.02, high=1.0),
    Dimension(name="num_iterations", choices=(3, 5), wider=((2,), ())),
)
"""Of the composition: the rate of SGD for what Muon leaves, and Newton-Schulz's steps."""

_PLAIN_SGD: Settings = {
    "batch_size": 128,
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "clipping": OFF,
    "warmup": 0.0,
    "decay": 1.0,
    "zero_init": False,
    "label_smoothing": 0.0,
}
_TRIED_SGD: Settings = {**_PLAIN_SGD, "batch_size": 64, "lr": 0.2, "warmup": 0.1, "decay": 0.9}
_TRIED_MUON: Settings = {
    **_TRIED_SGD,
    "batch_size": 128,
    "lr": 0.03,
    "momentum": 0.8,
    "weight_decay": 0.5,
    "label_smoothing": 0.1,
    "rest_lr": 0.2,
    "num_iterations": 5,
}
KNOWN: Mapping[ArmName, tuple[Settings, ...]] = {
    "opponent": ({**_TRIED_SGD, "label_smoothing": 0.1}, _TRIED_SGD, _PLAIN_SGD),
    "composition": (_TRIED_MUON, {**_TRIED_MUON, "lr": 0.05}),
}
"""The best settings known before any search."""
BY_HAND: Mapping[ArmName, int] = {"opponent": 10, "composition": 50}
"""Trials before the search, about; the composition's were of its model too."""

PARTS: tuple[str, ...] = ("muon", "stem", "widths", "whitening")
"""What the composition has more than the opponent, one at a time."""
ARMS: Mapping[str, tuple[str, ...]] = {"opponent": (), **{part: (part,) for part in PARTS}, "composition": PARTS}
"""What each arm adds to the opponent; the whitepaper's composition is an arm too."""
WHITEPAPER = "whitepaper"


@cache
def corpus_digest() -> str:
    """Return the SHA-256 of all rows' digests, in hex."""
    data = load_fashion_mnist()
    return hashlib.sha256(b"".join(part.row_digests.numpy().tobytes() for part in (data.train, data.test))).hexdigest()


def recipe(arm: str, settings: Settings, budget: float, seed: int, *, rows: Rows) -> Recipe:
    """Return an arm's recipe with settings of the search, at a share of the full budget.

    Raises:
        PlanError: an unknown arm.
    """
    if arm == WHITEPAPER:
        return whitepaper(settings, budget, seed, rows=rows)
    if arm not in ARMS:
        msg = f"The image task has no arm {arm!r}. It has {', '.join((*ARMS, WHITEPAPER))}."
        raise PlanError(msg)
    return recipe_of_parts(ARMS[arm], settings, budget, seed, rows=rows, name=arm)


def recipe_of_parts(
    parts: tuple[str, ...], settings: Settings, budget: float, seed: int, *, rows: Rows, name: str
) -> Recipe:
    """Return the opponent with some of the composition's parts: for a screening, each by itself."""
    batch = int(settings["batch_size"])
    # A stem that halves the resolution of everything after it, and wider stages there.
    stem = {"stem_kernel": 4, "stem_stride": 2} if "stem" in parts else {}
    widths = (32, 48, 64) if "widths" in parts else (16, 32, 64)
    config = ResNetConfig(widths=widths, zero_init_residual=bool(settings["zero_init"]), **stem)
    made = fashion_resnet(
        num_steps=max(1, round(FULL_ROWS * budget / batch)),
        seed=seed,
        rows_per_step=batch,
        model=config,
        optimizers=_muon(settings) if "muon" in parts else (_sgd(settings, float(settings["lr"])),),
        methods=_shared_methods(settings),
        evaluation=FashionEvaluation(rows=rows),
    )
    if "whitening" in parts:
        made = replace(made, model=BuildWhitenedResNet(config=config))
    return _on_one_thread(made, name)


def whitepaper(settings: Settings, budget: float, seed: int, *, rows: Rows = "reported") -> Recipe:
    """Return the opponent with the methodology whitepaper's composition on it, at its own settings."""
    made = recipe("opponent", {**settings, "label_smoothing": 0.0}, budget, seed, rows=rows)
    added = [
        method for method in image_whitepaper().methods if not isinstance(method, m.ChannelsLast | m.ScaleSchedule)
    ]
    return replace(made, name=WHITEPAPER, methods=(*made.methods, *added))


def plain_recipe(budget: float, seed: int, *, rows: Rows = "reported") -> Recipe:
    """Return a common public recipe; only model, data, number type and budget are changed.

    Source: github.com/kuangliu/pytorch-cifar, main.py: SGD of rate 0.1 with momentum 0.9 and weight
    decay 5e-4 on everything, 128 rows a step, a cosine over the run, crops of images padded by 4 pixels, flips.
    """
    made = fashion_resnet(
        num_steps=max(1, round(FULL_ROWS * budget / 128)),
        seed=seed,
        rows_per_step=128,
        optimizers=(SGD(lr=0.1, momentum=0.9, weight_decay=5e-4, schedule=Cosine()),),
        methods=(m.CropAndFlip(padding=4, p=0.5),),
        evaluation=FashionEvaluation(rows=rows),
    )
    return _on_one_thread(made, "plain")


def _on_one_thread(made: Recipe, name: str) -> Recipe:
    return replace(made, name=name, config=replace(made.config, num_threads=1))


def _shared_methods(settings: Settings) -> tuple[Method, ...]:
    smoothing, clipping = float(settings["label_smoothing"]), str(settings["clipping"])
    found: list[Method] = [m.LabelSmoothing(smoothing=smoothing)] if smoothing else []
    if clipping != OFF:
        found.append(m.GradientClipping(clipping_type="norm", clipping_threshold=float(clipping)))
    return tuple(found)


def _schedule(settings: Settings) -> WSD:
    warmup = float(settings["warmup"])
    return WSD(warmup=f"{warmup}dur", decay=f"{min(float(settings['decay']), 1 - warmup)}dur")


def _sgd(settings: Settings, lr: float) -> SGD:
    return SGD(
        lr=lr,
        momentum=float(settings["momentum"]),
        nesterov=float(settings["momentum"]) > 0,
        weight_decay=float(settings["weight_decay"]),
        decay_vectors=False,
        schedule=_schedule(settings),
    )


def _muon(settings: Settings) -> tuple[Optimizer, ...]:
    hidden = Muon(
        lr=float(settings["lr"]),
        momentum=float(settings["momentum"]),
        weight_decay=float(settings["weight_decay"]),
        num_iterations=int(settings["num_iterations"]),
        schedule=_schedule(settings),
    )
    return hidden, replace(_sgd(settings, float(settings["rest_lr"])), momentum=0.9, nesterov=True, weight_decay=0.0)
