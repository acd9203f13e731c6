"""Work on whole matrices that every rank would do alike: each rank does a part of it, and all get the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


class Job(NamedTuple):
    """A result that follows from what every rank has.

    Attributes:
        cost: what it takes, in any unit.
        shape: of the result.
        like: a tensor of the result's type and device.
        run: computes it.
    """

    cost: float
    shape: tuple[int, ...]
    like: Tensor
    run: Callable[[], Tensor]


@dataclass(frozen=True)
class Sharing:
    """This process's place among those that share the work.

    A job runs on one rank, whole, so its bits are those that it would have on any other one.

    Attributes:
        rank: 0 to world - 1.
        world: number of ranks.
        gather: brings a flat tensor [n] of each rank to all of them, as [world, n].
    """

    rank: int = 0
    world: int = 1
    gather: Callable[[Tensor], Tensor] = torch.atleast_2d

    def results(self, jobs: Sequence[Job]) -> Iterator[Tensor]:
        """Yield the result of each job, in order. Every rank gives the same jobs."""
        if self.world == 1 or not jobs:
            for job in jobs:
                # Laid out as a result that was sent, or that a checkpoint brought back: products' bits follow strides.
                yield job.run().contiguous()
            return
        owners = assign_owners([job.cost for job in jobs], self.world)
        lengths = [0] * self.world
        starts = []
        for job, owner in zip(jobs, owners, strict=True):
            starts.append(lengths[owner])
            lengths[owner] += math.prod(job.shape)
        # The widest type of all holds every other one's values exactly.
        dtype = reduce(torch.promote_types, (job.like.dtype for job in jobs))
        flat = torch.zeros(max(lengths), dtype=dtype, device=jobs[0].like.device)
        for job, owner, start in zip(jobs, owners, starts, strict=True):
            if owner == self.rank:
                flat[start : start + math.prod(job.shape)].copy_(job.run().flatten())
        gathered = self.gather(flat)
        for job, owner, start in zip(jobs, owners, starts, strict=True):
            # In memory of its own: products' bits follow where a matrix begins, at 16 bytes (torch 2.13, a CPU).
            yield gathered[owner, start : start + math.prod(job.shape)].view(job.shape).to(job.like.dtype, copy=True)


def assign_owners(costs: Sequence[float], world: int) -> list[int]:
    """Give each job to a rank: the dearest first, to the rank that has least to do; ties to the lowest rank."""
    loads = [0.0] * world
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = min(range(world), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners
