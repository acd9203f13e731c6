"""What a method is told of a governed microbatch on its way through the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True)
class Passing:
    """A microbatch of a governed run, between forward and backward pass.

    Attributes:
        model: in training.
        class_names: of the policy's taxonomy.
        class_ids: indices into these, int64: of all rows [], of packs [rows, tokens] with -1 for padding.
        weights: what each region may learn from it, by the region's name, float64 of that shape; 0 is denied.
        parameters: names of each region's trainable parameters, by the region's name.
        is_compiled: blocks are compiled, so that hooks on modules in them may not run.
        replaced: reads parameters as other values, by name, for as long as its context lasts; then they're put back.
        looks: called with the objective, a scalar, before it's differentiated; a method adds its own.
    """

    model: nn.Module
    class_names: tuple[str, ...]
    class_ids: Tensor
    weights: Mapping[str, Tensor]
    parameters: Mapping[str, tuple[str, ...]]
    is_compiled: bool
    replaced: Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
    looks: list[Callable[[Tensor], None]] = field(default_factory=list)

    def named(self, regions: frozenset[str]) -> dict[str, Tensor]:
        """Return the parameters of some regions by name."""
        names = {name for region in regions for name in self.parameters[region]}
        return {name: p for name, p in self.model.named_parameters() if name in names}
