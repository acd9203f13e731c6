"""What the index holds of a run: enough to list, filter, sort and draw it without opening its folder."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

StoredKind = Literal["run", "study"]
"""A run folder, or one run of a study."""
Fact = str | float | bool | None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run.

    Attributes:
        key: Its address, the same each time that the store is read.
        path: Folder of the run or of its study, relative to the store's.
        kind: A run folder, or one run of a study.
        name: What it's called in its folder.
        study: Name of its study, empty for a run by itself.
        arm: Of the study; the recipe's name for a run by itself.
        is_baseline: Whether the arm is its study's baseline.
        task: What is learnt from what, in words.
        methods: What it adds to the baseline, or what its recipe composes.
        hardware: In words.
        budget: Share of the full budget, None for a run by itself.
        seed: Of the run.
        status: `completed`, `stopped`, `diverged`, `failed`, `running` or `broken off`.
        started: ISO 8601 time, empty where it isn't known.
        ended: The same of its end.
        steps: Optimizer steps done.
        rows: Rows trained on, None where it isn't known.
        tokens: Tokens trained on.
        flops: Floating point operations.
        seconds: Training time without evaluation.
        cost: In the currency of the price that it was reckoned by.
        quality_name: Of the quality measure, empty where there's none.
        higher_is_better: Which way it points, None where nobody said.
        quality: What it reached, None where it isn't finite or wasn't measured.
        is_governed: Whether a policy was in force.
        metrics: Further final metrics by name.
        recipe: Digest of `facts`: runs with the same one have the same recipe.
        facts: The recipe, flat: `optimizer.lr` and the like.
    """

    key: str
    path: str
    kind: StoredKind
    name: str
    study: str = ""
    arm: str = ""
    is_baseline: bool = False
    task: str = ""
    methods: tuple[str, ...] = ()
    hardware: str = ""
    budget: float | None = None
    seed: int = 0
    status: str = "completed"
    started: str = ""
    ended: str = ""
    steps: int = 0
    rows: int | None = None
    tokens: int | None = None
    flops: float | None = None
    seconds: float | None = None
    cost: float | None = None
    quality_name: str = ""
    higher_is_better: bool | None = None
    quality: float | None = None
    is_governed: bool = False
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    recipe: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True)
class StoreProblem:
    """A run or a study that can't be read: where, and what is wrong with it."""

    path: str
    text: str


@dataclass(frozen=True)
class StudyProgress:
    """A study that was begun and isn't finished.

    Attributes:
        path: Of its folder, relative to the store's.
        name: Of the study.
        num_done: Finished runs.
        num_planned: Runs that it will have.
        is_running: Whether a process runs it now; a study that was stopped goes on when it's run again.
    """

    path: str
    name: str
    num_done: int
    num_planned: int
    is_running: bool


LARGEST_STEP = 2**53
"""Whole numbers below it are exact in a browser too."""


def is_step(value: object) -> TypeGuard[int]:
    """Say whether a logged value is a number of steps."""
    return type(value) is int and abs(value) < LARGEST_STEP


def finite(value: object) -> float | None:
    """Return a logged value as a number, None where it is none, isn't finite, or has more digits than a number has."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def key_of(path: str, *parts: object) -> str:
    """Return the key of a run: 16 hex digits of what names it in its store."""
    return hashlib.sha256("\0".join([path, *map(str, parts)]).encode()).hexdigest()[:16]


_DOWN = re.compile(r"loss|err|error|perplexity|ppl|bits|nats|bpb|nll|mse|mae|rmse|wer|cer|fid|ece|brier")
_UP = re.compile(r"acc|accuracy|f1|auc|auroc|precision|recall|bleu|rouge|m?iou|dice|ndcg|mrr|psnr|ssim|reward")


_TURNED = frozenset(["neg", "negative", "minus", "inverse", "gap", "drop", "delta", "diff", "difference", "scale"])
_FROM_ONE = re.compile(r"(?:^|/)\s*(?:1(?=[^a-z0-9])|[-\u2212])")
"""`1-accuracy` and `-loss`, and not `top-1`."""


def points_up(quality_name: str) -> bool | None:
    """Say by its name whether more of a measure is better, where no study says it; None where the name doesn't.

    A measure that is turned round (`neg_mean_squared_error`), or is only about another one (`accuracy_gap`), says
    nothing for certain.
    """
    name = quality_name.lower()
    words = re.split(r"[^a-z0-9]+", name)
    if _TURNED.intersection(words) or _FROM_ONE.search(name):
        return None
    is_up, is_down = (any(map(pattern.fullmatch, words)) for pattern in (_UP, _DOWN))
    return is_up if is_up != is_down else None
