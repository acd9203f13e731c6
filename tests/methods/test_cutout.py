"""CutOut against holes cut pixel by pixel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.cutout import CutOut, cutout_batch

torch.set_num_threads(1)


def position(epoch: int = 0, step: int = 0) -> Position:
    return Position(Clock(step=step, epoch=epoch), Budget(Time.parse("10ba")), 3, 0, nn.Identity(), None)


def batch_of(input: Tensor) -> Batch:
    return Batch((input, torch.zeros(len(input))), Lineage.of_rows(0, len(input)))


def reference(image: Tensor, draws: list[float], side: int, *, uniform: bool) -> Tensor:
    result = image.clone()
    _, height, width = image.shape
    for vertical, horizontal in zip(draws[::2], draws[1::2], strict=True):
        if uniform:
            top = math.floor(vertical * (height + side - 1)) - side + 1
            left = math.floor(horizontal * (width + side - 1)) - side + 1
        else:
            top, left = math.floor(vertical * height) - side // 2, math.floor(horizontal * width) - side // 2
        for row in range(max(0, top), min(height, top + side)):
            for column in range(max(0, left), min(width, left + side)):
                result[:, row, column] = 0
    return result


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 3),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 9),
)
def test_method_cuts_the_row_draws(
    rows: int, height: int, width: int, num_holes: int, length: float, uniform: bool, epoch: int
) -> None:
    images = torch.ones(rows, 2, height, width)
    batch, at = batch_of(images), position(epoch)
    result = CutOut(num_holes=num_holes, length=length, uniform_sampling=uniform).batch(batch, at).input
    side = math.floor(min(height, width) * length + 1e-9)
    draws = at.row_uniform("cutout", batch, 2 * num_holes) if num_holes else torch.zeros(rows, 0)
    for row in range(rows):
        assert torch.equal(result[row], reference(images[row], draws[row].tolist(), side, uniform=uniform))


def test_function_draws_from_the_generator() -> None:
    images = torch.rand(4, 3, 8, 6) + 1
    result = cutout_batch(images, 2, 0.5, False, generator=torch.Generator().manual_seed(1))
    draws = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for row in range(4):
        assert torch.equal(result[row], reference(images[row], draws[row].tolist(), 3, uniform=False))
    one = cutout_batch(images[0], 2, 0.5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(one, result[0])
    assert one.shape == (3, 8, 6)


def test_half_of_64_pixels_is_32() -> None:
    areas = [
        int((cutout_batch(torch.ones(1, 64, 64), generator=torch.Generator().manual_seed(seed)) == 0).sum())
        for seed in range(200)
    ]
    assert max(areas) == 32 * 32
    assert min(areas) >= 16 * 16
    odd = cutout_batch(torch.ones(200, 1, 10, 10), 1, 0.5, generator=torch.Generator().manual_seed(0))
    assert int((odd == 0).sum((1, 2, 3)).max()) == 25
    assert int((cutout_batch(torch.ones(300, 1, 100, 100), 1, 0.57, True) == 0).any(2).sum(-1).max()) == 57


def test_uniform_sampling_cuts_each_pixel_equally_often() -> None:
    images = torch.ones(20000, 1, 6, 6)
    generator = torch.Generator().manual_seed(2)
    often = (cutout_batch(images, 1, 0.5, True, generator=generator) == 0).double().mean((0, 1))
    probability = (3 / 8) ** 2
    assert torch.allclose(often, torch.full((6, 6), probability, dtype=torch.float64), atol=0.013)
    centred = (cutout_batch(images, 1, 0.5, generator=generator) == 0).double().mean((0, 1))
    assert centred[0, 0] < centred[3, 3] - 0.05


def test_rows_permuted_give_permuted_rows() -> None:
    batch = batch_of(torch.rand(8, 3, 12, 12) + 1)
    order = torch.randperm(8)
    method, at = CutOut(num_holes=2, length=0.3), position()
    result = method.batch(batch, at)
    assert torch.equal(method.batch(batch.select(order), at).input, result.input[order])
    assert torch.equal(method.batch(batch, position(step=1)).input, result.input)
    assert not torch.equal(method.batch(batch, position(epoch=1)).input, result.input)
    assert len({tuple((image == 0).nonzero().flatten().tolist()) for image in result.input}) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
def test_types_and_memory_formats_stay(dtype: torch.dtype) -> None:
    images = torch.ones(2, 3, 8, 8).to(dtype).to(memory_format=torch.channels_last)
    result = CutOut().batch(batch_of(images), position()).input
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=torch.channels_last)
    broken = cutout_batch(torch.full((1, 4, 4), torch.inf), 1, 1.0)
    assert not bool(broken.isnan().any())


def test_off_is_the_same_batch_and_declarations() -> None:
    batch = batch_of(torch.rand(2, 3, 4, 4))
    assert CutOut(num_holes=0).batch(batch, position()) is batch
    assert CutOut(length=0.0).batch(batch, position()) is batch
    assert (CutOut().stage, CutOut().couples, CutOut().claims) == (Stage.PERTURB, frozenset(), frozenset())
    assert torch.equal(cutout_batch(batch.input, 1, 0.1), batch.input)


def test_bad_input_is_refused() -> None:
    for options in ({"num_holes": -1}, {"length": 1.5}, {"length": -0.1}):
        with pytest.raises(PlanError, match="CutOut"):
            CutOut(**options)
    with pytest.raises(BatchError, match="images"):
        cutout_batch(torch.zeros(4, 4))
    with pytest.raises(BatchError, match="fraction"):
        cutout_batch(torch.zeros(1, 4, 4), 1, 8)
    with pytest.raises(BatchError, match="images"):
        CutOut().batch(batch_of(torch.zeros(4, 4)), position())


def test_a_pil_image_has_the_same_holes() -> None:
    image = Image.fromarray((torch.rand(9, 7, 3) * 254 + 1).byte().numpy())
    holed = cutout_batch(image, 2, 0.4, generator=torch.Generator().manual_seed(3))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    expected = cutout_batch(pixels, 2, 0.4, generator=torch.Generator().manual_seed(3))
    assert (holed.mode, holed.size) == (image.mode, image.size)
    assert torch.equal(torch.from_numpy(np.array(holed)).permute(2, 0, 1), expected)
    assert not torch.equal(expected, pixels)
