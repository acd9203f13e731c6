"""The ranks of a run: who runs which microbatch, and what they tell each other."""

from __future__ import annotations

import atexit
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmati.core.batch import Batch, Data, count_rows_and_tokens
from cosmati.core.meetings import num_collectives
from cosmati.errors import DataError, PlanError
from cosmati.optim.sharing import Sharing
from cosmati.train.content import content_digest

if dist.is_available():
    # Its functions have the default group of the moment as a default argument. Imported after the group was made (which
    # torch._dynamo does), they hold it for good: its threads then live on when it's destroyed, and one that lets go of
    # a collective's tensors while the interpreter ends brings the process down (terminate, SIGABRT).
    import torch.distributed.nn.functional


class Ranks:
    """This process's place among the ranks; one rank where there is no process group and torchrun didn't start it.

    Microbatches are dealt out in runs: each rank takes `run` consecutive ones, then each takes as many again. That's a
    choice of cost, never of bits. Consecutive ones are a whole subtree, which a rank folds by itself and exchanges
    once; with runs of 1 (0, W, 2W, ...) all ranks can reduce each slot's microbatches at once. Groups of ranks take
    consecutive ones too, and deal these out within: a group's are a whole subtree.

    W = D * T ranks are D replicas of T consecutive ranks each. The ranks of a replica run the same microbatches, each a
    part of every one (see `virtual_shards`); replicas share the microbatches out.

    Args:
        degree: T, where there are several ranks: one alone does everything.

    Raises:
        PlanError: T doesn't divide the number of ranks.

    Attributes:
        world: W, all ranks.
        rank: this one among all.
        degree: T.
        group: of processes that this is a place in; None for all of them.
        within: process group of this replica; None where T is 1.
        across: process group of the ranks that have this one's place in their replicas; None is all ranks.
        run: how many consecutive microbatches a rank takes at a time; 0 shares all of a step's out in one run each.
        num_together: consecutive ranks that deal out consecutive microbatches among themselves; 0 for all ranks.
        has_met: whether the user's own code calls collectives, as far as is known.
        num_early: collectives that were begun while the user's code ran, and aren't its own.
        in_lockstep: passes through the model exchange weights and gradients by themselves, on all ranks alike.
        together: stands around passes that some ranks have more of, where they're in lockstep.
    """

    group: dist.ProcessGroup | None = None
    run = 0
    num_together = 0
    num_early = 0
    degree = 1
    within: Any = None
    across: Any = None
    in_lockstep: bool = False
    together: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(self, degree: int = 1) -> None:
        if dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
            # Whoever starts a script with torchrun wants its ranks to work together, and the script needn't say so.
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(_leave_group)
        asked = os.environ.get("WORLD_SIZE", "")
        if asked not in ("", "1") and not (dist.is_available() and dist.is_initialized()):
            warnings.warn(
                f"WORLD_SIZE is {asked}, and there is no process group: this process trains everything by itself, as "
                "each of the others may. Start the script with torchrun, or call torch.distributed.init_process_group "
                "before the Trainer is made.",
                stacklevel=2,
            )
        self.is_parallel = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.world = dist.get_world_size() if self.is_parallel else 1
        self.rank = dist.get_rank() if self.is_parallel else 0
        self.has_met = False
        self._has_compared = False
        if degree > 1 and self.is_parallel:
            self._join(degree)

    def _join(self, degree: int) -> None:
        """Make the process groups of replicas."""
        if self.world % degree:
            msg = (
                f"{self.world} ranks can't be replicas of tensor_parallel={degree} ranks each. Start a multiple of "
                f"{degree} ranks, or take a RunConfig(tensor_parallel=...) that divides {self.world}."
            )
            raise PlanError(msg)
        self.degree = degree
        self.within = _joined(range(start, start + degree) for start in range(0, self.world, degree))
        self.across = _joined(range(place, self.world, degree) for place in range(degree))

    @property
    def num_replicas(self) -> int:
        """D, between which a step's microbatches are shared out."""
        return self.world // self.degree

    @property
    def has_replicas(self) -> bool:
        """Whether there are several, whose gradients are to be summed."""
        return self.is_parallel and self.num_replicas > 1

    @property
    def can_tell(self) -> bool:
        """Whether one that fails in the midst of a step can still tell the others, who don't wait for it before."""
        return self.is_parallel and self.degree == 1 and not (self.in_lockstep or self.has_met)

    @property
    def replica(self) -> int:
        """This rank's replica, from 0."""
        return self.rank // self.degree

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process as the only rank: for what each does by itself."""
        ranks = object.__new__(cls)
        ranks.is_parallel, ranks.world, ranks.rank = False, 1, 0
        return ranks

    @classmethod
    def in_group(cls, group: dist.ProcessGroup) -> Ranks:
        """Return this process's place in a group of some ranks."""
        ranks = cls.alone()
        ranks.group, ranks.rank, ranks.world = group, dist.get_rank(group), dist.get_world_size(group)
        ranks.is_parallel = ranks.world > 1
        return ranks

    def share_out(self, num_microbatches: int, *, is_strided: bool = False, num_together: int = 0) -> None:
        """Fix the runs in which a step's V microbatches are dealt out, and multiples of V where they are cut.

        Args:
            num_microbatches: V.
            is_strided: in runs of 1.
            num_together: consecutive ranks that deal out consecutive ones, which divides W; 0 for all ranks.

        Raises:
            PlanError: the number of ranks doesn't divide V.
        """
        self.mine(num_microbatches)
        self.num_together = num_together
        self.run = 1 if is_strided else num_microbatches // self.num_replicas

    def slots(self, num_microbatches: int) -> list[list[int]]:
        """Return for each slot the microbatches that replicas run in it, in their order."""
        world = self.num_replicas
        run, together = self.run or num_microbatches // world, self.num_together or world
        of_group = num_microbatches * together // world
        firsts = [group + rank * run for group in range(0, num_microbatches, of_group) for rank in range(together)]
        return [
            [start + first + i for first in firsts] for start in range(0, of_group, run * together) for i in range(run)
        ]

    def mine(self, num_microbatches: int) -> list[int]:
        """Return the microbatches that this rank runs, in order.

        Raises:
            PlanError: the number of ranks doesn't divide V.
        """
        if num_microbatches % (world := self.num_replicas):
            is_power = world & (world - 1) == 0
            more = f", or set RunConfig(num_microbatches=...) to {world} or a larger power of two" if is_power else ""
            what = "ranks" if self.degree == 1 else f"replicas of {self.degree} ranks"
            msg = (
                f"{world} {what} can't share V = {num_microbatches} microbatches. Start a number of "
                f"{what.partition(' ')[0]} that divides V, a power of two{more}."
            )
            raise PlanError(msg)
        return [slot[self.replica] for slot in self.slots(num_microbatches)]

    def gather(self, rows: Tensor) -> Tensor:
        """Bring what each rank has of its microbatches into microbatch order.

        Args:
            rows: [V / D, ...], one for each of this rank's microbatches.

        Returns:
            [V, ...], the same on every rank.
        """
        if not self.is_parallel:
            return rows
        run = self.run or len(rows)
        together = self.num_together or self.num_replicas
        gathered = self.gather_by_replica(rows).view(-1, together, len(rows) // run, run, *rows.shape[1:])
        return gathered.transpose(1, 2).reshape(-1, *rows.shape[1:])

    def gather_by_rank(self, rows: Tensor) -> Tensor:
        """Return each rank's rows [n, ...], one rank after the other: [W * n, ...], the same on every rank."""
        if not self.is_parallel:
            return rows
        gathered = rows.new_empty((self.world * rows.shape[0], *rows.shape[1:]))
        all_gather(gathered, rows.contiguous(), group=self.group)
        return gathered

    def gather_by_replica(self, rows: Tensor) -> Tensor:
        """Return each replica's rows [n, ...], which its ranks have alike, one after the other: [D * n, ...]."""
        by_rank = self.gather_by_rank(rows).view(self.num_replicas, self.degree, *rows.shape)
        return by_rank[:, 0].flatten(0, 1)

    @property
    def sharing(self) -> Sharing:
        """How optimizers share work on whole matrices over the ranks."""
        return Sharing(self.rank, self.world, lambda flat: self.gather_by_rank(flat[None]))

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the first one's values, in place."""
        if self.is_parallel:
            for tensor in tensors:
                values = tensor.detach()
                for axis, stride in enumerate(values.stride()):
                    if not stride and values.size(axis):  # of an expanded one, what's there once
                        values = values.narrow(axis, 0, 1)
                # A view of another shape of memory can't be received into, nor numbers of which a backend has no type.
                own = values.clone(memory_format=torch.contiguous_format)
                dist.broadcast(own.view(-1).view(torch.uint8), 0)
                values.copy_(own)

    def all_equal(self, digest: bytes) -> bool:
        """Return whether every rank has the same digest."""
        return not self.unlike(digest)

    def unlike(self, digest: bytes) -> list[int]:
        """Return the ranks that have another digest than the first one."""
        if not self.is_parallel:
            return []
        everyone = self.gather_by_rank(torch.tensor([list(digest)], dtype=torch.uint8, device=exchange_device()))
        return (everyone != everyone[0]).any(1).nonzero().flatten().tolist()

    def unlike_names(self, digests: Mapping[str, bytes]) -> list[str]:
        """Return the names that not every rank has, or has with another digest."""
        told = self.told_by_all({name: digest.hex() for name, digest in digests.items()})
        return [name for name in sorted({*chain(*told)}) if len({one.get(name) for one in told}) > 1]

    def refuse_unlike(self, step: int, *given: object) -> None:
        """Refuse a step's batch that isn't the same on all ranks; looks at steps 0, 1, 2, 4, 8, and the first of all.

        Args:
            step: of the run.
            given: a batch, whole, and what later ones follow from.

        Raises:
            DataError: it names the ranks.
        """
        if not self.is_parallel or (self._has_compared and step & (step - 1)):
            return
        self._has_compared = True
        if others := self.unlike(content_digest(*given)):
            told = f"rank{'s' if others[1:] else ''} {', '.join(map(str, others))}"
            msg = (
                f"At step {step}, {told} had another batch than rank 0. Every rank has to be given the same whole "
                "batch, of which the trainer takes each rank's share: leave out DistributedSampler and shares of one's "
                "own, and seed loaders, splits and random rows alike on all ranks."
            )
            raise DataError(msg)

    def refuse_unlike_end(self, step: int, num_passes: int, data: Data | None) -> None:
        """Refuse data that have ended on some ranks only, for good or for this pass, or whose last batches differ.

        Ranks would wait for others without an end, or train on other rows.

        Args:
            step: of the run.
            num_passes: that this rank's data have ended.
            data: the step's batch; None where there are no more.

        Raises:
            DataError: on all ranks.
        """
        if not self.is_parallel:
            return
        rows = -1
        if data is not None:
            rows = data.num_rows if isinstance(data, Batch) else count_rows_and_tokens(data)[0]
        everyone = self.gather_by_rank(torch.tensor([[num_passes, rows]], device=exchange_device())).tolist()
        passes, counts = ({*found} for found in zip(*everyone, strict=True))
        if len(passes) == len(counts) == 1:
            return
        what = "the data of some ranks have ended, and others' haven't"
        if len(passes) == 1 and -1 not in counts:
            what = f"some ranks had a batch of {min(counts)} rows, and others of {max(counts)}"
        msg = (
            f"At step {step} {what}. Every rank has to be given the same batches, as many as the others, of the same "
            "rows."
        )
        raise DataError(msg)

    def told_by_all(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what each rank has to tell, in JSON."""
        if not self.is_parallel:
            return [dict(own)]
        text = json.dumps(own).encode()
        longest = int(self.gather_by_rank(torch.tensor([len(text)], device=exchange_device())).max())
        # JSON may end in blanks.
        row = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        everyone = self.gather_by_rank(row[None].to(exchange_device())).cpu()
        return [json.loads(bytes(one.numpy())) for one in everyone]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Stand around the user's code, and take note of collectives that it calls."""
        if not self.is_parallel or self.in_lockstep:
            yield
            return
        before, own = num_collectives(), self.num_early
        try:
            yield
        finally:
            now = num_collectives()
            self.has_met |= len(now) != len(before) or sum(now) - sum(before) != self.num_early - own

    def told(self, message: bytes) -> bytes:
        """Return what the first rank has to tell; one small exchange where that is nothing."""
        if not self.is_parallel:
            return message
        size = torch.tensor([len(message)], device=exchange_device())
        dist.broadcast(size, 0)
        content = torch.zeros(int(size), dtype=torch.uint8, device=exchange_device())
        if self.rank == 0:
            content = torch.tensor(list(message), dtype=torch.uint8, device=exchange_device())
        if len(content):
            dist.broadcast(content, 0)
        return bytes(content.tolist())

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.is_parallel:
            dist.barrier()

    def agree(self, flag: bool) -> bool:
        """Return whether any rank raised a flag."""
        if not self.is_parallel:
            return flag
        value = torch.tensor([float(flag)], device=exchange_device())
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())


def _joined(groups: Iterable[range]) -> Any:  # noqa: ANN401  (PyTorch's group)
    """Make groups of ranks, as all ranks have to, and return this rank's."""
    made = [(members, dist.new_group(list(members))) for members in groups]
    return next(group for members, group in made if dist.get_rank() in members)


def _leave_group() -> None:
    """Destroy the process group, unless the script has."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_gather(gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None, is_async: bool = False) -> Any:  # noqa: ANN401  (PyTorch's work)
    """Gather equal tensors of a group's ranks into one; PyTorch 2.13 has another name for it, and warns of the old one.

    Args:
        gathered: [W * n], what is received.
        own: [n].
        group: of the ranks; None for all.
        is_async: don't wait.

    Returns:
        What is to be waited for, where it is asynchronous.
    """
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(gathered, own, group=group, async_op=is_async)


def exchange_device() -> torch.device:
    """Return where tensors have to be that ranks exchange."""
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
