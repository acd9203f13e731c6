"""Who gets which piece, and where each lies among what is exchanged: small cases, put together by hand."""

from __future__ import annotations

import pytest
import torch

from cosmati.train.layout.piece import (
    ALIGNMENT_BYTES,
    Bucket,
    GradientPart,
    Piece,
    alignment_of,
    by_owner,
    cut,
    evenly,
    in_buckets,
    laid_out,
    memory,
    strides_of,
)


def test_whole_parameters_go_to_whoever_has_least_the_largest_first() -> None:
    found = cut([3, 9, 4, 9, 1], (), (), 2, 1)
    # 9 and 9 to ranks 0 and 1 by their index, then 4 to rank 0 (the first of two alike), 3 to rank 1, 1 to rank 1.
    assert found == (Piece(0, 0, 3, 1), Piece(1, 0, 9, 0), Piece(2, 0, 4, 0), Piece(3, 0, 9, 1), Piece(4, 0, 1, 1))
    assert cut([], (), (), 2, 1) == ()
    assert cut([5, 7], {0, 1}, (), 1, 1) == (Piece(0, 0, 5, 0), Piece(1, 0, 7, 0)), "one rank cuts nothing"


def test_a_unit_stays_together_and_weighs_as_much_as_its_parts() -> None:
    found = cut([2, 3, 4, 1], (), [[0, 1], [3]], 2, 1)
    assert {piece.parameter: piece.owner for piece in found} == {0: 0, 1: 0, 2: 1, 3: 1}
    # Alike in weight: by the index.
    assert {p.parameter: p.owner for p in cut([2, 2, 4], (), [[0, 1]], 2, 1)} == {0: 0, 1: 0, 2: 1}
    assert {p.parameter: p.owner for p in cut([4, 2, 2], (), [[1, 2]], 2, 1)} == {0: 0, 1: 1, 2: 1}


@pytest.mark.parametrize(("size", "rest", "is_cut"), [(8, 56, False), (9, 55, True), (5, 3, True), (4, 4, False)])
def test_only_what_is_larger_than_a_quarter_share_and_than_a_cut_is_cut(size: int, rest: int, is_cut: bool) -> None:
    """Of 64 elements over two ranks, a quarter of a share is 8; cuts are at multiples of 4."""
    found = cut([size, rest], {0}, (), 2, 4)
    assert len([piece for piece in found if piece.parameter == 0]) == 1 + is_cut


def test_cuts_are_at_multiples_and_the_last_ranks_may_have_less_or_nothing() -> None:
    assert cut([10], {0}, (), 3, 4) == (Piece(0, 0, 4, 0), Piece(0, 4, 8, 1), Piece(0, 8, 10, 2))
    assert cut([9], {0}, (), 4, 4) == (Piece(0, 0, 4, 0), Piece(0, 4, 8, 1), Piece(0, 8, 9, 2))
    assert cut([8], {0}, (), 4, 4) == (Piece(0, 0, 4, 0), Piece(0, 4, 8, 1))
    assert cut([24], {0}, (), 2, 4) == (Piece(0, 0, 12, 0), Piece(0, 12, 24, 1))


def test_what_is_cut_counts_for_the_load_and_leaves_its_unit() -> None:
    # Rank 0 has 4 of the first one and rank 1 has 2: what follows goes to rank 1.
    found = cut([6, 1, 1], {0}, [[0, 1]], 2, 4)
    assert found == (Piece(0, 0, 4, 0), Piece(0, 4, 6, 1), Piece(1, 0, 1, 1), Piece(2, 0, 1, 1))
    both = cut([8, 8, 1], {0, 1}, [[0, 1]], 2, 4)
    assert both == (
        Piece(0, 0, 4, 0), Piece(0, 4, 8, 1), Piece(1, 0, 4, 0), Piece(1, 4, 8, 1), Piece(2, 0, 1, 0)
    )  # fmt: skip


