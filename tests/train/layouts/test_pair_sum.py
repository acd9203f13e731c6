"""The tree on one rank, leaf by leaf, against sums that are put together by hand."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from cosmati.train.layout.pair_sum import PairSum, clear, unshare

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


def test_what_somebody_has_left_behind_is_not_the_first_leaf() -> None:
    """A loss may run a backward of its own between two slots."""
    tensors = parameters()
    total = PairSum(tensors)
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    total.lend()
    assert all(tensor.grad is None for tensor in tensors)
    backward(tensors, leaves(1)[0])
    total.fold({})
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    total.lend()
    assert same([tensor.grad for tensor in tensors], leaves(1)[0]), "the first leaf, where the second one is added"


@pytest.mark.parametrize("num", [1, 2, 4, 8])
@pytest.mark.parametrize("absent", [(), (0,), (1,), (0, 1), (2,), (3, 5, 7), tuple(range(8))])
def test_the_last_leaf_may_be_brought_to_float32(num: int, absent: Sequence[int]) -> None:
    tensors = [nn.Parameter(torch.zeros(4))]
    generator = torch.Generator().manual_seed(num)
    drawn = [torch.randn(4, generator=generator) * 10.0**n for n in range(num)]
    given = [None if n in absent else one for n, one in enumerate(drawn)]
    total = PairSum(tensors)
    for n, one in enumerate(given):
        total.lend()
        if one is not None:
            tensors[0].grad = torch.full((4,), math.nan)
        widened = {} if one is None else {0: one.clone()}
        if n < num - 1:
            total.fold(widened)
    # What lies there is of another type, and isn't part of the sum.
    assert same([total.last(0, widened)], [by_pairs(given)])
    assert tensors[0].grad is None


def test_memory_of_a_gradient_that_was_summed_is_given_back_at_once() -> None:
    """While gradients of other parameters are still to come."""
    tensors = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    total = PairSum(tensors)
    total.lend()
    backward(tensors, [torch.ones(4), torch.ones(4)])
    total.fold({})
    total.lend()
    backward(tensors, [torch.ones(4), None])
    found = total.last(0, {})
    assert found is not None
    assert found.tolist() == [2.0] * 4
    alive = weakref.ref(found)
    del found
    assert alive() is None


def test_gradients_with_memory_of_their_own_are_left_as_they_are() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    leaf: Leaf = [one, None, other]
    unshare(leaf, range(3))
    assert leaf[0] is one
    assert leaf[2] is other
    both: Leaf = [one, one.view(2), None, other]
    unshare(both, [0, 2, 3])
    assert both[0] is one, "only among those that are asked for"
    unshare(both, [0, 1, 2])
    assert both[2] is None
    assert both[3] is other
    assert {found.untyped_storage().data_ptr() for found in both[:2] if found is not None}.isdisjoint(
        {one.untyped_storage().data_ptr()}
    )
    assert all(found is not None and torch.equal(found, one) for found in both[:2])


def test_clearing_leaves_no_gradient_behind() -> None:
    tensors = parameters()
    for tensor in tensors[1:]:
        tensor.grad = torch.ones_like(tensor)
    assert clear(tensors) is None
    assert all(tensor.grad is None for tensor in tensors)
