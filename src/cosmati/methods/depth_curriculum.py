"""Depth curriculum: layers begin to learn one after another, from the output down or from the input up.

From the output down it's gradual unfreezing, for fine-tuning (Howard and Ruder, 2018, arXiv 1801.06146).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, get_args

from cosmati.core.method import Method, Position, Stage
from cosmati.errors import PlanError
from cosmati.methods.building_blocks.depth import layers_of

__all__ = ["DepthCurriculum"]

End = Literal["output", "input"]


@dataclass(frozen=True, kw_only=True)
class DepthCurriculum(Method):
    """Let layers begin to learn one after another, evenly over a span of the run.

    It's a route, as `LayerFreezing` is: a layer that isn't open yet is absent from the step, which leaves its momentum,
    decay, step counter and averages alone, and what a policy denies stays denied. With `first="output"` backward stops
    where nothing nearer the input is open; with `first="input"` it doesn't get shorter. BatchNorm's statistics follow
    the data all the time. A layer is a module that holds parameters of its own, ordered as the model registers them.

    Args:
        first: the end that opens first, "output" or "input".
        start: fraction of the run, in [0, 1], up to which one layer alone is open.
        end: fraction of the run, from start to 1, from which on all are; 0 is off.
        groups: globs over parameter names, from the input to the output, that open together in place of single
            layers: a policy's regions, say. What none of them names learns all the time.
    """

    stage: ClassVar[Stage] = Stage.ROUTE

    first: End = "output"
    start: float = 0.0
    end: float = 0.5
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the options."""
        if self.first not in get_args(End):
            msg = f"first={self.first!r} is no end of a model. Use 'output' or 'input'."
            raise PlanError(msg)
        if not 0 <= self.start <= self.end <= 1:
            msg = f"start={self.start}, end={self.end}: both are fractions of the run. Give 0 <= start <= end <= 1."
            raise PlanError(msg)
        if isinstance(self.groups, str):
            msg = f"groups={self.groups!r} is one string. Give several globs: groups=('embedding.*', 'blocks.*')."
            raise PlanError(msg)

    def frozen(self, parameters: Sequence[str], at: Position) -> frozenset[str]:
        """Return the names of the parameters whose layers aren't open yet."""
        if self.end == 0 or (elapsed := at.elapsed) >= self.end:
            return frozenset()
        layers = self._named_groups(parameters) if self.groups else _named_layers(parameters, at)
        progress = (elapsed - self.start) / (self.end - self.start) if elapsed > self.start else 0.0
        # A product that rounding left just below a whole number is that number.
        num_shut = max(0, len(layers) - 1 - int(progress * (len(layers) - 1) + 1e-9))
        shut = layers[:num_shut] if self.first == "output" else layers[len(layers) - num_shut :]
        return frozenset[str]().union(*shut)

    def _named_groups(self, parameters: Sequence[str]) -> list[frozenset[str]]:
        found = [frozenset(name for name in parameters if fnmatchcase(name, glob)) for glob in self.groups]
        for index, (glob, own) in enumerate(zip(self.groups, found, strict=True)):
            twice = own & frozenset[str]().union(*found[:index])
            if not own or twice:
                what = f"shares {', '.join(sorted(twice)[:5])} with a group before it" if own else "names no parameter"
                msg = f"DepthCurriculum: the group {glob!r} {what}. Mend it: each parameter opens once."
                raise PlanError(msg)
        return found


def _named_layers(parameters: Sequence[str], at: Position) -> list[frozenset[str]]:
    named = {id(p): name for name, p in at.model.named_parameters()}
    own = frozenset(parameters)
    found = [frozenset(named[id(p)] for p in layer) & own for layer in layers_of(at.model)]
    return [layer for layer in found if layer]
