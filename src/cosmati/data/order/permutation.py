"""A keyed bijection of 0 to size - 1 that needs no table: the order of a billion rows in constant memory.

A generalised Feistel network over the least square-like rectangle that holds the size, walked until it falls within
(Black and Rogaway, 2002). The round function is SplitMix64's finalizer; all arithmetic is on integers, so every machine
gives one order.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cosmati.core.rng import position_key
from cosmati.errors import DataError

_NUM_ROUNDS = 6
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permute(key: int, indices: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return where a key sends some indices.

    Args:
        key: any 63-bit key, from `position_key`.
        indices: int64 [n], each in [0, size).
        size: of the domain.

    Returns:
        int64 [n]; over all indices each of 0 to size - 1 once. Over keys, not all permutations of five indices
        are equally likely, as with any such network.

    Raises:
        DataError: an index is outside: it would have no image, or another one's.
    """
    check_range(indices, size)
    if size <= 1:
        return indices.copy()
    network = _Network(key, size)
    values = network.forward(indices.astype(np.uint64))
    outside = np.flatnonzero(values >= np.uint64(size))
    while len(outside):
        again = network.forward(values[outside])
        values[outside] = again
        outside = outside[again >= np.uint64(size)]
    return values.astype(np.int64)


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the values that occur, in order: as `np.unique`, and six times as fast where there's only one."""
    return values[:1] if len(values) and bool((values == values[0]).all()) else np.unique(values)


def check_range(indices: NDArray[np.int64], size: int) -> None:
    """Refuse indices outside of [0, size)."""
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        low, high = int(indices.min()), int(indices.max())
        raise DataError(
            f"Indices run from {low} to {high}, and there are {size}. Give indices of 0 or more, below {size}."
        )


class _Network:
    """The bijection of [0, a * b): a rectangle of nearly `size` cells, so that hardly any index is walked."""

    def __init__(self, key: int, size: int) -> None:
        rows = math.isqrt(max(size, 2) - 1) + 1
        self._sides = np.uint64(rows), np.uint64(-(-size // rows))
        self._keys = [np.uint64(position_key(key, "feistel", number)) for number in range(_NUM_ROUNDS)]

    def forward(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = self._sides
        left, right = values // b, values % b
        for key in self._keys:
            left, right, a, b = right, (left + _mixed(right, key) % a) % a, b, a
        return left * b + right


def _mixed(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    # Arrays of integers wrap around without a warning; silencing it for each round cost 15 % of a call.
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))
