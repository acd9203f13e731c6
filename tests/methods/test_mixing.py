"""Shares against their distributions, pairs and probabilities against loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cosmati.errors import BatchError
from cosmati.methods.building_blocks.mixing import (
    NUM_GAMMA_DRAWS,
    known_classes,
    log_gamma_of_uniforms,
    one_hot,
    pair_rows,
    sample_dirichlet,
)

torch.set_num_threads(1)


@pytest.mark.parametrize("concentration", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("num", [2, 3])
def test_shares_are_beta_distributed(concentration: float, num: int) -> None:
    generator = torch.Generator().manual_seed(11)
    draws = torch.stack([sample_dirichlet(concentration, num, generator) for _ in range(2500)])
    torch.testing.assert_close(draws.sum(1), torch.ones(2500, dtype=torch.float64))
    for share in draws.T:
        fit = stats.kstest(share.numpy(), stats.beta(concentration, (num - 1) * concentration).cdf)
        assert fit.pvalue > 1e-3


def test_shares_at_the_ends() -> None:
    for concentration in (1e-6, 1e-3, 1e9):
        draw = sample_dirichlet(concentration, 3, torch.Generator().manual_seed(0))
        assert bool(draw.isfinite().all())
        assert float(draw.sum()) == pytest.approx(1)
    assert draw.tolist() == pytest.approx([1 / 3] * 3, abs=1e-3)
    assert sample_dirichlet(1.0, 1).tolist() == [1.0]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(0, 9))
def test_tombstones_pair_with_themselves(mask: list[bool], seed: int) -> None:
    present = torch.tensor(mask)
    whole = pair_rows(len(mask), None, torch.Generator().manual_seed(seed))
    pairs = pair_rows(len(mask), present, torch.Generator().manual_seed(seed))
    assert sorted(whole.tolist()) == list(range(len(mask)))
    for row, (partner, old) in enumerate(zip(pairs.tolist(), whole.tolist(), strict=True)):
        assert partner == (old if mask[row] and mask[old] else row)


def test_probabilities() -> None:
    target = torch.tensor([[0, -7], [2, 1]], dtype=torch.int32)
    soft = one_hot(target, 3, -7)
    assert soft.shape == (2, 3, 2)
    assert soft.dtype == torch.float32
    for row, kind, position in itertools.product(range(2), range(3), range(2)):
        assert soft[row, kind, position] == float(target[row, position] == kind)


def test_the_smallest_concentrations_choose_one_share() -> None:
    for concentration in (5e-324, 1e-300, 1e-20):
        shares = sample_dirichlet(concentration, 3, torch.Generator().manual_seed(0))
        assert sorted(shares.tolist()) == [0.0, 0.0, 1.0]


def test_bytes_of_256_classes_are_known() -> None:
    target = torch.tensor([0, 10, 255], dtype=torch.uint8)
    assert one_hot(target, 256).argmax(1).tolist() == [0, 10, 255]
    with pytest.raises(BatchError, match=r"Targets from 0 to 255 .* 255 classes"):
        one_hot(target, 255)


@pytest.mark.parametrize("concentration", [0.3, 1.0, 2.5])
def test_gamma_variates_of_given_uniforms_are_gamma_distributed(concentration: float) -> None:
    uniforms = torch.rand(4000, NUM_GAMMA_DRAWS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    draws = log_gamma_of_uniforms(concentration, uniforms).exp()
    assert draws.shape == (4000,)
    assert stats.kstest(draws.numpy(), stats.gamma(concentration).cdf).pvalue > 1e-2


def by_marsaglia_and_tsang(concentration: float, uniforms: list[float]) -> float:
    """The paper's loop in Python's own floats; Box and Muller's second normal is made into the uniform."""
    shape = concentration + 1 if concentration < 1 else concentration
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    for u, w in zip(uniforms[1::2], uniforms[2::2], strict=True):
        radius, angle = math.sqrt(-2 * math.log(1 - u)), 2 * math.pi * (1 - w)
        x = radius * math.cos(angle)
        v = (1 + c * x) ** 3
        if v > 0 and math.log(stats.norm.cdf(radius * math.sin(angle))) < 0.5 * x * x + d - d * v + d * math.log(v):
            break
    boost = (1 - uniforms[0]) ** (1 / concentration) if concentration < 1 else 1.0
    return d * v * boost


@settings(deadline=None, max_examples=60)
@given(concentration=st.sampled_from([0.2, 0.99, 1.0, 1.01, 7.0]), seed=st.integers(0, 9999))
def test_the_first_try_that_succeeds_is_taken(concentration: float, seed: int) -> None:
    uniforms = torch.rand(NUM_GAMMA_DRAWS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found = float(log_gamma_of_uniforms(concentration, uniforms).exp())
    assert found == pytest.approx(by_marsaglia_and_tsang(concentration, uniforms.tolist()), rel=1e-9)


def test_ignored_and_unknown_classes() -> None:
    assert known_classes(torch.tensor([0, 4, -1]), 5, -1).tolist() == [True, True, False]
    assert one_hot(torch.tensor([0, -100]), 2).tolist() == [[1, 0], [0, 0]]
    for wrong in ([0, 5], [-1, 0]):
        with pytest.raises(
            BatchError, match=f"Targets from {wrong[0]} to {wrong[1]} in this batch.* 5 classes: 0 to 4"
        ):
            known_classes(torch.tensor(wrong), 5, -100)
    assert known_classes(torch.tensor([7]), 5, 7).tolist() == [False], "an ignored one may be any number"


@pytest.mark.parametrize("concentration", [0.4, 1.0, 3.0])
def test_shares_are_drawn_by_the_papers_loop(concentration: float) -> None:
    """A boost below 1 alone: the draws of a concentration of 1 take no further uniform."""
    generator = torch.Generator().manual_seed(2)

    def uniform() -> float:
        return 1 - float(torch.rand((), dtype=torch.float64, generator=generator))

    def variate() -> float:
        boost = uniform() ** (1 / concentration) if concentration < 1 else 1.0
        d = (concentration + 1 if concentration < 1 else concentration) - 1 / 3
        while True:
            x = float(torch.randn((), dtype=torch.float64, generator=generator))
            u, v = uniform(), (1 + x / math.sqrt(9 * d)) ** 3
            if v > 0 and math.log(u) < 0.5 * x * x + d - d * v + d * math.log(v):
                return d * v * boost

    for num in (2, 3):
        drawn = [sample_dirichlet(concentration, num, torch.Generator().manual_seed(2)) for _ in range(2)]
        generator.manual_seed(2)
        values = [variate() for _ in range(num)]
        assert drawn[0].tolist() == pytest.approx([value / sum(values) for value in values], rel=1e-9)
        assert torch.equal(*drawn)
