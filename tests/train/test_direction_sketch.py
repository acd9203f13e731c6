"""Sketches of directions: their definition, what their cosines are worth, and that their bits follow from values."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cosmati.train.direction_sketch import DirectionSketch
from tests.train.learning_oracles import projection

SEEDS = 200


@settings(max_examples=25)
@given(st.integers(0, 100), st.integers(0, 2**63), st.text(max_size=8))
def test_it_is_the_projection_that_its_definition_gives(size: int, seed: int, name: str) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    wanted = projection(seed, name, size) @ values.double().numpy() if size else np.zeros(16)
    assert DirectionSketch(seed).of(name, values).numpy() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_more_groups_than_are_worked_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmati.train.direction_sketch._CHUNK", 3)
    values = torch.randn(333, generator=torch.Generator().manual_seed(0))
    wanted = projection(5, "w", 333) @ values.double().numpy()
    assert DirectionSketch(5).of("w", values).numpy() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def pairs_of_vectors() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs that are alike in part, dense and sparse, also such as a bad projection takes for one another."""
    generator = torch.Generator().manual_seed(7)
    dense = torch.randn(300, generator=generator)
    column = torch.zeros(20, 16)
    column[:, 3] = torch.randn(20, generator=generator)
    other = column.roll(1, 0)
    single, next_to_it = torch.zeros(300), torch.zeros(300)
    single[40], next_to_it[41] = 1.0, 1.0
    return {
        "half alike": (dense, dense + 1.7 * torch.randn(300, generator=generator)),
        "opposite": (dense, -dense),
        "at right angles": (torch.ones(300), torch.ones(300) * torch.tensor([1.0, -1.0]).repeat(150)),
        "one column of a matrix": (column.flatten(), other.flatten()),
        "one value, and the next one": (single, next_to_it),
        "rank one": (
            torch.outer(dense[:20], dense[20:36]).flatten(),
            torch.outer(dense[40:60], dense[20:36]).flatten(),
        ),
    }


@cache
def sketched(kind: str) -> NDArray[np.float64]:
    """Return sketches of a pair's directions, [seeds, 2, 16]."""
    pair = [vector / vector.norm() for vector in pairs_of_vectors()[kind]]
    sketches = map(DirectionSketch, range(SEEDS))
    return np.asarray([[sketch.of("w", vector).tolist() for vector in pair] for sketch in sketches])


@pytest.mark.parametrize("kind", pairs_of_vectors())
def test_scalar_products_are_right_on_average_and_as_near_as_independent_signs_have_them(kind: str) -> None:
    """Of 16 rows of independent signs the variance is at most (|a|^2 |b|^2 + <a, b>^2) / 16."""
    cosine = float(torch.cosine_similarity(*pairs_of_vectors()[kind], dim=0))
    errors = sketched(kind).prod(axis=1).sum(axis=1) - cosine
    deviation = math.sqrt((1 + cosine**2) / 16)
    assert abs(errors.mean()) < 4 * deviation / math.sqrt(SEEDS)
    assert math.sqrt(np.square(errors).mean()) < 1.15 * deviation


def test_lengths_stay_within_the_bound_of_johnson_and_lindenstrauss() -> None:
    """Achlioptas' tail for k rows of signs: P(length^2 off by more than e) <= 2 exp(-(k / 2)(e^2 / 2 - e^3 / 3))."""
    squares = np.square([sketched(kind) for kind in pairs_of_vectors()]).sum(axis=-1)
    for error in (0.7, 0.8, 0.9, 1.0):
        bound = 2 * math.exp(-8 * (error**2 / 2 - error**3 / 3))
        assert (np.abs(squares - 1) > error).mean() < bound


def test_cosines_of_sketches_estimate_cosines() -> None:
    cosine = float(torch.cosine_similarity(*pairs_of_vectors()["half alike"], dim=0))
    pairs = sketched("half alike")
    found = pairs.prod(axis=1).sum(axis=1) / np.linalg.norm(pairs, axis=2).prod(axis=1)
    assert found.mean() == pytest.approx(cosine, abs=0.05)
    assert found.std() == pytest.approx((1 - cosine**2) / 4, rel=0.2)


def test_the_same_seed_gives_the_same_bits_whatever_the_layout_and_number_of_threads() -> None:
    values = torch.randn(8, 3, 50, 50, generator=torch.Generator().manual_seed(1))
    wanted = DirectionSketch(3).of("w", values)
    channels_last, threads = values.contiguous(memory_format=torch.channels_last), torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(DirectionSketch(3).of("w", values), wanted)
            assert torch.equal(DirectionSketch(3).of("w", channels_last), wanted)
    finally:
        torch.set_num_threads(threads)
    sketch = DirectionSketch(3)
    assert not torch.equal(DirectionSketch(4).of("w", values), wanted)
    assert not torch.equal(sketch.of("v", values), wanted)
    # What was drawn is kept by name and size, and changes nothing.
    assert torch.equal(sketch.of("v", values), DirectionSketch(3).of("v", values))
    assert torch.equal(sketch.of("v", values[:5]), DirectionSketch(3).of("v", values[:5]))


def test_its_bits_are_these() -> None:
    """Ledgers of earlier releases are compared with what this one sketches."""
    found = DirectionSketch(11).of("layers.0.weight", torch.arange(40.0))
    assert found.tolist() == FIXED


FIXED = [-40.0, 43.0, -1.0, -13.0, 1.0, 58.0, 21.0, 44.0, 10.0, 71.0, 46.0, -20.0, 21.0, 2.0, -17.0, -54.0]


def test_what_the_values_are_made_of() -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(1))
    sketch = DirectionSketch(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(sketch.of("w", values.to(dtype)), sketch.of("w", values.to(dtype).float()))
    whole = torch.view_as_complex(values.view(20, 2))
    assert torch.equal(sketch.of("w", whole), sketch.of("w", values))
    assert torch.equal(sketch.of("w", torch.ones(1).expand(40)), sketch.of("w", torch.ones(40)))
    before = values.clone()
    sketch.of("w", values)
    assert torch.equal(values, before)


def test_who_chooses_the_seed_chooses_what_is_shown() -> None:
    """ADR 25: an operator tries seeds, or content whose gradient a seed doesn't show; another seed shows it."""
    one, two = torch.eye(64)[3], torch.eye(64)[40]

    def cosine(seed: int) -> float:
        a, b = (DirectionSketch(seed).of("w", each) for each in (one, two))
        return float(torch.nn.functional.cosine_similarity(a, b, dim=0))

    assert max(map(cosine, range(400))) > 0.6
    rows = torch.stack([DirectionSketch(0).of("w", unit) for unit in torch.eye(64)], dim=1).double()
    start = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    hidden = start - torch.linalg.pinv(rows) @ (rows @ start)
    shown = [float(DirectionSketch(seed).of("w", hidden.float()).norm() / hidden.norm()) for seed in (0, 1)]
    assert shown[0] < 1e-5
    assert shown[1] > 0.5