def test_an_even_bucket_is_one_gradient_after_the_other() -> None:
    assert evenly([2, 0], [3, 9, 5], 2, 4) == Bucket(
        frozenset({0, 2}), (GradientPart(2, 0, 5, 0), GradientPart(0, 0, 3, 8)), (8, 8)
    )
    assert evenly([0], [8], 2, 4) == Bucket(frozenset({0}), (GradientPart(0, 0, 8, 0),), (4, 4))
    assert evenly([0], [4], 3, 4).lengths == (4, 4, 4)
    assert evenly([], [4], 2, 4) == Bucket(frozenset(), (), (0, 0))
    assert evenly([1], [9, 0], 2, 4).lengths == (0, 0)


PIECES = (Piece(0, 0, 8, 0), Piece(0, 8, 13, 1), Piece(1, 0, 3, 1), Piece(2, 0, 6, 0))


def test_a_bucket_by_owners_is_one_rank_after_the_other() -> None:
    bucket = by_owner([2, 0, 1], PIECES, 2, 4)
    assert bucket == Bucket(
        frozenset({0, 1, 2}),
        (GradientPart(0, 0, 8, 0), GradientPart(2, 0, 6, 8), GradientPart(0, 8, 13, 16), GradientPart(1, 0, 3, 24)),
        (16, 12),
    )
    assert list(bucket.of(0)) == [GradientPart(0, 0, 8, 0), GradientPart(2, 0, 6, 8)]
    assert list(bucket.of(1)) == [GradientPart(0, 8, 13, 0), GradientPart(1, 0, 3, 8)]
    assert by_owner([2], PIECES, 2, 4) == Bucket(frozenset({2}), (GradientPart(2, 0, 6, 0),), (8, 0))
    assert list(by_owner([1], PIECES, 2, 4).of(0)) == []


def test_buckets_are_filled_up_to_the_limit_from_the_last_one() -> None:
    assert in_buckets([1, 2, 3, 4], 7) == [[3, 2], [1, 0]]
    assert in_buckets([1, 2, 3, 4], 6) == [[3], [2, 1, 0]]
    assert in_buckets([2, 9, 2], 4) == [[2], [1], [0]], "one that is larger is by itself"
    assert in_buckets([9, 1], 4) == [[1], [0]]
    assert in_buckets([0, 0], 0) == [[1, 0]]
    assert in_buckets([], 4) == [[]]


def test_alignment_is_that_of_the_narrowest_in_elements_of_64_bytes() -> None:
    assert ALIGNMENT_BYTES == 64
    assert alignment_of([torch.ones(1), torch.ones(1).half(), torch.ones(1).double()]) == 32
    assert alignment_of([torch.ones(1).double()]) == 8


def test_strides_are_a_tensors_own_unless_it_has_gaps() -> None:
    whole = torch.arange(24.0).view(4, 6)
    assert strides_of(whole) == (6, 1)
    assert strides_of(whole.t()) == (1, 6)
    assert strides_of(whole[:, ::2]) == (3, 1)
    assert strides_of(whole[:2, :3]) == (3, 1)
    assert strides_of(whole[:1].expand(4, 6)) == (6, 1), "what overlaps is sent whole"
    assert strides_of(torch.ones(())) == ()


@pytest.mark.parametrize("place", [0, 5])
def test_a_run_of_memory_is_laid_out_from_a_place_on(place: int) -> None:
    flat, like = torch.arange(20.0)[3:], torch.empty(3, 4).t()
    found = laid_out(flat, like, place)
    assert found.shape == (4, 3)
    assert torch.equal(found, torch.arange(3.0 + place, 15.0 + place).view(3, 4).t())
    assert found.data_ptr() == flat.data_ptr() + 4 * place, "a view"
    assert torch.equal(laid_out(flat, like), torch.arange(3.0, 15.0).view(3, 4).t())


def test_memory_is_in_a_parameters_order_and_a_view_where_it_is_laid_out_so() -> None:
    tensor = torch.arange(15.0)[3:].view(3, 4)
    assert memory(tensor, tensor).tolist() == list(range(3, 15))
    assert memory(tensor, tensor).data_ptr() == tensor.data_ptr()
    like = torch.empty(4, 3).t()
    other = memory(tensor.double(), like)
    assert other.dtype == torch.float64
    assert other.tolist() == tensor.t().flatten().tolist()
    assert memory(like.copy_(tensor), like).data_ptr() == like.data_ptr()
