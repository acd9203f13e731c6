"""Data-parallel ranks: who runs which microbatch, and what they tell each other."""

from __future__ import annotations

import atexit
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.errors import PlanError
from cosmati.optim.sharing import Sharing

if dist.is_available():
    # Its functions have the default group of the moment as a default argument. Imported after the group was made (which
    # torch._dynamo does), they hold it for good: its threads then live on when it's destroyed, and one that lets go of
    # a collective's tensors while the interpreter ends brings the process down (terminate, SIGABRT).
    import torch.distributed.nn.functional


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

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process as the only rank: for what each does by itself."""
        ranks = object.__new__(cls)
        ranks.is_parallel, ranks.world, ranks.rank = False, 1, 0
        return ranks

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
        all_gather(gathered, rows.contiguous())
        return gathered.view(self.world, *rows.shape).transpose(0, 1).reshape(gathered.shape)

    @property
    def sharing(self) -> Sharing:
        """How optimizers share work on whole matrices over the ranks."""
        return Sharing(self.rank, self.world, lambda flat: self.gather(flat[None]))

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first one's values, in place."""
        if self.is_parallel:
            for tensor in tensors:
                # A view of another shape of memory can't be received into.
                own = tensor.detach().contiguous()
                dist.broadcast(own, 0)
                tensor.detach().copy_(own)

    def all_equal(self, digest: bytes) -> bool:
        """Return whether every rank has the same digest."""
        if not self.is_parallel:
            return True
        own = torch.tensor([list(digest)], dtype=torch.uint8, device=_device())
        everyone = self.gather(own)
        return bool((everyone == everyone[0]).all())

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


def all_gather(gathered: Tensor, own: Tensor) -> None:
    """Gather equal tensors of all ranks into one; PyTorch 2.13 has it under another name, and warns of the old one."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(gathered, own)


def _device() -> torch.device:
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
