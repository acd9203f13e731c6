"""Search the settings of arms, each as hard as the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cosmati.records.study import Setting


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One dimension of a search: a range, or ordered choices.

    Args:
        name: of the setting.
        low: lower end of the range.
        high: upper end.
        is_log: whether points are even in its logarithm.
        choices: in order, in place of a range.
        widest: the ends beyond which the range isn't widened, where there are such.
        wider: choices before and after the ordered ones, to which an optimum at an edge widens them.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = True
    choices: Sequence[Setting] = ()
    widest: tuple[float, float] = (0.0, float("inf"))
    wider: tuple[Sequence[Setting], Sequence[Setting]] = ((), ())
