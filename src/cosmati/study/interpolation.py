"""Monotone cubic curves through knots (Fritsch and Butland 1984, doi:10.1137/0905021), many at a time.

Between two knots such a curve rises or falls as they do, so it's nowhere better than its best knot. Its slope at an
inner knot is a harmonic mean of the chords' to both sides, at an end that of the parabola through the three nearest
knots, as far as that keeps the direction. Through two knots it's the straight line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cosmati.study.statistics import Array

MIN_WIDTH = 1e-12
"""Of an interval: two knots at one place are a jump."""
MAX_ITERATIONS = 60
TOLERANCE = 1e-12
"""Of a place in an interval, as a share of it."""


@dataclass(frozen=True)
class MonotoneCubic:
    """Curves through knots, one a row; `x` and `y` have the shape (rows, knots), and `x` never falls along a row."""

    x: Array
    y: Array

    @cached_property
    def _width(self) -> Array:
        return np.maximum(np.diff(self._knots[0], axis=1), MIN_WIDTH)

    @cached_property
    def _knots(self) -> tuple[Array, Array]:
        """Give a row of one knot a second one at the same place, so that it has an interval too."""
        times = 2 if self.x.shape[1] == 1 else 1
        return np.repeat(self.x, times, axis=1), np.repeat(self.y, times, axis=1)

    @cached_property
    def _coefficients(self) -> tuple[Array, Array, Array, Array]:
        """Of 1, u, u^2 and u^3 in each interval, where u goes from 0 to 1; shapes (rows, intervals)."""
        rise = np.diff(self._knots[1], axis=1)
        slope = knot_slopes(self._width, rise / self._width)
        start, end = self._width * slope[:, :-1], self._width * slope[:, 1:]
        return self._knots[1][:, :-1], start, 3 * rise - 2 * start - end, start + end - 2 * rise

    def at(self, x: Array) -> Array:
        """Return each row's values at its `x` (rows, points); outside the knots the value at the nearest one."""
        knots = self._knots[0]
        interval = (x[:, :, None] >= knots[:, None, 1:-1]).sum(axis=2)
        begin, width = (np.take_along_axis(of, interval, axis=1) for of in (knots, self._width))
        share = np.clip((x - begin) / width, 0.0, 1.0)
        a, b, c, d = (np.take_along_axis(of, interval, axis=1) for of in self._coefficients)
        return np.asarray(a + share * (b + share * (c + share * d)), dtype=np.float64)

    def first_reaching(self, target: Array) -> Array:
        """Return where each row is first as high as its `target` (rows), infinity where it never is."""
        reached = self.y >= target[:, None]
        index = reached.argmax(axis=1)
        found = np.where(reached.any(axis=1), self.x[:, 0], np.inf)
        rows = np.flatnonzero(index > 0)
        place = rows, index[rows] - 1
        a, b, c, d = (of[place] for of in self._coefficients)
        share = _root_share((a - target[rows], b, c, d))
        # A knot's own height is reached there: where the curve ends flat, it's that high to rounding before.
        share = np.where(self.y[rows, index[rows]] == target[rows], 1.0, share)
        found[rows] = self._knots[0][place] + self._width[place] * share
        return found


def knot_slopes(width: Array, slope: Array) -> Array:
    """Return the slopes at knots, shape (rows, knots), from the intervals' widths and the slopes of their chords."""
    if width.shape[1] == 1:
        return np.repeat(slope, 2, axis=1)
    before, after = slope[:, :-1], slope[:, 1:]
    weight_before, weight_after = width[:, :-1] + 2 * width[:, 1:], 2 * width[:, :-1] + width[:, 1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (weight_before + weight_after) / (weight_before / before + weight_after / after)
    inner = np.where(before * after > 0, mean, 0.0)
    first = _end_slope(width[:, 0], width[:, 1], slope[:, 0], slope[:, 1])
    last = _end_slope(width[:, -1], width[:, -2], slope[:, -1], slope[:, -2])
    return np.concatenate([first[:, None], inner, last[:, None]], axis=1)


def _end_slope(width: Array, next_width: Array, slope: Array, next_slope: Array) -> Array:
    """Return the parabola's slope at an end, of the direction of the end's chord and at most 3 times as steep."""
    parabola = ((2 * width + next_width) * slope - width * next_slope) / (width + next_width)
    return np.sign(slope) * np.clip(np.sign(slope) * parabola, 0.0, 3 * np.abs(slope))


def _root_share(cubic: tuple[Array, Array, Array, Array]) -> Array:
    """Return where cubics that rise over [0, 1], from below 0, are 0: Newton's steps, halving where they fail."""
    a, b, c, d = cubic
    low, high = np.zeros_like(a), np.ones_like(a)
    share = np.clip(-a / (b + c + d), 0.0, 1.0)
    for _ in range(MAX_ITERATIONS):
        value = a + share * (b + share * (c + share * d))
        low, high = np.where(value < 0, share, low), np.where(value < 0, high, share)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = share - value / (b + share * (2 * c + 3 * share * d))
        last, share = share, np.where((step >= low) & (step <= high), step, (low + high) / 2)
        if np.abs(share - last).max(initial=0.0) < TOLERANCE:
            break
    return share
