"""What a checkpoint holds of a sharded run is whole: what ranks keep of it is gathered, one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.train.layout.shard_cut import RowCut
from cosmati.train.layout.span import HeldSpan, parameter_in
from cosmati.train.ranks import Ranks


class ShardState:
    """State of optimizers and methods: of what is cut by rows it's cut alike, and of whole matrices their owner's.

    Args:
        cut: of the parameters.
        ranks: those that hold one copy together.
        staged: names of the parameters on which optimizers work whole; more may come.
    """

    def __init__(self, cut: RowCut, ranks: Ranks, staged: Collection[str]) -> None:
        self._cut, self._ranks, self._staged = cut, ranks, staged

    def gathered(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return whole tensors. Every rank has to ask.

        Args:
            tensors: by names of which one part, between slashes, is a parameter's.
            of_optimizers: of whole matrices, only their owner has any.
        """
        whole: dict[str, Tensor] = {}
        for key, value in tensors.items():
            name = self._name_in(key, of_optimizers=of_optimizers)
            if not (of_optimizers and name in self._staged):
                is_cut = name is not None and value.ndim and tuple(value.shape) == self._piece_shape(name)
                whole[key] = self._cut.whole(name, value) if name is not None and is_cut else value
        return whole | self._handed_round(tensors) if of_optimizers and self._staged else whole

    def own(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, Tensor]:
        """Return what this rank keeps of whole tensors (see `gathered`)."""
        kept: dict[str, Tensor] = {}
        for key, value in tensors.items():
            name = self._name_in(key, of_optimizers=of_optimizers)
            if name is not None and of_optimizers and name in self._staged:
                if self._cut.owner_of[name] == self._ranks.rank:
                    kept[key] = value
            elif name is not None and tuple(value.shape) == self._cut.rows[name].shape:
                kept[key] = self._cut.piece(name, value)
            else:
                kept[key] = value
        return kept

    def held(self, tensors: Mapping[str, Tensor], *, of_optimizers: bool) -> dict[str, HeldSpan]:
        """Return this rank's parts (see `gathered`); of what isn't cut, the first rank has it, or a matrix's owner."""
        found: dict[str, HeldSpan] = {}
        for key, value in tensors.items():
            name = self._name_in(key, of_optimizers=of_optimizers)
            is_staged = of_optimizers and name in self._staged
            if name is not None and not is_staged and value.ndim and tuple(value.shape) == self._piece_shape(name):
                rows = self._cut.rows[name]
                found[key] = HeldSpan(value, rows.shape, rows.of(self._ranks.rank).start * rows.row_size)
            elif self._ranks.rank == (self._cut.owner_of[name] if is_staged and name is not None else 0):
                found[key] = HeldSpan.of(value)
        return found

    def _name_in(self, key: str, *, of_optimizers: bool) -> str | None:
        """Return the parameter that a key is of."""
        if of_optimizers:
            name = key.rpartition("/")[0]
            return name if name in self._cut.rows else None
        return parameter_in(key, self._cut.rows)

    def _piece_shape(self, name: str) -> tuple[int, ...]:
        return self._cut.rows[name].piece_shape(self._ranks.rank)

    def _handed_round(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of whole matrices, which each owner shows to all."""
        own = {key: value for key, value in tensors.items() if self._name_in(key, of_optimizers=True) in self._staged}
        listed: list[Any] = [None] * self._ranks.world
        dist.all_gather_object(
            listed,
            [(key, tuple(value.shape), value.dtype, value.device) for key, value in own.items()],
            group=self._ranks.group,
        )
        found: dict[str, Tensor] = {}
        for rank, told in enumerate(listed):
            for key, shape, dtype, device in told:
                is_mine = rank == self._ranks.rank
                found[key] = (
                    own[key].detach().contiguous() if is_mine else torch.empty(shape, dtype=dtype, device=device)
                )
                dist.broadcast(found[key], group=self._ranks.group, group_src=rank)
        return found
