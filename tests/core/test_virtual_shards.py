"""Parts of a sum: the same bits whoever computes which, and the sum and gradient of the whole."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cosmati.core.virtual_shards import VirtualShards, compute_whole, fold, has_hooks
from cosmati.errors import PlanError

U = 8
FLOATS = st.floats(-(2.0**30), 2.0**30, width=32)


class Threads:
    """Ranks as threads, each with what all of them hand over."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.num_exchanges = 0
        self.met = threading.Barrier(degree, timeout=60)
        self.given: list[Tensor] = [torch.empty(0)] * degree

    def run(self, work: Callable[[VirtualShards], Any], *, puts_off: bool = False) -> list[Any]:
        """What each rank's thread returns."""
        with ThreadPoolExecutor(self.degree) as pool:
            peers = [One(self, place, puts_off=puts_off) for place in range(self.degree)]
            return list(pool.map(lambda one: work(VirtualShards(U, one)), peers))


class One:
    """One of them."""

    def __init__(self, threads: Threads, place: int, *, puts_off: bool) -> None:
        self._threads, self.place, self._puts_off = threads, place, puts_off
        self.degree = threads.degree

    def everyone(self, own: Tensor) -> list[Tensor]:
        self._threads.given[self.place] = own.clone()
        if self._threads.met.wait() == 0:
            self._threads.num_exchanges += 1
        found = list(self._threads.given)
        self._threads.met.wait()
        return found

    def puts_off(self, parameter: int, dim: int) -> bool:
        return self._puts_off

    def total(self, own: Tensor) -> Tensor:
        return fold(self.everyone(own))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def product(shards: VirtualShards) -> list[Tensor]:
    """Two cut products of one input and a scale that all parts have; values and gradients."""
    into, up, down, scale = (tensor.requires_grad_() for tensor in (drawn(5, 6), drawn(16, 6), drawn(3, 16), drawn(2)))
    cut = zip(shards.copies(into), shards.weights(up, 0), shards.weights(down, 1), shards.copies(scale), strict=True)
    summed = shards.total([(one @ first.T).tanh() @ second.T * own[1] for one, first, second, own in cut])
    summed.square().sum().backward()
    return [summed.detach(), *(one.grad for one in (into, up, down, scale) if one.grad is not None)]


def test_the_bits_are_the_same_for_every_number_of_ranks() -> None:
    alone = product(VirtualShards(U))
    assert len(alone) == 5
    for degree in (2, 4, 8):
        for found in Threads(degree).run(product):
            assert all(torch.equal(one, two) for one, two in zip(found, alone, strict=True)), degree


def test_sums_and_gradients_are_those_of_the_whole_product() -> None:
    into, up, down, scale = (drawn(*s).double().requires_grad_() for s in ((5, 6), (16, 6), (3, 16), (2,)))
    whole = (into @ up.T).tanh() @ down.T * scale[1]
    whole.square().sum().backward()
    expected = [whole, into.grad, up.grad, down.grad, scale.grad]
    for found, wanted in zip(product(VirtualShards(U)), expected, strict=True):
        assert wanted is not None
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_of_parameters_may_be_put_together_later() -> None:
    alone, threads = product(VirtualShards(U)), Threads(2)
    found = threads.run(product, puts_off=True)
    assert threads.num_exchanges == 3  # forward, and backward of what all parts have
    for index, dim in ((2, 0), (3, 1)):
        parts = [one[index].chunk(2, dim) for one in found]
        assert torch.equal(torch.cat([parts[0][0], parts[1][1]], dim), alone[index])
        assert not parts[0][1].any()
        assert not parts[1][0].any()
    assert torch.equal(found[0][1], alone[1])


def test_slices_of_what_is_no_parameter_are_never_put_off() -> None:
    def sliced(shards: VirtualShards) -> Tensor:
        whole = drawn(2, 16).requires_grad_()
        shards.total([one.exp() for one in shards.slices(whole, -1)]).sum().backward()
        assert whole.grad is not None
        return whole.grad

    for found in Threads(4).run(sliced, puts_off=True):
        assert torch.equal(found, drawn(2, 16).exp())


@given(st.integers(0, 4).flatmap(lambda k: st.lists(FLOATS, min_size=2**k, max_size=2**k)))
def test_the_tree_pairs_neighbours(drawn: list[float]) -> None:
    values = list(map(np.float32, drawn))

    def pairwise(some: list[np.float32]) -> np.float32:
        half = len(some) // 2
        return some[0] if not half else pairwise(some[:half]) + pairwise(some[half:])

    found = fold([torch.tensor(value) for value in values])
    assert found.numpy().tobytes() == pairwise(values).tobytes()


def test_a_sum_from_left_to_right_has_other_bits() -> None:
    """The control: the order shows in these values."""
    parts = list(drawn(8, 100))
    assert not torch.equal(fold(parts), sum(parts[1:], start=parts[0]))


def test_narrow_parts_are_summed_in_float32() -> None:
    parts = [torch.tensor(value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    assert float(VirtualShards(4).total(parts)) == 260.0  # 256 + 1 is 256 in bfloat16, and 259 is 260
    assert VirtualShards(4).total(parts).dtype == torch.bfloat16


def test_a_gradient_of_a_gradient_is_refused() -> None:
    """It would lack what other ranks compute."""
    into = drawn(3, 4).requires_grad_()
    shards = VirtualShards(2)
    for made in (shards.total(shards.copies(into)), shards.total(shards.weights(into, 1))):
        (first,) = torch.autograd.grad(made.square().sum(), into, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shards: VirtualShards | None = VirtualShards(2)

    def compute_in_parts(self, shards: VirtualShards | None) -> dict[str, int]:
        self.shards = shards
        return {}


def test_copies_of_a_model_meet_the_same_ranks_until_they_are_put_back() -> None:
    model = nn.Sequential(Cut(), nn.ReLU())
    copied = copy.deepcopy(model)
    assert copied[0].shards is model[0].shards
    compute_whole(copied)
    assert copied[0].shards is None
    assert model[0].shards is not None


@pytest.mark.parametrize(
    "hook",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_are_seen(hook: str) -> None:
    module = nn.Linear(2, 2)
    assert not has_hooks(module)
    getattr(module, hook)(lambda *_: None)
    assert has_hooks(module)


@pytest.mark.parametrize(("shape", "dim"), [((18, 8), 0), ((6, 8), 0), ((8, 12), -1), ((8, 8), 2), ((8, 8), -3)])
def test_parts_of_unlike_shapes_are_refused(shape: tuple[int, ...], dim: int) -> None:
    """PyTorch would cut 18 rows into 3, 3, ... and none, and ranks would send unlike lengths."""
    shards = VirtualShards(U)
    for cut in (shards.weights, shards.slices):
        with pytest.raises(PlanError, match=rf"shape \({shape[0]}, {shape[1]}\) can't be cut along dimension {dim} "):
            cut(torch.zeros(shape), dim)
    assert len(shards.weights(torch.zeros(16, 8), -2)) == U


def test_each_part_is_summed_by_itself() -> None:
    """What a process has summed by itself would be another tree on another number of ranks."""
    parts = [torch.ones(2)] * U
    assert torch.equal(VirtualShards(U).total(parts), torch.full((2,), float(U)))
    for wrong in (parts[:1], parts[: U // 2], parts * 2):
        with pytest.raises(PlanError, match=f"computes 8 of virtual_shards=8 parts, and {len(wrong)} are to be summed"):
            VirtualShards(U).total(wrong)
