"""Work shared over ranks: everyone gets every result, in order, with the bits that one rank alone would have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cosmati.optim.muon import OrthogonalizedMomentum
from cosmati.optim.sharing import Job, Sharing, assign_owners
from cosmati.optim.soap import EigenbasisAdam

pytestmark = pytest.mark.long

# Costs are operations; a half of the smallest float there is would be nothing.
COSTS = st.just(0.0) | st.floats(1e-3, 1e6)


@given(costs=st.lists(COSTS, max_size=30), world=st.integers(1, 9))
def test_owners_are_balanced_and_the_same_everywhere(costs: list[float], world: int) -> None:
    owners = assign_owners(costs, world)
    assert owners == assign_owners(list(costs), world)
    assert all(0 <= owner < world for owner in owners)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(world)]
    # Graham's bound for any list: whoever has most took its last job when nobody had less.
    dearest = max(costs, default=0.0)
    assert max(loads) <= (sum(costs) / world + dearest * (1 - 1 / world)) * (1 + 1e-9)
    # The dearest come first: each has a rank of its own while there are ranks without a job.
    order = sorted(range(len(costs)), key=lambda i: -costs[i])[:world]
    assert len({owners[i] for i in order if costs[i]}) == len([i for i in order if costs[i]])


class Together:
    """Ranks as threads that meet at every gather."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._barrier = threading.Barrier(world, timeout=280)
        self._sent: list[Tensor] = [torch.empty(0)] * world

    def run(self, function: Callable[[Sharing], list[Tensor]]) -> list[list[Tensor]]:
        """Return what the function gives on each rank."""
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(lambda rank: function(self._sharing(rank)), range(self.world)))

    def _sharing(self, rank: int) -> Sharing:
        def gather(flat: Tensor) -> Tensor:
            self._sent[rank] = flat
            self._barrier.wait()
            rows = torch.stack(self._sent)
            self._barrier.wait()
            return rows

        return Sharing(rank, self.world, gather)


@settings(deadline=None)
@given(world=st.integers(1, 5), sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=8))
def test_everyone_gets_every_result_and_each_runs_once(world: int, sizes: list[tuple[int, int]]) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    expected = [torch.full(size, i + 1 / 3, dtype=dtypes[i % 3]) for i, size in enumerate(sizes)]
    runs: list[int] = []

    def job(i: int) -> Job:
        def run() -> Tensor:
            runs.append(i)
            return expected[i]

        return Job(float(expected[i].numel()), tuple(expected[i].shape), expected[i], run)

    for found in Together(world).run(lambda sharing: list(sharing.results([job(i) for i in range(len(sizes))]))):
        assert [value.dtype for value in found] == [value.dtype for value in expected]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert sorted(runs) == list(range(len(sizes)))


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: OrthogonalizedMomentum(p, lr=0.1, weight_decay=0.1),
        lambda p: EigenbasisAdam(p, lr=0.1, precondition_frequency=2),
    ],
)
def test_shared_steps_have_the_bits_of_one_rank(kind: Any) -> None:
    # What is sent of the last two begins at an odd place, where a row's product with it would have other bits.
    shapes = [(4, 6), (8, 3), (5, 5), (4, 6), (2, 3, 3), (1, 5, 7), (1, 4, 9)]

    def trained(sharing: Sharing) -> list[Tensor]:
        torch.set_num_threads(1)  # A thread begins with a count of its own, and bits follow it.
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = kind(parameters)
        optimizer.sharing = sharing
        for step in range(5):
            for index, parameter in enumerate(parameters):
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if (step + index) % 4 == 3 else gradient
            optimizer.step()
        return [p.detach() for p in parameters]

    alone = trained(Sharing())
    for world in (2, 3):
        for found in Together(world).run(trained):
            assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
