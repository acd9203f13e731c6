"""Whole runs under a policy, with each of the two strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cosmati.core.method import Method
from cosmati.optim import AdamW
from cosmati.routing.gradient_routing import GradientRouting
from cosmati.routing.selective_masking import SelectiveGradientMasking
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.train.strategies.samples import REGIONS, Net, source, trainer

BOTH: tuple[Method, ...] = (GradientRouting(), SelectiveGradientMasking(forget="forget"))
KINDS = {
    "kept": {"stem": 1.0, "side": 1.0, "forget": 0.0, "head": 1.0},
    "gone": {"stem": 0.5, "side": 0.0, "forget": 1.0, "head": 0.0},
    "both": dict.fromkeys(REGIONS, 1.0),
}


def whole_run(method: Method, run_folder: Path | None = None, **options: Any) -> Trainer:
    """Return a run of five steps."""
    config = RunConfig(budget="5ba", num_microbatches=4, num_threads=1, run_folder=run_folder)
    optimizers = [AdamW(lr=0.01, weight_decay=0.1)]
    return trainer(Net(), KINDS, method, data=source(), config=config, optimizers=optimizers, **options)
