"""The ranks of one replica, which share the parts of a microbatch (see `cosmati.core.virtual_shards`).

Data move by all-to-all and all-gather, and additions are local and in the tree's order: inside an all-reduce it would
be the backend's to choose. What is sent for a sum is what a ring sends: 2 (T - 1) / T of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from cosmati.core.virtual_shards import fold
from cosmati.train.ranks import Ranks, all_gather


class ReplicaPeers:
    """The ranks of this one's replica.

    Args:
        ranks: of the run, with replicas of several ranks.

    Attributes:
        puts_off: the layout puts gradients of parameters together, once a step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = ranks.within
        self.puts_off = False
        self.degree = ranks.degree
        self.place = ranks.rank % ranks.degree

    @contextmanager
    def putting_off(self, *, is_on: bool) -> Iterator[None]:
        """Stand around passes after which gradients of parameters are put together."""
        self.puts_off = is_on
        try:
            yield
        finally:
            self.puts_off = False

    def total(self, own: Tensor) -> Tensor:
        """Return the sum of what all of them have, in the tree over their places."""
        size = -(-own.numel() // self.degree)
        flat = own.new_empty(size * self.degree)
        flat[: own.numel()] = own.flatten()
        received = flat.new_empty(self.degree, size)
        dist.all_to_all_single(received, flat, group=self._group)
        all_gather(flat, fold(list(received)).clone(), group=self._group)
        return flat[: own.numel()].view(own.shape)

    def everyone(self, own: Tensor) -> list[Tensor]:
        """Return what each of them has, in the order of places."""
        gathered = own.new_empty(self.degree, own.numel())
        all_gather(gathered.view(-1), own.flatten(), group=self._group)
        return [one.view(own.shape) for one in gathered]
