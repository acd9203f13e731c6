"""What a method is told of a governed microbatch on its way through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Passing:
    """A microbatch of a governed run, between forward and backward pass.

    Attributes:
        model: in training.
        class_names: of the policy's taxonomy.
        class_ids: indices into these, int64: of all rows [], of packs [rows, tokens] with -1 for padding.
        weights: what each region may learn from it, by the region's name, float64 of that shape; 0 is denied.
        parameters: each region's trainable parameters by name, by the region's name.
        is_compiled: blocks are compiled, so that hooks on modules in them may not run.
        replaced: reads parameters as other values, by name, for as long as its context lasts; then they're put back.
        memory: kept over the run, for what follows from model and regions alone.
        zeroed: names of parameters that each token of packs reads as zeros where it may not teach them; a method adds
            its own, and the context doesn't have to end it.
        looks: called with the objective, a scalar, before it's differentiated; a method adds its own.
    """

    model: nn.Module
    class_names: tuple[str, ...]
    class_ids: Tensor
    weights: Mapping[str, Tensor]
    parameters: Mapping[str, Mapping[str, Tensor]]
    is_compiled: bool
    replaced: Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
    memory: dict[object, Any] = field(default_factory=dict)
    zeroed: set[str] = field(default_factory=set)
    looks: list[Callable[[Tensor], None]] = field(default_factory=list)

    def named(self, regions: Iterable[str]) -> dict[str, Tensor]:
        """Return the parameters of some regions by name."""
        return {name: p for region in regions for name, p in self.parameters[region].items()}
