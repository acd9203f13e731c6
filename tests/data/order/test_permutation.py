"""The permutation against its definition in plain integers, and against chance."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.rng import position_key
from cosmati.data.order.permutation import distinct, permute
from cosmati.errors import DataError

sizes = st.integers(1, 700)
keys = st.integers(0, 2**63 - 1)


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_distinct_values_are_those_of_numpy(values: list[int]) -> None:
    for given_values in (values, values[:1] * len(values)):
        array = np.array(given_values, np.int64)
        assert np.array_equal(distinct(array), np.unique(array))


@given(keys, sizes)
def test_a_permutation_reaches_each_index_once(key: int, size: int) -> None:
    indices = np.arange(size)
    images = permute(key, indices, size)
    assert np.array_equal(np.sort(images), indices)


def image_of(key: int, index: int, size: int) -> int:
    """The network as the papers draw it, one index at a time, in Python's integers."""
    mask = 2**64 - 1
    high = math.isqrt(size - 1) + 1
    sides = (high, -(-size // high))
    while True:
        left, right = divmod(index, sides[1])
        for number in range(6):
            mixed = (right + position_key(key, "feistel", number)) & mask
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
            left, right = right, (left + (mixed ^ (mixed >> 31)) % sides[number % 2]) % sides[number % 2]
        index = left * sides[1] + right
        if index < size:
            return index


@given(keys, st.integers(2, 2**60), st.lists(st.integers(0, 2**60), min_size=1, max_size=5))
def test_a_permutation_is_the_feistel_network_of_its_definition(key: int, size: int, indices: list[int]) -> None:
    indices = [index % size for index in indices]
    assert permute(key, np.asarray(indices), size).tolist() == [image_of(key, index, size) for index in indices]


def test_a_permutation_of_a_size_beyond_any_table() -> None:
    size = 3 * 10**12 + 7
    indices = np.arange(size - 1000, size)
    images = permute(1, indices, size)
    assert len(np.unique(images)) == 1000
    assert int(images.min()) >= 0
    assert int(images.max()) < size


@pytest.mark.parametrize("size", [12, 100, 1000])
def test_images_are_uniform_over_keys(size: int) -> None:
    # Chi-square of the image of one index over many keys, in 12 cells: 11 degrees of freedom, 99.99 % below 39.
    for index in (0, size // 2, size - 1):
        images = [int(permute(key * 7919, np.asarray([index]), size)[0]) for key in range(1200)]
        seen = np.bincount([image * 12 // size for image in images], minlength=12)
        expected = np.bincount([image * 12 // size for image in range(size)], minlength=12) * 1200 / size
        assert float(((seen - expected) ** 2 / expected).sum()) < 39


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_permutation_of_a_few_is_as_likely(size: int) -> None:
    keys = [position_key(3, "few", number) for number in range(100 * math.factorial(size))]
    seen = Counter(tuple(permute(key, np.arange(size), size).tolist()) for key in keys)
    assert len(seen) == math.factorial(size)
    # At most 23 degrees of freedom: 99.99 % below 58.
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 58


@pytest.mark.parametrize("size", [1000, 4096, 4097, 7000])
def test_where_an_index_stands_says_nothing_about_its_image(size: int) -> None:
    for number in range(4):
        images = permute(position_key(1, "cells", number), np.arange(size), size)
        cells = np.zeros((16, 16))
        np.add.at(cells, (np.arange(size) * 16 // size, images * 16 // size), 1)
        expected = cells.sum(1, keepdims=True) * cells.sum(0, keepdims=True) / size
        # 225 degrees of freedom: 99.99 % below 311.
        assert float(((cells - expected) ** 2 / expected).sum()) < 311


@pytest.mark.parametrize("what", ["key", "index"])
def test_one_bit_changes_every_bit_of_an_image_half_the_time(what: str) -> None:
    indices = np.arange(1 << 12)
    images = permute(77, indices, 1 << 12)
    for bit in range(12):
        key, others = (77 ^ (1 << bit), indices) if what == "key" else (77, indices ^ (1 << bit))
        changed = images ^ permute(key, others, 1 << 12)
        # Each is a mean over 4,096 (2,048 pairs for an index): six standard deviations are 0.066.
        assert max(abs(float((changed >> out & 1).mean()) - 0.5) for out in range(12)) < 0.066


@pytest.mark.parametrize("index", [-1, 10, 16, 2**40])
def test_an_index_outside_has_no_image(index: int) -> None:
    with pytest.raises(DataError, match="below 10"):
        permute(1, np.asarray([0, index]), 10)


def test_neighbours_are_torn_apart() -> None:
    images = permute(5, np.arange(10_000), 10_000)
    # For a random permutation the mean distance of neighbours is a third of the size.
    assert abs(np.abs(np.diff(images)).mean() / 10_000 - 1 / 3) < 0.01
    assert abs(np.corrcoef(images, np.arange(10_000))[0, 1]) < 0.04


@pytest.mark.parametrize(
    ("size", "digest"),
    [
        (7, "91d0175423ee29e60c49fad527daf7e5d6534c846ee08b1c16e4e9e0d275d6dd"),
        (1000, "4a39ba6ed65733a124662d609764e7c0e611494f16c3e3560eb21b81015ec24d"),
        (131_073, "1bcc3207ef56a6672e840b5805ce2f06fb5c9fecc8dd39e1e422ef56ac87bd81"),
        (3 * 10**12 + 7, "e4c4a59d94a5146fe9f7c90a47f866873b1eaf170e585c1c679b63aea7bd1069"),
    ],
)
def test_a_permutation_never_changes(size: int, digest: str) -> None:
    images = permute(2**62 + 11, np.arange(min(size, 1000)), size)
    assert hashlib.sha256(images.astype("<i8").tobytes()).hexdigest() == digest
