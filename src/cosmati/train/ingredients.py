"""What the user gave, as given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TypeVar, cast

import torch
from torch import nn

from cosmati.core.batch import Data
from cosmati.core.loss import LossFunction
from cosmati.core.method import Method
from cosmati.core.source import Source
from cosmati.optim.optimizers import Optimizer
from cosmati.provenance.taxonomy import Taxonomy
from cosmati.routing.policy_file import PolicyFile
from cosmati.train.assembly import SubStep
from cosmati.train.config import RunConfig

T = TypeVar("T")
AnyOptimizer = Optimizer | torch.optim.Optimizer


@dataclass(frozen=True)
class Ingredients:
    """What the user gave, as given, but for a relative run folder, which is made absolute once and for all."""

    model: nn.Module
    loss: LossFunction | Sequence[SubStep]
    data: Source | Iterable[Data] | None
    optimizers: Sequence[AnyOptimizer]
    methods: Sequence[Method]
    policy: PolicyFile | None
    taxonomy: Taxonomy | None
    config: RunConfig
    evaluation: object = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.config.anchored())


def listed(given: Sequence[T] | T, kind: type[T] | UnionType) -> Sequence[T]:
    """Return what the user gave as a list or alone, as a list."""
    return (given,) if isinstance(given, kind) else cast("Sequence[T]", given)


def others_than(names: Collection[str], methods: Iterable[Method]) -> list[str]:
    """Return the names of methods that aren't this library's of some names: a user's own may be called the same."""
    kinds = [type(method) for method in methods]
    return [k.__name__ for k in kinds if k.__name__ not in names or not k.__module__.startswith("cosmati.")]
