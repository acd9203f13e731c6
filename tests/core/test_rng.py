"""Keyed draws: functions of position and row alone, uniform, and golden."""

# ruff: noqa: NPY002  (what users' augmentations draw from)

import hashlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmati.core.rng import (
    DefaultGenerators,
    hash_rows,
    keyed_permutation,
    position_generator,
    position_key,
    row_uniform,
    seed_by_chance,
    stream_key,
)

seeds = st.integers(-(2**63), 2**64 - 1)


def splitmix(value: int) -> int:
    """Return SplitMix64's output function, in Python's own integers."""
    mask = 2**64 - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def test_golden_keys_never_change() -> None:
    assert position_key(0, "forward", 0, 0) == 5828703056198295605
    assert position_key(3, "order", 7) == 8897157247491557453
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


@given(seeds, st.lists(st.integers(0, 10**9), min_size=1, max_size=3))
def test_position_key_is_the_mixing_chain(seed: int, position: list[int]) -> None:
    key = stream_key(seed, "forward")
    for coordinate in position:
        key = splitmix((key + 0x9E3779B97F4A7C15 + coordinate) % 2**64)
    assert position_key(seed, "forward", *position) == key >> 1 < 2**63


@pytest.mark.long
@given(seeds, st.permutations(range(12)))
def test_permuted_rows_have_permuted_draws(seed: int, order: list[int]) -> None:
    ids = torch.arange(12) * 1000 + 7
    draws = row_uniform(seed, "crop", 2, ids, num=3)
    assert torch.equal(row_uniform(seed, "crop", 2, ids[torch.tensor(order)], num=3), draws[torch.tensor(order)])
    assert bool(((draws >= 0) & (draws < 1)).all())


def test_draws_differ_by_epoch_stream_seed_and_repeat() -> None:
    ids = torch.arange(50)
    base = row_uniform(0, "a", 0, ids)
    others = [row_uniform(1, "a", 0, ids), row_uniform(0, "b", 0, ids), row_uniform(0, "a", 1, ids)]
    others.append(row_uniform(0, "a", 0, ids, repeat=1))
    assert all(not torch.equal(base, other) for other in others)


def test_draws_are_uniform_and_uncorrelated() -> None:
    draws = row_uniform(5, "u", 0, torch.arange(100_000), num=2).numpy()
    counts = np.histogram(draws[:, 0], bins=20, range=(0, 1))[0]
    assert abs(counts - 5000).max() < 5 * np.sqrt(5000)
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.02


@given(seeds, st.integers(0, 200))
def test_permutation_visits_every_row_once(seed: int, num_rows: int) -> None:
    order = keyed_permutation(position_key(seed, "order", 0), np.arange(num_rows) * 3)
    assert sorted(order.tolist()) == list(range(num_rows))


def test_generators_are_seeded_by_position_and_put_back() -> None:
    generators = DefaultGenerators(torch.device("cpu"))
    before = torch.get_rng_state()
    with generators.restored():
        generators.seed(position_key(0, "forward", 3, 1))
        first = torch.rand(4)
        generators.seed(position_key(0, "forward", 3, 1))
        assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.rand(4, generator=position_generator(0, "forward", 3, 1)), first)


@given(seeds, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_a_rows_hash_is_two_rounds_of_the_mixing_function(key: int, row: int, salt: int) -> None:
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15
    offset = splitmix((key + (salt + 1) * gamma) & mask)
    assert int(hash_rows(key & mask, np.array([row]), salt)[0]) == splitmix((row * gamma + offset) & mask)


@given(seeds, st.integers(0, 50), st.integers(0, 3), st.integers(1, 3))
def test_a_rows_draw_is_the_top_53_bits_of_its_hash(seed: int, epoch: int, repeat: int, num: int) -> None:
    ids = torch.tensor([0, 3, 10**12])
    key = position_key(seed, "crop", epoch, repeat)
    expected = [[(int(h) >> 11) / 2**53 for h in hash_rows(key, ids.numpy(), salt)] for salt in range(num)]
    assert row_uniform(seed, "crop", epoch, ids, num=num, repeat=repeat).T.tolist() == expected


def test_a_stream_is_blake2_of_its_name_keyed_by_the_seed() -> None:
    assert row_uniform(5, "crop", 0, torch.arange(3)).shape == (3, 1)
    for seed in (0, 7, -1, 2**64 - 1):
        key = (seed % 2**64).to_bytes(8, "little")
        expected = hashlib.blake2b(b"forward", digest_size=8, key=key).digest()
        assert stream_key(seed, "forward") == int.from_bytes(expected, "little")


def test_rows_are_visited_in_the_order_of_their_hashes() -> None:
    ids = np.array([7, 3, 3, 900, 11])
    hashes = [int(h) for h in hash_rows(99, ids)]
    order = keyed_permutation(99, ids)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(5), key=lambda i: (hashes[i], i))


def test_generators_are_put_back_after_an_error_too() -> None:
    before = torch.get_rng_state()

    def draw_and_fail() -> None:
        with DefaultGenerators(torch.device("cpu")).restored():
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)


def _draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_python_and_numpy_are_keyed_and_put_back_too() -> None:
    generators = DefaultGenerators(torch.device("cpu"))
    before = random.getstate(), np.random.get_state()[1].tolist()
    with generators.restored():
        generators.seed(7)
        first = _draws(), random.gauss(0, 1), float(np.random.randn())
        generators.seed(8)
        other = _draws(), random.gauss(0, 1), float(np.random.randn())
        generators.seed(7)
        assert (_draws(), random.gauss(0, 1), float(np.random.randn())) == first
        assert not set(first[0]) & set(other[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_another_generator_of_numpys_is_left_to_who_put_it_there() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        expected = np.random.RandomState(np.random.PCG64(3)).rand(2).tolist()
        generators = DefaultGenerators(torch.device("cpu"))
        with generators.restored():
            first = np.random.rand()
            generators.seed(5)
            assert [first, np.random.rand()] == expected
        assert np.random.rand() == expected[0]
    finally:
        np.random.set_bit_generator(own)


def test_seeding_by_chance_is_another_each_time() -> None:
    """A fork has its parent's generators, and so has the next one."""
    drawn = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)
        seed_by_chance()
        drawn.append((random.random(), float(np.random.random())))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]
