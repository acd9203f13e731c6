"""AugMix and RandAugment: formulas, kinds of images, draws that belong to rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torch import Tensor

from cosmati.core.batch import Batch, Lineage, bury
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Position
from cosmati.errors import BatchError, PlanError
from cosmati.methods import AugMix, RandAugment
from cosmati.methods.augmix import augmix_image
from cosmati.methods.building_blocks.image_operations import NUM_DRAWS, augment
from cosmati.methods.building_blocks.mixing import NUM_GAMMA_DRAWS, log_gamma_of_uniforms
from cosmati.methods.randaugment import randaugment_image

pytestmark = pytest.mark.long

FUNCTIONS = (augmix_image, randaugment_image)


def images(rows: int = 6, channels: int = 3, size: int = 8) -> Tensor:
    return torch.rand(rows, channels, size, size, generator=torch.Generator().manual_seed(1))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_randaugment_is_its_operations_one_after_another() -> None:
    x = images()
    draws = torch.rand(6, 3 * NUM_DRAWS, dtype=torch.float64, generator=generator()).view(6, 3, NUM_DRAWS)
    expected = x
    for step in range(3):
        expected = torch.cat([augment(expected[i : i + 1].clone(), draws[i : i + 1, step], 5, "all") for i in range(6)])
    torch.testing.assert_close(randaugment_image(x, 5, 3, generator=generator()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("depth", [-1, 2])
def test_augmix_is_the_papers_formula(depth: int) -> None:
    x, width, longest = images(), 3, 2 if depth == 2 else 3
    num = width * (1 + longest * NUM_DRAWS) + (width + 2) * NUM_GAMMA_DRAWS
    draws = torch.rand(6, num, dtype=torch.float64, generator=generator())
    found = augmix_image(x, 4, depth, width, 0.7, "safe", generator=generator())
    for row in range(6):
        own = draws[row]
        logs = log_gamma_of_uniforms(0.7, own[width * (1 + longest * NUM_DRAWS) :].view(width + 2, NUM_GAMMA_DRAWS))
        weights, share = logs[:width].softmax(0), float(logs[width:].softmax(0)[0])
        mixed = torch.zeros_like(x[row : row + 1])
        for chain in range(width):
            image = x[row : row + 1]
            for step in range(depth if depth > 0 else 1 + int(own[chain] * 3)):
                at = width + (chain * longest + step) * NUM_DRAWS
                image = augment(image.clone(), own[None, at : at + NUM_DRAWS], 4, "safe")
            mixed = mixed + float(weights[chain]) * image
        expected = (1 - share) * x[row : row + 1] + share * mixed
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("concentration", [0.3, 1.0, 2.5])
def test_gamma_variates_have_their_distribution(concentration: float) -> None:
    uniforms = torch.rand(40_000, NUM_GAMMA_DRAWS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = log_gamma_of_uniforms(concentration, uniforms).exp().numpy()
    assert stats.kstest(values, stats.gamma(concentration).cdf).pvalue > 0.01


@pytest.mark.parametrize("function", FUNCTIONS)
def test_kinds_of_images(function: Any) -> None:
    torch.manual_seed(0)
    array = (images(1, 3, 16)[0] * 255).byte()
    pil = Image.fromarray(array.permute(1, 2, 0).numpy())
    grey = pil.convert("L")
    for image in (pil, grey):
        changed = function(image, generator=generator())
        assert (changed.mode, changed.size) == (image.mode, image.size)
        assert not np.array_equal(np.array(changed), np.array(image))
    as_bytes = function(array, generator=generator())
    assert as_bytes.dtype == torch.uint8
    assert np.array_equal(as_bytes.permute(1, 2, 0).numpy(), np.array(function(pil, generator=generator())))
    as_floats = function(array.double() / 255, generator=generator())
    assert as_floats.dtype == torch.float64
    torch.testing.assert_close(as_floats, as_bytes.double() / 255, rtol=0, atol=0.51 / 255)
    for batch in (images(1, 1, 1), images(3, 1, 8), images(0)):
        assert function(batch).shape == batch.shape


@pytest.mark.parametrize("function", FUNCTIONS)
def test_off_and_refusals(function: Any) -> None:
    x = images()
    assert function(x, severity=0) is x
    assert function(x, depth=0) is x
    for bad in (x[:, :2], x[0, 0], x.long(), Image.new("CMYK", (2, 2)), "image"):
        with pytest.raises(BatchError, match=r"(AugMix|RandAugment) changes"):
            function(bad)
    with pytest.raises(BatchError, match="needs pixels from 0 to 1"):
        function(3 * x)
    for options in ({"severity": 11}, {"severity": float("nan")}, {"augmentation_set": "some"}):
        with pytest.raises(BatchError, match=next(iter(options))):
            function(x, **options)
    with pytest.raises(BatchError, match="width=0"):
        augmix_image(x, width=0)


def position(step: int = 0) -> Position:
    return Position(Clock(step=step), Budget(Time.parse("9ba")), 3, 0, torch.nn.Identity(), Classification(10))


@pytest.mark.parametrize("method", [AugMix(), RandAugment()])
@settings(deadline=None, max_examples=10)
@given(order=st.permutations(range(6)))
def test_draws_belong_to_rows(method: Any, order: list[int]) -> None:
    batch = Batch((images(), torch.arange(6)), Lineage.of_rows(40, 6))
    changed = method.batch(batch, position())
    permuted = method.batch(batch.select(torch.tensor(order)), position())
    assert torch.equal(permuted.input, changed.input[order])
    assert changed.lineage is batch.lineage
    assert not torch.equal(changed.input, batch.input)


@pytest.mark.parametrize("method", [AugMix(), AugMix(alpha=0.3), RandAugment()])
@settings(deadline=None, max_examples=10)
@given(kept=st.sets(st.integers(0, 5), min_size=1), seed=st.integers(0, 99))
def test_a_row_is_the_same_to_the_bit_in_any_company(method: Any, kept: set[int], seed: int) -> None:
    """Or a deleted row would leave its mark on those that stay."""
    pixels = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    batch = Batch((pixels, torch.arange(6)), Lineage.of_rows(40 + seed, 6))
    rows = torch.tensor(sorted(kept))
    alone = method.batch(batch.select(rows), position()).input
    assert torch.equal(alone, method.batch(batch, position()).input[rows])
    gone = torch.ones(6, dtype=torch.bool).index_fill(0, rows, value=False)
    assert torch.equal(alone, method.batch(bury(batch, gone), position()).input[rows])


@pytest.mark.parametrize("kind", [AugMix, RandAugment])
def test_value_range(kind: Any) -> None:
    x = images()
    y, lineage = torch.arange(6), Lineage.of_rows(0, 6)
    plain = kind().batch(Batch((x, y), lineage), position()).input
    scaled = kind(value_range=(-1.0, 3.0)).batch(Batch((4 * x - 1, y), lineage), position()).input
    torch.testing.assert_close(scaled, 4 * plain - 1, rtol=0, atol=1e-4)
    with pytest.raises(BatchError, match=r"value_range=\(low, high\)"):
        kind().batch(Batch((4 * x - 1, y), lineage), position())
    with pytest.raises(PlanError, match="has no white"):
        kind(value_range=(1.0, 1.0))
    with pytest.raises(PlanError, match="augmentation_set"):
        kind(augmentation_set="none")
