"""ColOut against pixels picked one by one."""

from __future__ import annotations

from typing import Any

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
from cosmati.methods.colout import ColOut, colout_batch

torch.set_num_threads(1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def position(epoch: int = 0, step: int = 0) -> Position:
    return Position(Clock(step=step, epoch=epoch), Budget(Time.parse("10ba")), 3, 0, nn.Identity(), None)


def batch_of(input: Any, target: Any = None) -> Batch:
    return Batch((input, torch.zeros(len(input)) if target is None else target), Lineage.of_rows(0, len(input)))


def coordinates(rows: int, height: int, width: int) -> Tensor:
    """Images whose pixels hold their own place: channel 0 the row, channel 1 the column."""
    places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")).float()
    return places.expand(rows, 2, height, width).contiguous()


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(0, 0.99),
    st.floats(0, 0.99),
    st.booleans(),
    st.integers(0, 20),
)
def test_whole_rows_and_columns_go_and_order_stays(
    rows: int, height: int, width: int, p_row: float, p_col: float, per_image: bool, step: int
) -> None:
    images = coordinates(rows, height, width)
    result = ColOut(p_row=p_row, p_col=p_col, per_image=per_image).batch(batch_of(images), position(step, step)).input
    kept_height, kept_width = max(1, int((1 - p_row) * height + 1e-9)), max(1, int((1 - p_col) * width + 1e-9))
    assert result.shape == (rows, 2, kept_height, kept_width)
    for image in result:
        down, across = image[0, :, 0], image[1, 0]
        assert down.tolist() == sorted(set(down.tolist()))
        assert across.tolist() == sorted(set(across.tolist()))
        for y in range(kept_height):
            for x in range(kept_width):
                assert image[:, y, x].tolist() == [down[y], across[x]]
        assert per_image or torch.equal(image, result[0])


def test_the_smallest_draws_stay() -> None:
    images = torch.rand(4, 3, 10, 7)
    result = colout_batch(images, 0.3, 0.5, generator=generator(1))
    draw = generator(1)
    chosen = []
    for size, num in ((10, 7), (7, 3)):
        uniforms = torch.rand(1, size, dtype=torch.float64, generator=draw)[0].tolist()
        chosen.append(sorted(sorted(range(size), key=lambda index, u=uniforms: u[index])[:num]))
    assert np.array_equal(result.numpy(), images.numpy()[:, :, chosen[0]][:, :, :, chosen[1]])
    assert torch.equal(colout_batch(images[1], 0.3, 0.5, generator=generator(1)), result[1])


def test_every_place_is_left_out_equally_often() -> None:
    places = coordinates(4000, 6, 6)
    kept = ColOut(p_row=0.5, p_col=0.0, per_image=True).batch(batch_of(places), position()).input[:, 0, :, 0]
    often = torch.bincount(kept.flatten().long(), minlength=6) / 4000
    assert torch.allclose(often, torch.full((6,), 0.5), atol=0.04)


@pytest.mark.parametrize("mode", ["L", "RGB", "P"])
def test_pil_images_equal_tensors(mode: str) -> None:
    pixels = torch.randint(256, (3, 9, 12), dtype=torch.uint8, generator=generator())
    image = Image.fromarray(pixels.movedim(0, 2).numpy()).convert(mode)
    result = colout_batch(image, 0.2, 0.4, generator=generator(2))
    array = torch.from_numpy(np.array(image))
    expected = colout_batch(array.movedim(2, 0) if mode == "RGB" else array, 0.2, 0.4, generator=generator(2))
    expected = expected.movedim(0, 2) if mode == "RGB" else expected
    assert isinstance(result, Image.Image)
    assert (result.mode, result.size) == (mode, (7, 7))
    assert np.array_equal(np.array(result), expected.numpy())
    assert result.getpalette() == image.getpalette()
    both = colout_batch((image, image), 0.2, 0.4, generator=generator(2))
    assert np.array_equal(np.array(both[1]), np.array(result))


@pytest.mark.parametrize("per_image", [False, True])
def test_maps_go_with_their_images(per_image: bool) -> None:
    images = torch.rand(3, 2, 8, 9)
    at = position()
    for target in (images.sum(1), images * 2):
        result = ColOut(per_image=per_image).batch(batch_of(images, target), at)
        expected = result.input.sum(1) if target.ndim == 3 else result.input * 2
        assert torch.equal(result.target, expected)
        kept = ColOut(per_image=per_image, resize_target=False).batch(batch_of(images, target), at)
        assert kept.target is target
    square = torch.rand(8, 1, 8, 9)
    for labels in (torch.rand(8, 9), torch.arange(8), torch.rand(8, 4, 9)):
        assert ColOut(per_image=per_image).batch(batch_of(square, labels), at).target is labels
        with pytest.raises(BatchError, match="resize_target=True"):
            ColOut(per_image=per_image, resize_target=True).batch(batch_of(square, labels), at)


def test_rows_permuted_give_permuted_rows() -> None:
    batch, order, at = batch_of(torch.rand(6, 1, 12, 12)), torch.randperm(6), position()
    for method in (ColOut(), ColOut(per_image=True)):
        result = method.batch(batch, at)
        assert torch.equal(method.batch(batch.select(order), at).input, result.input[order])
    assert not torch.equal(ColOut().batch(batch, position(step=1)).input, ColOut().batch(batch, at).input)
    rows = ColOut(per_image=True)
    assert not torch.equal(rows.batch(batch, position(epoch=1)).input, rows.batch(batch, at).input)


@pytest.mark.parametrize("per_image", [False, True])
def test_method_equals_function_in_every_type_and_layout(per_image: bool) -> None:
    at, method = position(), ColOut(p_row=0.3, p_col=0.2, per_image=per_image)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        images = (torch.rand(3, 3, 8, 8) * 200).to(dtype).to(memory_format=torch.channels_last)
        result = method.batch(batch_of(images), at).input
        assert result.is_contiguous(memory_format=torch.channels_last)
        assert result.dtype == dtype
        if not per_image:
            assert torch.equal(result, colout_batch(images, 0.3, 0.2, generator=at.generator("colout")))


def test_off_is_the_same_batch_and_declarations() -> None:
    batch = batch_of(torch.rand(2, 3, 4, 4))
    assert ColOut(p_row=0.0, p_col=0.0).batch(batch, position()) is batch
    assert torch.equal(colout_batch(batch.input, 0.0, 0.0), batch.input)
    assert (ColOut().stage, ColOut().couples, ColOut().claims) == (Stage.PERTURB, frozenset(), frozenset())
    assert ColOut().reads == {"images"}


def test_bad_input_is_refused() -> None:
    for options in ({"p_row": 1.0}, {"p_col": -0.1}, {"p_row": float("nan")}):
        with pytest.raises(PlanError, match="ColOut"):
            ColOut(**options)
        with pytest.raises(BatchError, match="fractions"):
            colout_batch(torch.zeros(1, 4, 4), **options)
    for wrong in (torch.zeros(4), [1, 2]):
        with pytest.raises(BatchError, match="images"):
            colout_batch(wrong)
    with pytest.raises(BatchError, match="images"):
        ColOut().batch(batch_of(torch.zeros(4, 4)), position())
