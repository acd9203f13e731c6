"""Which part of which parameter each rank's optimizer holds, and how gradients travel to it.

A piece is a run of a parameter's memory. Most parameters are a piece each, with one owner: their norms are then taken
where they lie, and a norm's bits don't allow for less. Only what is large beside a rank's share, and stepped element by
element, is cut over all ranks, at multiples of 64 bytes: PyTorch's fused optimizers change bits at other cuts, its
foreach ones at none (129 cuts tried).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
_LARGE = 0.25
"""Of a rank's share: what is larger is cut, where it may be."""


class Piece(NamedTuple):
    """A part of a parameter.

    Attributes:
        parameter: its index.
        start: first element, in the order of the parameter's memory.
        stop: one after the last.
        owner: the rank whose optimizer holds it.
    """

    parameter: int
    start: int
    stop: int
    owner: int


class GradientPart(NamedTuple):
    """A run of a gradient, and its place among what is exchanged together.

    Attributes:
        parameter: its index.
        start: first element, in the order of the parameter's memory.
        stop: one after the last.
        place: where it starts.
    """

    parameter: int
    start: int
    stop: int
    place: int


class Bucket(NamedTuple):
    """Gradients that are exchanged together.

    Attributes:
        parameters: indices of those that it has any part of.
        parts: by their places.
        lengths: how many elements go to each rank, one rank after the other.
    """

    parameters: frozenset[int]
    parts: tuple[GradientPart, ...]
    lengths: tuple[int, ...]

    def of(self, rank: int) -> Iterable[GradientPart]:
        """Yield the parts that go to a rank, placed in what it gets."""
        start = sum(self.lengths[:rank])
        for part in self.parts:
            if start <= part.place < start + self.lengths[rank]:
                yield part._replace(place=part.place - start)


def alignment_of(tensors: Sequence[Tensor]) -> int:
    """Return how many elements fill 64 bytes, of the narrowest of some tensors."""
    return ALIGNMENT_BYTES // min(tensor.element_size() for tensor in tensors)


def cut(
    sizes: Sequence[int], divisible: Collection[int], units: Sequence[Sequence[int]], world: int, alignment: int
) -> tuple[Piece, ...]:
    """Give parameters to ranks, each about as many elements; the same on every rank.

    Args:
        sizes: elements of each parameter.
        divisible: indices of those that may be cut.
        units: indices of those that stay with one rank together; others are by themselves.
        world: ranks.
        alignment: elements of which cuts are multiples.

    Returns:
        Pieces in the parameters' order, and by their starts.
    """
    large = _LARGE * sum(sizes) / world
    split = {index for index in divisible if world > 1 and sizes[index] > max(large, alignment)}
    together = [unit for unit in ([i for i in unit if i not in split] for unit in units) if unit]
    named = {index for unit in together for index in unit}
    together += [[index] for index in range(len(sizes)) if index not in named | split]
    pieces, loads = [], [0] * world
    for index in sorted(split):
        length = -(-sizes[index] // (world * alignment)) * alignment
        for owner in range(world):
            start, stop = (min((owner + i) * length, sizes[index]) for i in (0, 1))
            loads[owner] += stop - start
            if stop > start:
                pieces.append(Piece(index, start, stop, owner))
    weigh = [(sum(sizes[index] for index in unit), unit) for unit in together]
    for weight, unit in sorted(weigh, key=lambda one: (-one[0], one[1])):
        owner = min(range(world), key=loads.__getitem__)
        loads[owner] += weight
        pieces += [Piece(index, 0, sizes[index], owner) for index in unit]
    return tuple(sorted(pieces))


def evenly(indices: Sequence[int], sizes: Sequence[int], world: int, alignment: int) -> Bucket:
    """Return a bucket of whole gradients, one after the other, of which each rank gets as many elements."""
    parts, place = [], 0
    for index in indices:
        parts.append(GradientPart(index, 0, sizes[index], place))
        place += _aligned(sizes[index], alignment)
    return Bucket(frozenset(indices), tuple(parts), (_aligned(-(-place // world), alignment),) * world)


def by_owner(indices: Sequence[int], pieces: Sequence[Piece], world: int, alignment: int) -> Bucket:
    """Return a bucket of which each rank gets its pieces."""
    parts, lengths, place = list[GradientPart](), list[int](), 0
    for owner in range(world):
        start = place
        for piece in pieces:
            if piece.owner == owner and piece.parameter in indices:
                parts.append(GradientPart(piece.parameter, piece.start, piece.stop, place))
                place += _aligned(piece.stop - piece.start, alignment)
        lengths.append(place - start)
    return Bucket(frozenset(indices), tuple(parts), tuple(lengths))


def in_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return indices in groups of about as many elements, from the last to the first, as backward reaches them."""
    groups: list[list[int]] = [[]]
    held = 0
    for index in reversed(range(len(sizes))):
        if groups[-1] and held + sizes[index] > limit:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += sizes[index]
    return groups


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides in which a parameter, its gradient and state are sent: its own, unless it has gaps."""
    # Most are contiguous, which is known at once; the other question goes through PyTorch's dispatcher.
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def laid_out(flat: Tensor, like: Tensor, place: int = 0) -> Tensor:
    """Return as many elements of a run of memory as a parameter has, from a place on, in its shape and strides."""
    return flat.as_strided(like.shape, strides_of(like), flat.storage_offset() + place)


def memory(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor's elements in the order of a parameter's memory: flat, and a view where it's laid out so."""
    strides = strides_of(like)
    if tensor.stride() != strides:
        tensor = torch.empty_strided(like.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _aligned(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment
