"""Buckets of gradients: each element once, places that don't overlap and are aligned, and who gets which."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cosmati.train.layout.piece import alignment_of, by_owner, cut, evenly, in_buckets, laid_out, memory, strides_of

SIZES = st.lists(st.integers(0, 90), min_size=1, max_size=8)


def checked_places(parts: list[tuple[int, int]], alignment: int, total: int) -> None:
    """Places of runs: aligned, one after the other, within the whole."""
    end = 0
    for place, size in parts:
        assert place % alignment == 0
        assert end <= place
        assert place - end < alignment
        end = place + size
    assert end <= total


@given(sizes=SIZES, world=st.sampled_from([1, 2, 4]), alignment=st.sampled_from([1, 4, 16]))
def test_an_even_bucket_gives_each_rank_as_much(sizes: list[int], world: int, alignment: int) -> None:
    indices = list(range(len(sizes)))[::-1]
    bucket = evenly(indices, sizes, world, alignment)
    assert bucket.parameters == set(indices)
    assert [(part.parameter, part.start, part.stop) for part in bucket.parts] == [(i, 0, sizes[i]) for i in indices]
    assert len({*bucket.lengths}) == 1
    assert len(bucket.lengths) == world
    checked_places([(part.place, part.stop) for part in bucket.parts], alignment, sum(bucket.lengths))
    most = sum(-(-size // alignment) * alignment for size in sizes)
    assert bucket.lengths[0] % alignment == 0
    assert 0 <= sum(bucket.lengths) - most < world * alignment


@pytest.mark.long
@given(sizes=SIZES, world=st.sampled_from([1, 2, 4]), alignment=st.sampled_from([1, 4]), data=st.data())
def test_a_bucket_by_owners_gives_each_rank_its_pieces(
    sizes: list[int], world: int, alignment: int, data: st.DataObject
) -> None:
    divisible = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    pieces = cut(sizes, divisible, (), world, alignment)
    indices = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, min_size=1))
    bucket = by_owner(indices, pieces, world, alignment)
    for rank in range(world):
        own = [piece for piece in pieces if piece.owner == rank and piece.parameter in indices]
        found = [part for part in bucket.of(rank) if part.stop > part.start]
        assert {(p.parameter, p.start, p.stop) for p in found} == {
            (p.parameter, p.start, p.stop) for p in own if p.stop > p.start
        }
        checked_places([(part.place, part.stop - part.start) for part in found], alignment, bucket.lengths[rank])
    covered = sum(part.stop - part.start for part in bucket.parts)
    assert covered == sum(sizes[index] for index in indices)


@given(sizes=SIZES, limit=st.integers(0, 200))
def test_groups_are_filled_from_the_last_parameter_to_the_first(sizes: list[int], limit: int) -> None:
    groups = in_buckets(sizes, limit)
    assert [index for group in groups for index in group] == list(reversed(range(len(sizes))))
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        total = sum(sizes[index] for index in group)
        assert len(group) == 1 or total <= limit
        assert following is None or total + sizes[following[0]] > limit


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 3).t(),
        torch.randn(4, 8)[:, ::2],
        torch.randn(()),
        torch.randn(0, 3),
    ],
    ids=["plain", "channels last", "transposed", "gaps", "scalar", "empty"],
)
def test_memory_is_laid_out_as_the_parameter_is(like: Tensor) -> None:
    flat = memory(like, like)
    assert flat.shape == (like.numel(),)
    has_gaps = like.numel() > 1 and not torch.ops.aten.is_non_overlapping_and_dense(like)
    assert strides_of(like) == (torch.empty(like.shape).stride() if has_gaps else like.stride())
    around = torch.cat([torch.full((5,), torch.nan), flat, torch.full((5,), torch.nan)])
    assert torch.equal(laid_out(around, like, 5), like)
    assert torch.equal(laid_out(around[2:], like, 3), like)


def test_alignment_is_that_of_the_narrowest() -> None:
    assert alignment_of([torch.ones(1)]) == 16
    assert alignment_of([torch.ones(1).double()]) == 8
    assert alignment_of([torch.ones(1).double(), torch.ones(1).half()]) == 32
