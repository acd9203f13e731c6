"""SAM: the gradient at the worst point nearby (Foret et al., 2020, arXiv 2010.01412)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cosmati.core.method import Coupling, Method, Position, Stage
from cosmati.core.pieces import Pieces
from cosmati.errors import PlanError

__all__ = ["SAM"]


@dataclass(frozen=True, kw_only=True)
class SAM(Method):
    """Take the step's gradient at w + rho g / (|g| + epsilon), where g is the gradient at w.

    A step with a second pass costs two. The norm is over all parameters that learn in the step, so regions
    are coupled.

    Args:
        rho: radius of the neighbourhood, >= 0; 0 is off.
        epsilon: added to the norm, > 0.
        interval: every so many steps, counted from the run's start, have a second pass: the last of each
            interval.
    """

    stage: ClassVar[Stage] = Stage.AGAIN

    rho: float = 0.05
    epsilon: float = 1e-12
    interval: int = 1

    def __post_init__(self) -> None:
        """Check the options."""
        if not (0 <= self.rho < math.inf and self.epsilon > 0 and self.interval >= 1):
            msg = (
                f"SAM can't use rho={self.rho}, epsilon={self.epsilon}, interval={self.interval}. Use rho "
                ">= 0 (0 is off), epsilon > 0 and an interval of 1 or more steps."
            )
            raise PlanError(msg)

    @property
    def couples(self) -> frozenset[Coupling]:
        """Regions: the norm is over all of them."""
        return frozenset({"regions"} if self.rho else ())

    def perturbation(self, weights: Pieces, gradients: Pieces, at: Position) -> Pieces | None:
        """Return the step to the worst point nearby, by name; None in steps without a second pass."""
        if self.rho == 0 or (at.clock.step + 1) % self.interval or not gradients:
            return None
        return gradients.scaled(self.rho / (gradients.norm() + self.epsilon))
