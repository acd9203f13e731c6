"""How tensors move between ranks, with no arithmetic on the way: gathered by all, or a part to each.

Over gloo they go as messages from rank to rank, straight from and into their places. Its own collectives copy what they
move once or twice more: an all-gather of 20 MB among two ranks took 9.2 ms of processor time a rank, and 5.3 so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

_TAGS = 1 << 30
"""From here on tags are ours: those of the user's own code are small."""
_numbers: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()
"""How often each group has moved something. All its ranks do it equally often, until one of them fails in between."""


class OnTheWay(NamedTuple):
    """Tensors that arrive, and what is to be waited for: also that what was sent has left."""

    tensors: list[Tensor]
    works: list[Any]

    def wait(self) -> list[Tensor]:
        """Return the tensors, one for each rank, once they're there."""
        for work in self.works:
            work.wait()
        return self.tensors


def all_gather(gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None) -> OnTheWay:
    """Begin to gather equal tensors of a group's ranks into one.

    Args:
        gathered: [W * n], contiguous; what is received.
        own: [n], contiguous; may be this rank's place in it.
        group: of the ranks; None for all.
    """
    members = _members(group)
    if not _is_over_gloo(own, members):
        # PyTorch 2.13 has another name for it, and warns of the old one.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        return OnTheWay([gathered], [getattr(dist, name)(gathered, own, group=group, async_op=True)])
    if not own.numel():
        return OnTheWay([gathered], [])
    places = gathered.view(members.size(), -1).unbind()
    works = _exchanged([own] * len(places), places, members, f"gather {own.nbytes}")
    if places[members.rank()].data_ptr() != own.data_ptr():
        places[members.rank()].copy_(own.view(-1))
    return OnTheWay([gathered], works)


def all_to_all(flat: Tensor, lengths: Sequence[int], *, group: dist.ProcessGroup | None = None) -> OnTheWay:
    """Begin to send each rank its part of a tensor, and to receive from each what it has of this rank's part.

    Args:
        flat: one part after the other, contiguous. This rank's own may stay where it is.
        lengths: of the parts, the same on all ranks.
        group: of the ranks; None for all.

    Returns:
        What arrives, one tensor of this rank's length from each rank.
    """
    members = _members(group)
    rank = members.rank()
    if not _is_over_gloo(flat, members):
        received = flat.new_empty(len(lengths) * lengths[rank])
        due = [lengths[rank]] * len(lengths)
        work = dist.all_to_all_single(received, flat, due, list(lengths), group=group, async_op=True)
        return OnTheWay(list(received.split(due)), [work])
    parts = list(flat.split(list(lengths)))
    arriving = [part if place == rank else flat.new_empty(lengths[rank]) for place, part in enumerate(parts)]
    return OnTheWay(arriving, _exchanged(parts, arriving, members, f"all {flat.nbytes}"))


def _exchanged(sent: Sequence[Tensor], received: Sequence[Tensor], members: dist.ProcessGroup, what: str) -> list[Any]:
    """Begin to send a tensor to each other rank, and to receive one from each; nothing goes where one is empty.

    Its tag says what it is and which of all. What a rank has sent before an error isn't taken for something else then:
    others wait in vain, and are told so when their time is over.
    """
    works, rank, world = [], members.rank(), members.size()
    number = next(_numbers.setdefault(members, count()))
    tag = _TAGS + crc32(f"{what} {number}".encode()) % _TAGS
    for distance in range(1, world):
        source, target = (rank - distance) % world, (rank + distance) % world
        if received[source].numel():
            works.append(members.recv([received[source]], source, tag))
        if sent[target].numel():
            works.append(members.send([sent[target]], target, tag))
    return works


def _members(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = group or dist.group.WORLD
    assert found is not None, "ranks have met"
    return found


def _is_over_gloo(tensor: Tensor, members: dist.ProcessGroup) -> bool:
    return tensor.is_cpu and members._get_backend(tensor.device).name() == "gloo"  # noqa: SLF001
