"""Scale schedule: a longer or shorter run, with everything that is timed in proportion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cosmati.core.method import Method, Stage
from cosmati.errors import PlanError

__all__ = ["ScaleSchedule"]


@dataclass(frozen=True, kw_only=True)
class ScaleSchedule(Method):
    """Dilate the budget, the learning-rate schedule and its warm-up together.

    Everything is placed by its fraction of the run, so a dilated schedule has no jump: it is the same curve,
    stretched.

    Args:
        ratio: length of the run over its undilated length, > 0; 1 is off.
    """

    stage: ClassVar[Stage] = Stage.BUDGET

    ratio: float

    def __post_init__(self) -> None:
        """Check the ratio."""
        if not 0 < self.ratio < math.inf:
            msg = f"ratio={self.ratio} leaves no run. Give a positive number: 0.5 halves the run, 2 doubles it."
            raise PlanError(msg)

    def dilation(self) -> float:
        """Return the ratio."""
        return self.ratio
