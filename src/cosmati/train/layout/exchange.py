"""The tree over all ranks.

A rank folds each run of its microbatches by itself, a whole subtree, and ranks exchange one leaf for each run. Data
moves by all-to-all and all-gather, and additions are local and in tree order, because the order of additions inside an
all-reduce is the backend's to choose. What is sent is what a ring sends: each rank gets W - 1 parts of its share of the
gradients, and then the sums of the others' shares. Two ranks send each other all that they have, and both add: that's
as much, at once.

Gradients travel in buckets, in the same order on all ranks: while the last microbatch's backward pass runs, each bucket
leaves as soon as all of it is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmati.errors import PlanError
from cosmati.train.layout.pair_sum import PairSum
from cosmati.train.layout.piece import Bucket, laid_out, memory
from cosmati.train.layout.tree import Leaf, Tree
from cosmati.train.ranks import Ranks, all_gather


class _Sent(NamedTuple):
    """A bucket under way: what was sent has to stay until it has arrived."""

    flat: Tensor
    received: Tensor
    work: Any


class RankSum:
    """The tree over one step's leaves, over all ranks.

    Args:
        ranks: of the run, of which one in each replica meets the others of its place.
        tensors: the parameters, which hold each leaf in turn.
        num_microbatches: V.
        buckets: in the order in which they're exchanged.
        keeps_share: each rank keeps its own share of the sum, in place of all of it.

    Attributes:
        bound: no element of the sum, on any rank, is larger; infinite where that isn't known.
    """

    def __init__(
        self,
        ranks: Ranks,
        tensors: Sequence[nn.Parameter],
        num_microbatches: int,
        buckets: Sequence[Bucket],
        *,
        keeps_share: bool = False,
    ) -> None:
        self._ranks = ranks
        self._tensors = tensors
        self._buckets = buckets
        self._keeps_share = keeps_share
        self._world = ranks.num_replicas
        self._swaps = self._world == 2 and not keeps_share
        self._run = ranks.run or num_microbatches // self._world
        self._num_left = num_microbatches // self._world
        self._type = sum_type(tensors)
        self._own = PairSum(tensors)
        self._sent: list[_Sent] = []
        self._shares: list[Tree[Tensor]] = [Tree(lambda left, right: left.add_(right)) for _ in buckets]
        self._awaited: list[set[int]] = []
        self._awaited_with: dict[int, set[int]] = {}
        self._device = tensors[0].device
        self._present = [False] * len(tensors)
        self._extremes: list[Tensor] = []
        self._known: tuple[Tensor, Any] | None = None
        self.bound = math.inf

    @property
    def is_at_last(self) -> bool:
        """Whether the next leaf is this rank's last one."""
        return self._num_left == 1

    def lend(self) -> None:
        """Put what waits for a leaf where autograd adds the leaf to it."""
        self._own.lend()

    def expect(self, indices: Collection[int]) -> None:
        """Send buckets while the last leaf comes, told by `arrived` of each of these parameters."""
        self._awaited = [{*bucket.parameters} & {*indices} for bucket in self._buckets]
        self._awaited_with = {index: awaited for awaited in self._awaited for index in awaited}

    def arrived(self, index: int) -> bool:
        """Take note that the last leaf's gradient of a parameter is there; say whether it's for the first time."""
        if index not in self._awaited_with:
            return True  # an earlier leaf's
        if index not in self._awaited_with[index]:
            return False  # its bucket may have left without this part
        self._awaited_with[index].discard(index)
        while self._awaited and not self._awaited[0]:
            del self._awaited[0]
            self._send(self._buckets[len(self._sent)], {})
            self._ranks.num_early += 1
        return True

    def fold(self, widened: Mapping[int, Tensor]) -> None:
        """Take the leaf of this rank's next microbatch. Every rank calls it equally often."""
        self._num_left -= 1
        if self._num_left % self._run:
            self._own.fold(widened)
            return
        for bucket in self._buckets[len(self._sent) :]:
            self._send(bucket, widened)
        self._awaited, self._own = [], PairSum(self._tensors)
        if self._num_left:
            deque(self._land(), maxlen=0)
        else:
            self._tell()

    def _tell(self) -> None:
        """Tell the others which parameters this rank has gradients of, which they know when the sums are there.

        Two more say whether the user's code meets other ranks by itself, and how large what was sent may be.
        """
        told = torch.tensor([*self._present, self._ranks.has_met, 0], dtype=torch.float32, device=self._device)
        if self._extremes:
            told[-1] = torch.stack(self._extremes).abs().sum()
            # A backend's maximum may pass over NaN.
            torch.nan_to_num_(told, nan=math.inf, posinf=math.inf)
        work = dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._ranks.across, async_op=True)
        self._known = told, work

    def _send(self, bucket: Bucket, widened: Mapping[int, Tensor]) -> None:
        """Send a run's sums to the ranks that add them."""
        own, world = bucket.lengths[self._ranks.replica], self._world
        flat = torch.empty(sum(bucket.lengths), dtype=self._type, device=self._device)
        sums = {index: self._own.last(index, widened) for index in sorted(bucket.parameters)}
        held = sum(stop - start for index, start, stop, _ in bucket.parts if sums[index] is not None)
        if held < len(flat):
            # -0.0 is what leaves every float as it is when added; +0.0 would turn -0.0 into +0.0.
            flat.fill_(-0.0)
        runs, sources = list[Tensor](), list[Tensor]()
        for index, start, stop, place in bucket.parts:
            total, like = sums[index], self._tensors[index]
            if total is None:
                continue
            self._present[index] = True
            is_all = stop - start == like.numel()
            runs.append(laid_out(flat, like, place) if is_all else flat[place : place + stop - start])
            sources.append(total if is_all else memory(total, like)[start:stop])
        if runs:
            torch._foreach_copy_(runs, sources)
            self._extremes += torch.aminmax(flat) if len(flat) else ()
        lengths, group = list(bucket.lengths), self._ranks.across
        got = [own] * world
        if self._swaps:
            lengths = got = [0 if place == self._ranks.replica else len(flat) for place in range(world)]
        received = flat.new_empty(sum(got))
        work = dist.all_to_all_single(received, flat, got, lengths, group=group, async_op=True)
        self._sent.append(_Sent(flat, received, work))

    def _land(self, *, is_last: bool = False) -> Iterator[tuple[Tensor, Tree[Tensor]]]:
        """Add what has arrived to this rank's share of the sum; yield each bucket's memory and share."""
        for (flat, received, work), shares in zip(self._sent, self._shares, strict=True):
            work.wait()
            if self._swaps:
                shares.push(flat.add_(received))  # the other way round has the same bits
                yield flat, shares
                continue
            across: Tree[Tensor] = Tree(lambda left, right: left.add_(right))
            for part in received.view(self._world, -1):
                across.push(part)
            # What waits longer than for being gathered doesn't keep what the others have sent in memory.
            shares.push(across.root() if is_last else across.root().clone())
            yield flat, shares
        self._sent = []

    def close(self) -> None:
        """Wait for what is under way, where a step ends without its sum: what was sent stays so long."""
        if len(self._sent) == len(self._buckets):
            deque(self._land(), maxlen=0)
        if self._known is not None:
            self._known[1].wait()

    def root(self) -> Leaf:
        """Return the step's sum, or this rank's share of it; None where a parameter was absent from every leaf."""
        assert self._known is not None, "a leaf of each of this rank's microbatches comes first"
        summed = self._own_share() if self._keeps_share else self._gathered()
        told, work = self._known
        work.wait()
        self._known = None
        *present, met, largest = told.tolist()
        self._ranks.has_met, self.bound = bool(met), largest * self._world
        return [summed[index] if seen else None for index, seen in enumerate(present)]

    def _gathered(self) -> dict[int, Tensor]:
        """Let each bucket's sum go round as soon as it's there."""
        group = self._ranks.across
        if self._swaps:
            flats = [shares.root() for _, shares in self._land()]
        else:
            works = [
                (flat, all_gather(flat, shares.root(), is_async=True, group=group))
                for flat, shares in self._land(is_last=True)
            ]
            for _, work in works:
                work.wait()
            flats = [flat for flat, _ in works]
        return {
            index: laid_out(flat, self._tensors[index], place)
            for flat, bucket in zip(flats, self._buckets, strict=True)
            for index, _, _, place in bucket.parts
        }

    def _own_share(self) -> dict[int, Tensor]:
        deque(self._land(), maxlen=0)
        empty = self._shares[0].root().new_empty(0)
        # What has no elements has its shape on every rank, and others none where they lie elsewhere.
        found = {index: empty if like.numel() else empty.view(like.shape) for index, like in enumerate(self._tensors)}
        for bucket, shares in zip(self._buckets, self._shares, strict=True):
            for index, start, stop, place in bucket.of(self._ranks.replica):
                share, like = shares.root(), self._tensors[index]
                is_all = stop - start == like.numel()
                found[index] = laid_out(share, like, place) if is_all else share[place : place + stop - start]
        return found


def sum_type(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the type in which gradients are summed: float32, or float64 where every parameter is.

    Raises:
        PlanError: some parameters are float64 and some aren't, or one is complex.
    """
    if any(tensor.is_complex() for tensor in tensors):
        msg = "Some parameters are complex: several ranks sum real gradients. Train on one rank, or use view_as_real."
        raise PlanError(msg)
    wide = {tensor.dtype == torch.float64 for tensor in tensors}
    if len(wide) > 1:
        msg = (
            "Some parameters are float64 and others aren't: several ranks sum gradients in one type. Bring the model "
            "to one of them: model.float()."
        )
        raise PlanError(msg)
    return torch.float64 if wide.pop() else torch.float32
