"""Groups interleaved in exact proportion, with random access.

A balanced tree of two-way splits. At a split of weights a and b, the first m positions hold round(m a / (a + b)) of the
left side: over a period exactly a, and never off by more than a half. Over the whole tree no prefix is off by more than
the tree is deep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmati.errors import DataError

Ints = NDArray[np.int64]


class Interleave:
    """Positions dealt to groups.

    Args:
        weights: positions of each group in a period; integers, at least one of them positive.

    Raises:
        DataError: a weight is negative, or none is positive.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        if min(weights, default=0) < 0 or not sum(weights):
            raise DataError(f"Groups have the weights {list(weights)}. Give 0 or more, not all 0.")
        divisor = math.gcd(*weights)
        self.weights = tuple(weight // divisor for weight in weights)
        self.period = sum(self.weights)
        self._sums = [0]
        for weight in self.weights:
            self._sums.append(self._sums[-1] + weight)
        # A product of two numbers below the period must fit 63 bits; beyond that Python's integers take over.
        self._dtype = np.int64 if self.period < 3_000_000_000 else object

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the group of each position, and how many positions before it the group has had.

        Args:
            positions: int64 [n], not negative.

        Returns:
            int64 [n] and int64 [n].
        """
        exact = positions.astype(self._dtype)
        passes, rest = exact // self.period, exact % self.period
        groups, counts = np.empty_like(positions), np.empty_like(positions)
        self._descend(0, len(self.weights), rest, np.arange(len(positions)), groups, counts)
        counts += (passes * np.asarray(self.weights, self._dtype)[groups]).astype(np.int64)
        return groups, counts

    def _descend(self, low: int, high: int, positions: NDArray[Any], places: Ints, groups: Ints, counts: Ints) -> None:
        if not len(places):
            return
        if high - low == 1:
            groups[places], counts[places] = low, positions.astype(np.int64)
            return
        middle = (low + high) // 2
        left = self._sums[middle] - self._sums[low]
        both = self._sums[high] - self._sums[low]
        if left in (0, both):
            side = (low, middle) if left else (middle, high)
            self._descend(*side, positions, places, groups, counts)
            return
        before = (positions * left + both // 2) // both
        after = ((positions + 1) * left + both // 2) // both
        goes_left = (after > before).astype(bool)
        self._descend(low, middle, before[goes_left], places[goes_left], groups, counts)
        goes_right = ~goes_left
        self._descend(middle, high, (positions - before)[goes_right], places[goes_right], groups, counts)

    def counts(self, num_positions: int) -> list[int]:
        """Return how many of the first positions each group has."""
        passes, rest = divmod(num_positions, self.period)
        found = [0] * len(self.weights)
        self._count(0, len(self.weights), rest, found)
        return [count + passes * weight for count, weight in zip(found, self.weights, strict=True)]

    def _count(self, low: int, high: int, num_positions: int, found: list[int]) -> None:
        if high - low == 1:
            found[low] = num_positions
            return
        middle = (low + high) // 2
        left = self._sums[middle] - self._sums[low]
        both = self._sums[high] - self._sums[low]
        if both:
            on_the_left = (num_positions * left + both // 2) // both
            self._count(low, middle, on_the_left, found)
            self._count(middle, high, num_positions - on_the_left, found)


@dataclass(frozen=True)
class Stretch:
    """A span of positions with weights of its own: a curriculum is a sequence of them.

    Args:
        stop: position at which it ends; None for the last.
        weights: of each group, integers.
    """

    stop: int | None
    weights: tuple[int, ...]


class PhasedInterleave:
    """An `Interleave` a phase; each group goes on where the phase before left it.

    Args:
        phases: in order, the last without an end.
    """

    def __init__(self, phases: Sequence[Stretch]) -> None:
        self._phases = [Interleave(phase.weights) for phase in phases]
        self._starts = [0, *(phase.stop for phase in phases[:-1] if phase.stop is not None)]
        self._before = [[0] * len(phases[0].weights)]
        for interleave, start, stop in zip(self._phases, self._starts, self._starts[1:], strict=False):
            had = interleave.counts(stop - start)
            self._before.append([a + b for a, b in zip(self._before[-1], had, strict=True)])

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return group and count of each position (see `Interleave.locate`)."""
        if len(self._phases) == 1:
            return self._phases[0].locate(positions)
        phase_of = np.searchsorted(np.asarray(self._starts), positions, side="right") - 1
        groups, counts = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(phase_of):
            mine = np.flatnonzero(phase_of == number)
            group, count = self._phases[number].locate(positions[mine] - self._starts[number])
            groups[mine], counts[mine] = group, count + np.asarray(self._before[number], np.int64)[group]
        return groups, counts
