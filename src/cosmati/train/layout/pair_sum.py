"""The tree on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from cosmati.train.layout.tree import Leaf, Tree, add_leaves, present


class PairSum:
    """The tree on one rank: the first leaf of a pair waits aside, and autograd adds the second one to it.

    So it takes log2(V) - 1 copies of the gradients beside the one that plain accumulation has. The first leaf doesn't
    wait in `.grad`, where a loss may call `zero_grad` or a backward of its own.
    """

    def __init__(self, tensors: Sequence[nn.Parameter]) -> None:
        self._tensors = tensors
        self._tree: Tree[Leaf] = Tree(add_leaves)
        self._left: Leaf | None = None
        self._widened: dict[int, Tensor] = {}

    def lend(self) -> None:
        """Put the first leaf where autograd adds to it."""
        if self._left is None:
            clear(self._tensors)
            return
        for tensor, gradient in zip(self._tensors, self._left, strict=True):
            tensor.grad = gradient

    def fold(self, widened: Mapping[int, Tensor]) -> None:
        """Take a leaf."""
        leaf: Leaf = [tensor.grad for tensor in self._tensors]
        clear(self._tensors)
        if self._left is None:
            unshare(leaf, range(len(leaf)))
            self._left, self._widened = leaf, dict(widened)
            return
        unshare(leaf, [i for i, left in enumerate(self._left) if left is None])
        self._left = leaf
        for index, gradient in widened.items():
            left = self._widened.get(index)
            self._widened[index] = gradient if left is None else left.add_(gradient)
        self._push()

    def last(self, index: int, widened: Mapping[int, Tensor]) -> Tensor | None:
        """Take the last leaf's gradient of one parameter as it stands there; return the sum of all leaves.

        So a sum is whole as soon as its gradient is, while others are still to come. Once for each parameter, in place
        of the last `fold` and of `root`.

        Args:
            index: of the parameter.
            widened: as `fold` takes it.
        """
        total, self._tensors[index].grad = self._tensors[index].grad, None
        if self._left is not None:
            self._left[index] = None
        if index in widened or index in self._widened:
            left, total = self._widened.get(index), widened.get(index)
            total = left if total is None else total if left is None else left.add_(total)
        for level in self._tree.waiting():
            left, level[index] = level[index], None
            total = left if total is None else total if left is None else left.add_(total)
        return total

    def root(self) -> Leaf:
        """Return the sum; None where a parameter was absent from every leaf."""
        if self._left is not None:
            self._push()
        return self._tree.root()

    def _push(self) -> None:
        assert self._left is not None, "a leaf was folded"
        for index, gradient in self._widened.items():
            self._left[index] = gradient
        self._tree.push(self._left)
        self._left = None


def unshare(leaf: Leaf, indices: Sequence[int]) -> None:
    """Give gradients memory of their own: autograd may leave views of one tensor, and sums are taken in place."""
    addresses = [gradient.untyped_storage().data_ptr() for gradient in present(leaf, indices)]
    if len(set(addresses)) == len(addresses):
        return
    for index in indices:
        gradient = leaf[index]
        leaf[index] = None if gradient is None else gradient.clone()


def clear(tensors: Sequence[nn.Parameter]) -> None:
    """Leave no gradient behind."""
    for tensor in tensors:
        tensor.grad = None
