"""CutMix against images put together pixel by pixel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from cosmati.core.batch import TOMBSTONE, Batch, Lineage
from cosmati.core.clock import Budget, Clock, Time
from cosmati.core.loss import Classification
from cosmati.core.method import Position, Stage
from cosmati.core.plan import Facts, make_plan
from cosmati.errors import BatchError, PlanError
from cosmati.methods.cutmix import CutMix, cutmix_batch
from cosmati.methods.mixup import MixUp

torch.set_num_threads(1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def position(loss: Any = None, step: int = 0, microbatch: int = 0) -> Position:
    return Position(
        Clock(step=step), Budget(Time.parse("10ba")), 3, microbatch, nn.Identity(), loss or Classification(4)
    )


def batch_of(input: Tensor, target: Tensor) -> Batch:
    return Batch((input, target), Lineage.of_rows(100, len(input)))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 9),
    st.none() | st.floats(0, 1),
    st.floats(0, 5),
    st.booleans(),
    st.integers(0, 99),
)
def test_each_pixel_comes_from_the_row_that_the_box_says(
    rows: int, height: int, width: int, length: float | None, alpha: float, uniform: bool, seed: int
) -> None:
    images, target = torch.rand(rows, 2, height, width, generator=generator(seed)), torch.arange(rows)
    mixed, permuted, share, box = cutmix_batch(
        images, target, length, alpha, uniform_sampling=uniform, generator=generator(seed)
    )
    top, left, bottom, right = box
    cut = 0
    for y in range(height):
        for x in range(width):
            inside = top <= y < bottom and left <= x < right
            cut += inside
            for row in range(rows):
                source = int(permuted[row]) if inside else row
                assert torch.equal(mixed[row, :, y, x], images[source, :, y, x])
    assert share == pytest.approx(1 - cut / (height * width))
    assert sorted(permuted.tolist()) == list(range(rows))


def test_a_box_and_pairs_that_are_given() -> None:
    images, indices = torch.arange(3.0)[:, None, None, None].expand(3, 1, 4, 6), torch.tensor([1, 2, 0])
    mixed, permuted, share, box = cutmix_batch(images, torch.tensor([5, 6, 7]), bbox=(1, 2, 3, 6), indices=indices)
    assert permuted.tolist() == [6, 7, 5]
    assert share == 1 - 8 / 24
    assert box == (1, 2, 3, 6)
    assert mixed[0, 0].tolist() == [[0] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0] * 6]


def test_half_of_64_pixels_is_32() -> None:
    images, target = torch.zeros(2, 1, 64, 64), torch.zeros(2)
    boxes = [cutmix_batch(images, target, 0.5, generator=generator(seed))[3] for seed in range(200)]
    sides = [side for top, left, bottom, right in boxes for side in (bottom - top, right - left)]
    assert max(sides) == 32
    assert min(sides) >= 16
    wide = [
        cutmix_batch(torch.zeros(1, 1, 100, 10), target[:1], 0.57, 1.0, None, None, True, generator=generator(seed))[3]
        for seed in range(200)
    ]
    assert max(bottom - top for top, _, bottom, _ in wide) == 57
    assert max(right - left for _, left, _, right in wide) == 5


def test_area_is_beta_distributed() -> None:
    images, target = torch.zeros(1, 1, 400, 400), torch.zeros(1)
    boxes = [cutmix_batch(images, target, alpha=0.7, generator=generator(seed))[3] for seed in range(400)]
    # Boxes that the border doesn't clip are biased to the small; the longest side of one that spans the middle isn't
    # observable, so only sides below the half are compared, which clipping at one end at most halves.
    sides = [max(bottom - top, right - left) / 400 for top, left, bottom, right in boxes]
    share_of_small = sum(side < 0.25 for side in sides) / 400
    least, most = stats.beta(0.7, 0.7).cdf(0.25**2), stats.beta(0.7, 0.7).cdf(0.5**2)
    assert least - 0.06 <= share_of_small <= most + 0.06
    assert cutmix_batch(images, target, alpha=0.0)[2] == 1.0


def test_uniform_sampling_cuts_each_pixel_equally_often() -> None:
    often, centred = torch.zeros(6, 6), torch.zeros(6, 6)
    images, target, pairs = (
        torch.stack([torch.zeros(1, 6, 6), torch.ones(1, 6, 6)]),
        torch.zeros(2),
        torch.tensor([1, 0]),
    )
    num = 4000
    for seed in range(num):
        draw = generator(seed)
        often += cutmix_batch(images, target, 0.5, indices=pairs, uniform_sampling=True, generator=draw)[0][0, 0]
        centred += cutmix_batch(images, target, 0.5, indices=pairs, generator=draw)[0][0, 0]
    assert torch.allclose(often / num, torch.full((6, 6), (3 / 8) ** 2), atol=0.03)
    assert centred[0, 0] < centred[3, 3] - 0.05 * num


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_method_equals_function(dtype: torch.dtype) -> None:
    images = (torch.rand(8, 3, 6, 6) * 255).to(dtype).to(memory_format=torch.channels_last)
    target, at = torch.randint(4, (8,)), position()
    result = CutMix(alpha=0.8).batch(batch_of(images, target), at)
    draw = at.generator("cutmix")
    pairs = torch.randperm(8, generator=draw)
    mixed, permuted, share, _ = cutmix_batch(images, target, alpha=0.8, indices=pairs, generator=draw)
    assert torch.equal(result.input, mixed)
    assert result.input.dtype == dtype
    assert result.input.is_contiguous(memory_format=torch.channels_last)
    eye = torch.eye(4)
    torch.testing.assert_close(result.target, share * eye[target] + (1 - share) * eye[permuted])
    assert torch.equal(result.lineage.parents[:, 1], pairs + 100)  # type: ignore[index]


def test_interpolated_loss_equals_loss_of_mixed_targets() -> None:
    images, target, logits = torch.randn(8, 1, 5, 5), torch.randint(4, (8,)), torch.randn(8, 4)
    loss, batch = Classification(4), batch_of(images, target)
    soft = CutMix().batch(batch, position())
    hard = CutMix(interpolate_loss=True).batch(batch, position())
    assert torch.equal(soft.input, hard.input)
    torch.testing.assert_close(loss.compare(logits, soft.target).per_row, loss.compare(logits, hard.target).per_row)
    assert hard.target.first is target


def test_lineage_names_the_rows_that_the_pixels_come_from() -> None:
    ids = torch.arange(100.0, 108.0)[:, None, None, None].expand(8, 1, 6, 6)
    for step in range(9):
        result = CutMix().batch(batch_of(ids, torch.zeros(8, dtype=torch.int64)), position(step=step))
        for row, parents in zip(result.input, result.lineage.parents, strict=True):  # type: ignore[arg-type]
            assert set(row.unique().long().tolist()) <= set(parents.tolist())


def test_tombstones_mix_with_nobody() -> None:
    row_ids = torch.arange(12)
    row_ids[[2, 7]] = TOMBSTONE
    images = torch.rand(12, 1, 6, 6).index_fill(0, torch.tensor([2, 7]), torch.nan)
    batch = Batch((images, torch.randint(4, (12,))), Lineage(row_ids, torch.zeros(12, dtype=torch.int64)))
    result = CutMix(length=0.8).batch(batch, position())
    present = row_ids != TOMBSTONE
    assert bool(result.input[present].isfinite().all())
    assert not bool((result.lineage.parents[present] == TOMBSTONE).any())  # type: ignore[index]


def test_draws_belong_to_the_position() -> None:
    batch, method = batch_of(torch.rand(8, 1, 9, 9), torch.randint(4, (8,))), CutMix()
    first = method.batch(batch, position(step=4)).input
    state = torch.get_rng_state()
    assert torch.equal(first, method.batch(batch, position(step=4)).input)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, method.batch(batch, position(step=5)).input)
    assert not torch.equal(first, method.batch(batch, position(step=4, microbatch=1)).input)


def test_off_is_the_same_batch_and_declarations() -> None:
    batch = batch_of(torch.rand(4, 1, 4, 4), torch.zeros(4, dtype=torch.int64))
    for off in (CutMix(alpha=0.0, interpolate_loss=True), CutMix(length=0.0)):
        assert off.batch(batch, position()) is batch
        assert (off.couples, off.claims) == (frozenset(), frozenset())
    method = CutMix()
    assert (method.stage, method.couples, method.claims) == (Stage.MIX, frozenset({"rows"}), frozenset())
    assert CutMix(interpolate_loss=True, alpha=0.0, length=0.5).claims == {"loss interpolation"}
    assert method.reads == {"images"}


def test_bad_input_is_refused() -> None:
    for options in ({"alpha": -0.1}, {"alpha": math.inf}, {"alpha": math.nan}, {"length": 1.5}, {"length": -0.1}):
        with pytest.raises(PlanError, match="CutMix"):
            CutMix(**options)
        with pytest.raises(BatchError, match="fraction"):
            cutmix_batch(torch.zeros(2, 1, 4, 4), torch.zeros(2), **options)
    with pytest.raises(BatchError, match="images"):
        cutmix_batch(torch.zeros(2, 4, 4), torch.zeros(2))
    for box in ((0, 0, 5, 4), (-1, 0, 2, 2), (3, 0, 2, 2)):
        with pytest.raises(BatchError, match="inside"):
            cutmix_batch(torch.zeros(2, 1, 4, 4), torch.zeros(2), bbox=box)
    nest = Batch(({"a": torch.zeros(2, 1, 4, 4)}, torch.zeros(2)), Lineage.of_rows(0, 2))
    with pytest.raises(BatchError, match="one input tensor"):
        CutMix().batch(nest, position())
    with pytest.raises(PlanError, match="num_classes"):
        CutMix().batch(batch_of(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])), position(loss=lambda *_: None))


def test_a_second_mixture_of_two_targets_is_refused_by_the_plan() -> None:
    facts = Facts(num_microbatches=1, rows_per_microbatch=4, positional_data=True)
    first = CutMix(interpolate_loss=True)
    with pytest.raises(PlanError, match=r"can't mix again\. Give MixUp before it"):
        make_plan([first, MixUp()], facts)
    assert make_plan([MixUp(), first], facts).methods == (MixUp(), first)
