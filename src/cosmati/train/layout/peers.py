"""The ranks of one replica, which share the parts of a microbatch (see `cosmati.core.virtual_shards`).

Data move by all-to-all and all-gather, and additions are local and in the tree's order: inside an all-reduce it would
be the backend's to choose. What is sent for a sum is what a ring sends: 2 (T - 1) / T of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from cosmati.core.virtual_shards import fold
from cosmati.train.ranks import Ranks, all_gather


class ReplicaPeers:
    """The ranks of this one's replica.

    Args:
        ranks: of the run, with replicas of several ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = ranks.within
        self._put_off: Mapping[int, int] = {}
        self.degree = ranks.degree
        self.place = ranks.rank % ranks.degree

    @contextmanager
    def putting_off(self, cut: Mapping[int, int]) -> Iterator[None]:
        """Stand around passes after which gradients of parameters are put together.

        Args:
            cut: by the `id` of each of these parameters, the dimension along which it's cut.
        """
        self._put_off = cut
        try:
            yield
        finally:
            self._put_off = {}

    def puts_off(self, parameter: int, dim: int) -> bool:
        """Say whether a gradient is put together later."""
        return self._put_off.get(parameter) == dim

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
