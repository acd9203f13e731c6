"""The tree over all ranks.

Rank r runs microbatches r, r + W, r + 2W, ... The low levels of the tree are then across ranks and the high ones
within a rank. Data moves by all-to-all and all-gather, and additions are local and in tree order, because the order of
additions inside an all-reduce is the backend's to choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.train.layout.tree import Leaf, Tree
from cosmati.train.ranks import Ranks, all_gather

_ALIGNMENT = 16
"""Floats in 64 bytes: gradients start at aligned addresses, whatever comes before them."""


class RankSum:
    """The tree over one step's leaves, over all ranks.

    Args:
        ranks: the data-parallel ranks.
        tensors: the parameters, which hold each leaf in turn.
    """

    def __init__(self, ranks: Ranks, tensors: Sequence[nn.Parameter]) -> None:
        self._ranks = ranks
        self._tensors = tensors
        self._offsets = [0]
        for tensor in tensors:
            self._offsets.append(self._offsets[-1] + -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT)
        size = -(-self._offsets[-1] // (ranks.world * _ALIGNMENT)) * ranks.world * _ALIGNMENT
        self._flat = torch.empty(size, dtype=sum_type(tensors), device=tensors[0].device)
        self._parts = torch.empty_like(self._flat)
        self._shards: Tree[Tensor] = Tree(lambda left, right: left.add_(right))
        self._present = torch.zeros(len(tensors), dtype=torch.uint8, device=tensors[0].device)

    def fold(self, widened: Mapping[int, Tensor]) -> None:
        """Take the leaf of this rank's next microbatch. Every rank calls it equally often."""
        # -0.0 is what leaves every float as it is when added; +0.0 would turn -0.0 into +0.0.
        self._flat.fill_(-0.0)
        for index, tensor in enumerate(self._tensors):
            gradient = widened.get(index, tensor.grad)
            if gradient is not None:
                self._place(self._flat, index).copy_(gradient)
                self._present[index] = 1
            tensor.grad = None
        dist.all_to_all_single(self._parts, self._flat)
        across: Tree[Tensor] = Tree(lambda left, right: left.add_(right))
        for part in self._parts.view(self._ranks.world, -1):
            across.push(part)
        self._shards.push(across.root().clone())

    def root(self) -> Leaf:
        """Return the step's sum; None where a parameter was absent from every leaf."""
        flat = self._flat
        all_gather(flat, self._shards.root())
        dist.all_reduce(self._present, op=dist.ReduceOp.MAX)
        return [self._place(flat, index) if seen else None for index, seen in enumerate(self._present.tolist())]

    def _place(self, flat: Tensor, index: int) -> Tensor:
        """Return the place of a gradient, laid out as its parameter is: norms and products follow strides."""
        tensor, start = self._tensors[index], self._offsets[index]
        own = flat[start : start + tensor.numel()]
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        return own.as_strided(tensor.shape, tensor.stride()) if is_dense else own.view(tensor.shape)


def sum_type(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the type in which gradients are summed: float32, or float64 where every parameter is.

    Raises:
        PlanError: some parameters are float64 and some aren't.
    """
    wide = {tensor.dtype == torch.float64 for tensor in tensors}
    if len(wide) > 1:
        msg = (
            "Some parameters are float64 and others aren't: several ranks sum gradients in one type. Bring the model "
            "to one of them: model.float()."
        )
        raise PlanError(msg)
    return torch.float64 if wide.pop() else torch.float32
