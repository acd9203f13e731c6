"""Randomness keyed by position or by row; the only file that touches generators.

A draw is a pure function of `(seed, stream, position)` for what belongs to a microbatch, and of
`(seed, stream, epoch, row id, repeat)` for what belongs to a row. Nothing is carried from one step to the next,
so a checkpoint holds no generator state and any rank can make any draw.

The mixing function is SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _finalize(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=4096)
def stream_key(seed: int, stream: str) -> int:
    """Return the 64-bit key of a named stream of draws under a seed."""
    digest = hashlib.blake2b(stream.encode(), digest_size=8, key=(seed & _MASK).to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def seed_by_chance() -> None:
    """Seed Python's and NumPy's generators by chance, as a process that isn't forked begins.

    PyTorch's has one seed in all new processes.
    """
    random.seed()
    np.random.seed()  # noqa: NPY002  (what users' augmentations draw from)


def position_key(seed: int, stream: str, *position: int) -> int:
    """Return the 63-bit key of one position (step, microbatch, ...) in a stream.

    63 bits, since that's what `torch.Generator.manual_seed` takes on every device.
    """
    key = stream_key(seed, stream)
    for coordinate in position:
        key = _finalize((key + _GAMMA + coordinate) & _MASK)
    return key >> 1


def position_generator(seed: int, stream: str, *position: int) -> torch.Generator:
    """Return a CPU generator at the start of the draws of one position."""
    return torch.Generator().manual_seed(position_key(seed, stream, *position))


def hash_rows(key: int, row_ids: NDArray[np.int64], salt: int = 0) -> NDArray[np.uint64]:
    """Return one 64-bit hash for each row id; equal ids have equal hashes, wherever they stand.

    Args:
        key: 64-bit key, from `stream_key` or `position_key`.
        row_ids: int64 [rows].
        salt: index of the draw within the row.
    """
    offset = np.uint64(_finalize((key + (salt + 1) * _GAMMA) & _MASK))
    with np.errstate(over="ignore"):
        value = row_ids.astype(np.uint64) * np.uint64(_GAMMA) + offset
        value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX_1)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX_2)
        return value ^ (value >> np.uint64(31))


def row_uniform(
    seed: int, stream: str, epoch: int, row_ids: torch.Tensor, *, num: int = 1, repeat: int = 0
) -> torch.Tensor:
    """Draw uniforms in [0, 1) that belong to rows.

    Args:
        seed: the run's seed.
        stream: name of the stream, one for each use.
        epoch: pass over the data; a row draws anew in each.
        row_ids: int64 [rows], on CPU.
        num: draws for each row.
        repeat: which repetition of the row within the epoch.

    Returns:
        float64 [rows, num]; a permutation of the rows permutes the draws.
    """
    key = position_key(seed, stream, epoch, repeat)
    ids = row_ids.numpy()
    columns = [(hash_rows(key, ids, salt) >> np.uint64(11)) * 2.0**-53 for salt in range(num)]
    return torch.from_numpy(np.stack(columns, axis=1))


def keyed_permutation(key: int, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order in which a key visits rows: indices into `row_ids`, int64 [rows]."""
    return np.argsort(hash_rows(key, row_ids), kind="stable").astype(np.int64)


class DefaultGenerators:
    """What code draws from that names no generator, seeded together.

    PyTorch's default generators of the CPU and of one accelerator, Python's `random`, and NumPy's `numpy.random`.
    PyTorch's are seeded directly: `torch.manual_seed` costs 109 us, this 1 us. Python's costs 3.8 us, NumPy's 1.6.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        # Who has put another bit generator in place seeds it: NumPy's seed() knows this one only.
        self._has_numpy = np.random.get_state(legacy=False)["bit_generator"] == "MT19937"  # noqa: NPY002

    def seed(self, key: int) -> None:
        """Seed all of them with one 63-bit key."""
        for generator in self._generators:
            generator.manual_seed(key)
        random.seed(key)
        if self._has_numpy:
            # 32 bits: an array of two words would take 9 us.
            np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002  (what users' augmentations draw from)

    @contextmanager
    def restored(self, more: Sequence[torch.Generator] = ()) -> Iterator[None]:
        """Leave the generators, and some more, as they were found."""
        generators = [*self._generators, *more]
        states = [generator.get_state() for generator in generators]
        python, numpy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
