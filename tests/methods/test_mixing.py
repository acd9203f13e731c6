"""Shares against their distributions, pairs and probabilities against loops."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cosmati.errors import BatchError
from cosmati.methods.building_blocks.mixing import one_hot, pair_rows, sample_dirichlet

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
