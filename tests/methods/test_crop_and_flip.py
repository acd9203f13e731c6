"""CropAndFlip against images moved pixel by pixel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.crop_and_flip import CropAndFlip, crop_and_flip_batch

torch.set_num_threads(1)


def position(epoch: int = 0, step: int = 0) -> Position:
    return Position(Clock(step=step, epoch=epoch), Budget(Time.parse("10ba")), 3, 0, nn.Identity(), None)


def batch_of(input: Tensor) -> Batch:
    return Batch((input, torch.zeros(len(input))), Lineage.of_rows(0, len(input)))


def reference(image: Tensor, draws: list[float], padding: int, p: float) -> Tensor:
    """Return a crop of the padded image or of its mirror image, pixel by pixel."""
    _, height, width = image.shape
    top, left = (math.floor(draw * (2 * padding + 1)) - padding for draw in draws[:2])
    result = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            source_row = row + top
            source_column = (width - 1 - column if draws[2] < p else column) + left
            if 0 <= source_row < height and 0 <= source_column < width:
                result[:, row, column] = image[:, source_row, source_column]
    return result


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 2), st.integers(1, 7), st.integers(1, 7), st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0]))
def test_function_is_the_reference(channels: int, height: int, width: int, padding: int, p: float) -> None:
    images = torch.rand(4, channels, height, width, dtype=torch.float64)
    result = crop_and_flip_batch(images, padding, p, generator=torch.Generator().manual_seed(5))
    draws = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).tolist()
    for image, moved, own in zip(images, result, draws, strict=True):
        assert torch.equal(moved, reference(image, own, padding, p))


def test_method_is_the_function_with_the_rows_own_draws() -> None:
    images = torch.rand(5, 2, 6, 7)
    method, batch, at = CropAndFlip(padding=2), batch_of(images), position()
    result = method.batch(batch, at).input
    draws = at.row_uniform("crop and flip", batch, 3).tolist()
    for image, moved, own in zip(images, result, draws, strict=True):
        assert torch.equal(moved, reference(image, own, 2, 0.5))
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(method.batch(batch.select(order), at).input, result[order])
    assert not torch.equal(method.batch(batch, position(epoch=1)).input, result)


def test_all_moves_are_drawn_alike() -> None:
    image = torch.zeros(1, 1, 9, 9)
    image[0, 0, 4, 4] = 1
    moved = crop_and_flip_batch(image.expand(9000, 1, 9, 9), 2, 0.5, generator=torch.Generator().manual_seed(0))
    counts = moved.sum((0, 1))[2:7, 2:7]
    assert counts.sum() == 9000
    assert bool((counts - 360).abs().max() < 5 * math.sqrt(360))


def test_off_and_layout() -> None:
    batch = batch_of(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last))
    assert CropAndFlip(padding=0, p=0.0).batch(batch, position()) is batch
    assert CropAndFlip().batch(batch, position()).input.is_contiguous(memory_format=torch.channels_last)
    assert CropAndFlip().batch(batch_of(torch.rand(2, 3, 4, 4)), position()).input.is_contiguous()
    assert (CropAndFlip().stage, CropAndFlip().couples) == (Stage.PERTURB, frozenset())


def test_bad_input_is_refused() -> None:
    for options in ({"padding": -1}, {"p": 1.5}, {"p": -0.1}, {"p": float("nan")}):
        with pytest.raises(PlanError, match="CropAndFlip"):
            CropAndFlip(**options)
        with pytest.raises(BatchError, match="padding"):
            crop_and_flip_batch(torch.rand(2, 1, 4, 4), **options)
    for input in (torch.rand(2, 5), torch.rand(3, 4, 4)):
        with pytest.raises(BatchError, match="images"):
            crop_and_flip_batch(input)
        with pytest.raises(BatchError, match="Leave it out"):
            CropAndFlip().batch(batch_of(input), position())
