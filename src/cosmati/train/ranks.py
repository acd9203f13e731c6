"""Data-parallel ranks: who runs which microbatch, and sums that don't depend on how many ranks there are.

Rank r runs microbatches r, r + W, r + 2W, ... The low levels of the tree are then across ranks and the high ones
within a rank. Data moves by all-to-all and all-gather, and additions are local and in tree order, because the order of
additions inside an all-reduce is the backend's to choose.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.sharing import Sharing
from cosmati.train.tree import Leaf, Tree, add_leaves

if dist.is_available():
    # Its functions have the default group of the moment as a default argument. Imported after the group was made (which
    # torch._dynamo does), they hold it for good: its threads then live on when it's destroyed, and one that lets go of
    # a collective's tensors while the interpreter ends brings the process down (terminate, SIGABRT).
    import torch.distributed.nn.functional

_ALIGNMENT = 16
"""Floats in 64 bytes: gradients start at aligned addresses, whatever comes before them."""


class Ranks:
    """This process's place among the ranks; one rank where there is no process group and torchrun didn't start it."""

    def __init__(self) -> None:
        if dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
            # Whoever starts a script with torchrun wants its ranks to work together, and the script needn't say so.
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(_leave_group)
        self.is_parallel = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.world = dist.get_world_size() if self.is_parallel else 1
        self.rank = dist.get_rank() if self.is_parallel else 0

    def mine(self, num_microbatches: int) -> range:
        """Return the microbatches that this rank runs.

        Raises:
            PlanError: the number of ranks doesn't divide V.
        """
        if num_microbatches % self.world:
            msg = (
                f"{self.world} ranks can't share V = {num_microbatches} microbatches. Start a number "
                "of ranks that divides "
                f"V, or set RunConfig(num_microbatches=...) to a power of two that {self.world} divides."
            )
            raise PlanError(msg)
        return range(self.rank, num_microbatches, self.world)

    def gather(self, rows: Tensor) -> Tensor:
        """Bring what each rank has of its microbatches into microbatch order.

        Args:
            rows: [V / W, ...], one for each of this rank's microbatches.

        Returns:
            [V, ...], the same on every rank.
        """
        if not self.is_parallel:
            return rows
        gathered = rows.new_empty((self.world * rows.shape[0], *rows.shape[1:]))
        _all_gather(gathered, rows.contiguous())
        return gathered.view(self.world, *rows.shape).transpose(0, 1).reshape(gathered.shape)

    @property
    def sharing(self) -> Sharing:
        """How optimizers share work on whole matrices over the ranks."""
        return Sharing(self.rank, self.world, lambda flat: self.gather(flat[None]))

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.is_parallel:
            dist.barrier()

    def agree(self, flag: bool) -> bool:
        """Return whether any rank raised a flag."""
        if not self.is_parallel:
            return flag
        value = torch.tensor([float(flag)], device=_device())
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())


def _leave_group() -> None:
    """Destroy the process group, unless the script has."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _all_gather(gathered: Tensor, own: Tensor) -> None:
    """Gather equal tensors of all ranks into one; PyTorch 2.13 has it under another name, and warns of the old one."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(gathered, own)


def _device() -> torch.device:
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")


class GradientSum:
    """The tree over one step's leaves, over all ranks.

    Args:
        ranks: the data-parallel ranks.
        parameters: shapes of the leaves' gradients.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor]) -> None:
        self._ranks = ranks
        self._parameters = parameters
        if ranks.is_parallel:
            self._offsets = _offsets(parameters)
            self._shards: Tree[Tensor] = Tree(lambda left, right: left.add_(right))
            self._present = torch.zeros(len(parameters), dtype=torch.uint8, device=parameters[0].device)
        else:
            self._leaves: Tree[Leaf] = Tree(add_leaves)

    def push(self, leaf: Leaf) -> None:
        """Take the leaf of this rank's next microbatch. Every rank calls it equally often."""
        if not self._ranks.is_parallel:
            self._leaves.push(leaf)
            return
        world = self._ranks.world
        size = -(-self._offsets[-1] // (world * _ALIGNMENT)) * world * _ALIGNMENT
        # -0.0 is what leaves every float as it is when added; +0.0 would turn -0.0 into +0.0.
        flat = torch.full((size,), -0.0, dtype=torch.float32, device=self._present.device)
        for index, gradient in enumerate(leaf):
            if gradient is not None:
                start = self._offsets[index]
                flat[start : start + gradient.numel()].view(gradient.shape).copy_(gradient)
                self._present[index] = 1
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat)
        across: Tree[Tensor] = Tree(lambda left, right: left.add_(right))
        for part in parts.view(world, -1):
            across.push(part)
        self._shards.push(across.root().clone())

    def root(self) -> Leaf:
        """Return the step's sum; None where a parameter was absent from every leaf."""
        if not self._ranks.is_parallel:
            return self._leaves.root()
        shard = self._shards.root()
        flat = shard.new_empty(shard.numel() * self._ranks.world)
        _all_gather(flat, shard)
        dist.all_reduce(self._present, op=dist.ReduceOp.MAX)
        return [
            flat[start : start + parameter.numel()].view(parameter.shape) if present else None
            for parameter, start, present in zip(self._parameters, self._offsets, self._present.tolist(), strict=False)
        ]


def _offsets(parameters: Sequence[Tensor]) -> list[int]:
    """Return where each gradient starts in the flat buffer, and its length."""
    offsets = [0]
    for parameter in parameters:
        offsets.append(offsets[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT)
    return offsets
