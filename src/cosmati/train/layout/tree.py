"""One fixed binary tree over a step's leaves.

The tree has one leaf for each of the V microbatches; its shape doesn't depend on the number of ranks, so neither do
the bits of its root. A parameter that may not learn from a microbatch is *absent* from that leaf: no zero is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Leaf = list[Tensor | None]
"""One gradient for each parameter, None where absent."""

Node = TypeVar("Node")
_DOUBLE = (torch.float64, torch.complex128)


def add_leaves(left: Leaf, right: Leaf) -> Leaf:
    """Add two nodes, in place of the left one; what is absent in one is taken from the other."""
    both = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a is not None and b is not None]
    if both:
        torch._foreach_add_(present(left, both), present(right, both))
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def leaf_norm(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient as it arrives: a scalar."""
    # An expanded gradient has the norm of what autograd makes of it in memory.
    norm: Tensor = torch.linalg.vector_norm(gradient.contiguous() if 0 in gradient.stride() else gradient)
    return norm


def present(leaf: Leaf, indices: Iterable[int]) -> list[Tensor]:
    """Return the gradients at some indices, without the absent ones."""
    return [gradient for i in indices if (gradient := leaf[i]) is not None]


def divide(root: Leaf, members: Sequence[Sequence[int]], denominators: Tensor) -> None:
    """Divide in place. A region whose teachers have no weight (no labels, say) has no gradient: it rests.

    Of double precision is what gradients of double precision are divided by: rounded, it's 2e-8 off.

    Args:
        root: the sum of all leaves.
        members: indices of each region's parameters.
        denominators: float64 [regions].
    """
    divisors = denominators.float()
    for own, value, region in zip(members, divisors.tolist(), range(len(members)), strict=True):
        if value == 0.0:
            for index in own:
                root[index] = None
            continue
        gradients = present(root, own)
        doubles = [gradient for gradient in gradients if gradient.dtype in _DOUBLE]
        others = [gradient for gradient in gradients if gradient.dtype not in _DOUBLE] if doubles else gradients
        if doubles:
            torch._foreach_div_(doubles, denominators[region])
        if others and value != 1.0:
            torch._foreach_div_(others, divisors[region])


class Tree(Generic[Node]):
    """Fold leaves, given in order, with at most log2(V) + 1 of them in memory.

    Leaf i is paired as the bits of i say: (0, 1), (2, 3), then ((0, 1), (2, 3)), and so on.

    Args:
        add: sum of a left and a right node; may use the left one's memory.
    """

    def __init__(self, add: Callable[[Node, Node], Node]) -> None:
        self._add = add
        self._levels: list[Node | None] = []

    def push(self, node: Node) -> None:
        """Take the next leaf."""
        for level, left in enumerate(self._levels):
            if left is None:
                self._levels[level] = node
                return
            node = self._add(left, node)
            self._levels[level] = None
        self._levels.append(node)

    def waiting(self) -> list[Node]:
        """Return the nodes that wait for their right neighbours, from the lowest level to the highest."""
        return [node for node in self._levels if node is not None]

    def root(self) -> Node:
        """Return the sum of 2^k leaves."""
        *below, root = self._levels
        assert root is not None, "a tree has at least one leaf"
        assert all(node is None for node in below), "the number of leaves is a power of two"
        return root
