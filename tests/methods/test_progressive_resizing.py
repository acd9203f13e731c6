"""Progressive resizing: the schedule, the sizes, and what a pixel of the small image shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.batch import Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.method import Position, Stage
from cosmati.errors import BatchError, PlanError
from cosmati.methods.progressive_resizing import ProgressiveResizing, resize_batch

torch.set_num_threads(1)


def position(step: int, num_steps: int = 100, microbatch: int = 0) -> Position:
    return Position(Clock(step=step), Budget(Time.parse(f"{num_steps}ba")), 3, microbatch, nn.Identity(), None)


def batch_of(input: Tensor, target: Tensor) -> Batch:
    return Batch((input, target), Lineage.of_rows(0, len(input)))


def numbered(rows: int, height: int, width: int) -> Tensor:
    """Give each pixel the number of its place, so that a resized image says where its pixels come from."""
    return torch.arange(height * width).reshape(1, 1, height, width).expand(rows, 1, -1, -1).float().clone()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 0.99))
def test_nearest_neighbour(height: int, width: int, scale: float) -> None:
    input = numbered(1, height, width)
    result, target = resize_batch(input, torch.zeros(1), scale)
    new_height, new_width = max(1, int(height * scale + 1e-6)), max(1, int(width * scale + 1e-6))
    assert result.shape == (1, 1, new_height, new_width)
    assert target.shape == (1,)
    for row in range(new_height):
        for column in range(new_width):
            exact = row * height / new_height, column * width / new_width
            source = divmod(int(result[0, 0, row, column]), width)
            assert abs(source[0] - exact[0]) < 1 + 1e-4
            assert abs(source[1] - exact[1]) < 1 + 1e-4
            assert source[0] <= exact[0] + 1e-4
            assert source[1] <= exact[1] + 1e-4


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 20), st.integers(2, 20), st.floats(0.1, 0.99), st.integers(0, 99))
def test_crop_is_a_window_and_the_target_shows_the_same(height: int, width: int, scale: float, seed: int) -> None:
    input = numbered(2, height, width)
    target = input[:, 0].long()
    generator = torch.Generator().manual_seed(seed)
    small, small_target = resize_batch(input, target, scale, "crop", True, generator=generator)
    assert torch.equal(small[:, 0].long(), small_target)
    top, left = divmod(int(small[0, 0, 0, 0]), width)
    assert torch.equal(small, input[:, :, top : top + small.shape[2], left : left + small.shape[3]])


def test_crops_reach_both_ends() -> None:
    input = numbered(1, 4, 4)
    firsts = {
        int(resize_batch(input, input, 0.75, "crop", generator=torch.Generator().manual_seed(seed))[0][0, 0, 0, 0])
        for seed in range(60)
    }
    assert firsts == {0, 1, 4, 5}


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32, torch.bfloat16])
def test_target_maps_follow_the_input(dtype: torch.dtype) -> None:
    target = (numbered(2, 8, 8)[:, 0] % 2).to(dtype)
    small, small_target = resize_batch(target.float()[:, None], target, 0.5, resize_targets=True)
    assert small_target.dtype == dtype
    assert torch.equal(small[:, 0], small_target.float())
    assert torch.equal(small_target, target[:, ::2, ::2])
    coarse = torch.rand(2, 5, 4, 4)
    assert torch.equal(
        resize_batch(torch.zeros(2, 3, 8, 8), coarse, 0.5, resize_targets=True)[1], coarse[:, :, ::2, ::2]
    )


def test_the_schedule() -> None:
    method = ProgressiveResizing(initial_scale=0.5, finetune_fraction=0.2, delay_fraction=0.4)
    assert [method.scale(elapsed) for elapsed in (0.0, 0.4, 0.6, 0.8, 1.0)] == pytest.approx([0.5, 0.5, 0.75, 1.0, 1.0])
    sudden = ProgressiveResizing(finetune_fraction=0.25, delay_fraction=0.75)
    assert [sudden.scale(elapsed) for elapsed in (0.0, 0.74, 0.75)] == [0.5, 0.5, 1.0]


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.floats(0.01, 1),
    st.integers(1, 64),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)
def test_sizes_are_multiples_grow_and_are_counted(
    height: int, width: int, initial: float, increment: int, finetune: float, delay: float
) -> None:
    method = ProgressiveResizing(
        initial_scale=initial,
        size_increment=increment,
        finetune_fraction=finetune,
        delay_fraction=delay,
        image_width=width,
    )
    sizes = [method.size(height, width, method.scale(step / 200)) for step in range(201)]
    for (rows, columns), (next_rows, next_columns) in zip(sizes, [*sizes[1:], (height, width)], strict=True):
        assert 1 <= rows <= next_rows <= height
        assert 1 <= columns <= next_columns <= width
        assert columns == width or columns % increment == 0
        assert rows == height or rows % increment == 0
    assert sizes[-1] == (height, width)
    assert len(set(sizes)) <= method.shapes(Budget(Time.parse("200ba")))


def test_shapes_are_exact_on_a_slow_ramp() -> None:
    method = ProgressiveResizing(initial_scale=0.5, size_increment=4, image_width=32)
    sizes = {method.size(32, 32, method.scale(step / 1000)) for step in range(1000)}
    assert method.shapes(Budget(Time.parse("1000ba"))) == len(sizes) == 5
    assert method.shapes(Budget(Time.parse("3ba"))) == 3
    assert 31 <= ProgressiveResizing().shapes(Budget(Time.parse("100ba"))) <= 33
    assert ProgressiveResizing(initial_scale=1.0).shapes(Budget(Time.parse("9sec"))) == 1
    with pytest.raises(PlanError, match="image_width"):
        ProgressiveResizing().shapes(Budget(Time.parse("9sec")))


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_method_equals_function(mode: str) -> None:
    method = ProgressiveResizing(mode=mode, resize_targets=True)  # type: ignore[arg-type]
    images = numbered(3, 32, 32)
    batch, at = batch_of(images, images[:, 0].long()), position(60)
    result = method.batch(batch, at)
    generator = at.generator("progressive_resizing")
    input, target = resize_batch(images, batch.target, 20 / 32, mode, True, generator=generator)  # type: ignore[arg-type]
    assert result.input.shape == (3, 1, 20, 20)
    assert torch.equal(result.input, input)
    assert torch.equal(result.target, target)
    assert torch.equal(result.lineage.row_ids, batch.lineage.row_ids)
    order = torch.tensor([2, 0, 1])
    assert torch.equal(method.batch(batch.select(order), at).input, result.input[order])
    if mode == "crop":
        others = [method.batch(batch, position(60, microbatch=index)).input for index in range(1, 6)]
        assert any(not torch.equal(other, result.input) for other in others)


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_channels_last_stays(mode: str) -> None:
    images = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    result = ProgressiveResizing(mode=mode).batch(batch_of(images, torch.zeros(2)), position(0))  # type: ignore[arg-type]
    assert result.input.is_contiguous(memory_format=torch.channels_last)
    assert result.input.shape == (2, 3, 4, 4)


def test_targets_are_left_alone_and_full_size_is_the_same_batch() -> None:
    batch = batch_of(torch.rand(2, 3, 30, 33), torch.tensor([1, 2]))
    method = ProgressiveResizing()
    assert method.batch(batch, position(10)).target is batch.target
    assert method.batch(batch, position(10)).input.shape == (2, 3, 16, 16)
    assert method.batch(batch, position(80)) is batch
    assert ProgressiveResizing(initial_scale=1.0).batch(batch, position(0)) is batch
    assert ProgressiveResizing(size_increment=64).batch(batch, position(0)) is batch
    assert resize_batch(batch.input, batch.target, 1.0) == (batch.input, batch.target)
    assert (method.stage, method.couples, method.claims) == (Stage.SHAPE, frozenset(), frozenset())


def test_bad_input_is_refused() -> None:
    for options in (
        {"mode": "zoom"},
        {"initial_scale": 0.0},
        {"initial_scale": 1.1},
        {"size_increment": 0},
        {"delay_fraction": 0.9},
        {"finetune_fraction": -0.1},
    ):
        with pytest.raises(PlanError):
            ProgressiveResizing(**options)
    images = torch.rand(2, 3, 8, 8)
    with pytest.raises(BatchError, match="images"):
        resize_batch(images[0], images, 0.5)
    with pytest.raises(BatchError, match="maps"):
        resize_batch(images, torch.zeros(2), 0.5, resize_targets=True)
    with pytest.raises(BatchError, match="mode"):
        resize_batch(images, images, 0.5, "zoom")  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="positive"):
        resize_batch(images, images, 0.0)
    with pytest.raises(BatchError, match="images"):
        ProgressiveResizing().batch(batch_of(torch.zeros(2, 5), torch.zeros(2)), position(0))
