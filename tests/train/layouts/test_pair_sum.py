"""The tree on one rank, leaf by leaf, against sums that are put together by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from cosmati.train.layout.pair_sum import PairSum

Leaf = list[Tensor | None]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in ((3, 2), (4,), (), (5,))]


def leaves(num: int) -> list[Leaf]:
    """Gradients whose sum shows in which order they were added; some are absent, those of the last parameter always."""
    generator = torch.Generator().manual_seed(num)
    found: list[Leaf] = []
    for n in range(num):
        drawn = [torch.randn(p.shape, generator=generator) * 10.0 ** (n % 5) for p in parameters()]
        found.append([None if i == 3 or (n + i) % 3 == 0 else gradient for i, gradient in enumerate(drawn)])
    return found


def by_pairs(values: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of 2^k values: of neighbours first, and so on."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [b if a is None else a if b is None else a + b for a, b in pairs]
    return values[0]


def backward(tensors: list[nn.Parameter], leaf: Leaf) -> None:
    """As autograd does it: into what lies there, in place."""
    for tensor, gradient in zip(tensors, leaf, strict=True):
        if gradient is not None:
            tensor.grad = gradient.clone() if tensor.grad is None else tensor.grad.add_(gradient)


def same(found: Leaf, expected: Leaf) -> bool:
    pairs = zip(found, expected, strict=True)
    return all((a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("num", [1, 2, 4, 8, 16])
def test_a_sum_is_that_of_the_tree(num: int) -> None:
    tensors, given = parameters(), leaves(num)
    total = PairSum(tensors)
    for leaf in given:
        total.lend()
        backward(tensors, leaf)
        total.fold({})
        assert all(tensor.grad is None for tensor in tensors)
    assert same(total.root(), [by_pairs([leaf[i] for leaf in given]) for i in range(4)])


@pytest.mark.parametrize("first", [0, 1])
def test_gradients_that_are_views_of_one_tensor_are_added_to_by_themselves(first: int) -> None:
    """Autograd may hand the same memory to two parameters: what the second leaf adds to one isn't the other's."""
    tensors = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    shared, more = torch.arange(4.0), torch.full((4,), 10.0)
    total = PairSum(tensors)
    total.lend()
    if first:  # An absent one, and both views with the second leaf.
        total.fold({})
        total.lend()
    for tensor in tensors:
        tensor.grad = shared.view(4)
    total.fold({})
    if not first:
        total.lend()
        backward(tensors, [more, more])
        total.fold({})
    for found in total.root():
        assert found is not None
        assert torch.equal(found, shared + (0 if first else more))


@pytest.mark.parametrize("num", [2, 4, 8])
def test_what_was_brought_to_float32_takes_the_place_of_what_lies_there(num: int) -> None:
    tensors, given = parameters(), leaves(num)
    total = PairSum(tensors)
    for leaf in given:
        total.lend()
        backward(tensors, [None if i == 1 else gradient for i, gradient in enumerate(leaf)])
        if tensors[1].grad is None:
            tensors[1].grad = torch.full((4,), math.nan)
        total.fold({1: leaf[1].clone()} if leaf[1] is not None else {})
    assert same(total.root(), [by_pairs([leaf[i] for leaf in given]) for i in range(4)])


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_the_last_leaf_is_taken_gradient_by_gradient(num: int) -> None:
    """As soon as each is there, while others are still to come."""
    tensors, given = parameters(), leaves(num)
    total = PairSum(tensors)
    for leaf in given[:-1]:
        total.lend()
        backward(tensors, leaf)
        total.fold({})
    total.lend()
    found = []
    for i, tensor in enumerate(tensors):
        backward([tensor], [given[-1][i]])
        found.append(total.last(i, {}))
        assert tensor.grad is None
    assert same(found, [by_pairs([leaf[i] for leaf in given]) for i in range(4)])
