"""From a position in the whole to a row of one source: proportions, repeats and curricula, all exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from cosmati.data.order.interleave import Ints, PhasedInterleave, Stretch
from cosmati.errors import DataError


@dataclass(frozen=True)
class Group:
    """One source in a mixture.

    Args:
        rows: of the source.
        class_id: class of its rows.
        repeat: how often an epoch visits each row: 5/2 is two whole passes and half of a third, the next epoch's half
            being the other one.
        band: quality band of its rows, where a policy tells bands apart.
    """

    rows: int
    class_id: int = 0
    repeat: Fraction = Fraction(1)
    band: int = 0


class Mixture:
    """Sources dealt out in proportion to their visits, each going through its rows epoch by epoch without a gap.

    Args:
        groups: the sources; those without rows never come.
        phases: weights of the groups by span of positions; None is one phase, in proportion to rows times repeat.

    Raises:
        DataError: no rows at all, a negative repeat, or a phase that gives weight to nothing that has rows.
    """

    def __init__(self, groups: Sequence[Group], phases: Sequence[Stretch] | None = None) -> None:
        if any(group.repeat < 0 or group.rows < 0 for group in groups):
            raise DataError("A source can't be visited a negative number of times. Give a repeat of 0 or more.")
        visits = [group.rows * group.repeat for group in groups]
        if not sum(visits):
            raise DataError("There is nothing to visit: the sources have no rows, or all repeats are 0.")
        by_size = Stretch(None, whole_weights(visits))
        self.groups = tuple(groups)
        self.visits = sum(visits, Fraction(0))
        """Visits in an epoch of the whole, exactly."""
        self.num_rows = math.floor(self.visits)
        """Those of the first epoch: where repeats make fractions, some epochs have one more."""
        self._rows = np.asarray([max(1, group.rows) for group in groups], np.int64)
        self._interleave = PhasedInterleave(_checked(phases, groups) if phases else [by_size])

    def start(self, epoch: int) -> int:
        """Return the position at which an epoch of the whole starts; none is lost between two of them."""
        return math.floor(epoch * self.visits)

    def locate(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return source, epoch of that source and index within that epoch, of each position.

        Args:
            positions: int64 [n], not negative, without an end.

        Returns:
            int64 [n], three times.
        """
        sources, counts = self._interleave.locate(positions)
        epochs, indices = np.divmod(counts, self._rows[sources])
        return sources, epochs, indices


def whole_weights(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return integers in the exact proportion of some shares."""
    common = math.lcm(*(share.denominator for share in shares))
    return tuple(int(share * common) for share in shares)


def _checked(phases: Sequence[Stretch], groups: Sequence[Group]) -> Sequence[Stretch]:
    stops = [phase.stop for phase in phases]
    inner = [stop for stop in stops[:-1] if stop is not None]
    if stops[-1] is not None or len(inner) != len(phases) - 1 or [0, *inner] != sorted({0, *inner}):
        raise DataError(f"Phases end at {stops}. Give rising positions, and None for the last phase.")
    for phase in phases:
        if len(phase.weights) != len(groups):
            raise DataError(
                f"A phase has {len(phase.weights)} weights, and there are {len(groups)} sources. Give one each."
            )
        told = [w for w, group in zip(phase.weights, groups, strict=True) if group.rows]
        lost = [w for w, group in zip(phase.weights, groups, strict=True) if w and not group.rows]
        if min(phase.weights) < 0 or not sum(told) or lost:
            msg = f"A phase has the weights {phase.weights}. Give 0 or more, not all 0, and 0 to sources without rows."
            raise DataError(msg)
    return phases
