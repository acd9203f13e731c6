"""Memory that steps have changed in place, known again where data hand it out once more, whole or in part.

What data hand out is known by its address, and an address says something only for as long as the memory is there. A
tensor's storage and a NumPy array can be watched for that without being held. Memory of others, over which somebody
makes a tensor anew at each read (`torch.from_numpy(self.x[rows])`), can't: it's held, up to a bound, by the reader
that has seen it written to. No allocator gives out what is held, so what comes again at such an address is the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Self
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from cosmati.core.batch import Data
from cosmati.train.marks import ARRAYS, parts_of, state_of

_MAX_HELD = 1 << 26
"""Bytes of other libraries' memory that a reader holds."""
_MAX_WORK: Any = 1_000
"""Of NumPy's tries to find an element that two views share."""
_MIN_STALE = 64

_Part = Tensor | np.ndarray[Any, Any]


class Region(NamedTuple):
    """Where a tensor or an array lies: an array over its address that keeps nothing alive.

    Attributes:
        view: of its elements as bytes; None where it has no one place in memory.
        key: equal for what lies in the same place.
        start: its first byte's address.
        stop: the address after its last byte.
    """

    view: np.ndarray[Any, Any] | None
    key: object
    start: int
    stop: int

    @classmethod
    def of(cls, part: _Part) -> Self:
        """Return a part's place."""
        if isinstance(part, Tensor):
            has_memory = part.layout is torch.strided and not part.is_nested and part.device.type != "meta"
            size = part.element_size()
            place = part.data_ptr() if has_memory and part.numel() else 0
            # A nested tensor has no shape to ask for.
            shape, strides = (tuple(part.shape), tuple(s * size for s in part.stride())) if place else ((), ())
        else:
            place, shape, strides, size = part.ctypes.data if part.size else 0, part.shape, part.strides, part.itemsize
        if not place:
            return cls(None, id(part), 0, 0)
        reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        start, stop = place + sum(min(0, r) for r in reach), place + sum(max(0, r) for r in reach) + size
        return cls(np.asarray(_Placed(place, shape, strides, size)), (place, shape, strides, size), start, stop)

    def shares_memory(self, other: Region) -> bool:
        """Return whether an element lies in both; columns of one table lie between one another, and share none."""
        if self.view is None or other.view is None:
            return self.key == other.key
        try:
            return self.key == other.key or np.shares_memory(self.view, other.view, max_work=_MAX_WORK)
        except np.exceptions.TooHardError:
            return False


class _Placed:
    """Memory at an address, as NumPy asks for it."""

    def __init__(self, place: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        kind = f"|V{size}"
        self.__array_interface__ = {
            "data": (place, True), "shape": shape, "strides": strides, "typestr": kind, "version": 3,
        }  # fmt: skip


class _Known(NamedTuple):
    owner: ReferenceType[Any]
    region: Region
    content: object

    def is_as_left(self, part: _Part) -> bool:
        """Return whether a part shares memory with what a step changed, and that is as the step left it."""
        owner, region = self.owner(), Region.of(part)  # Its owner stays while its memory is read.
        if owner is None or not self.region.shares_memory(region):
            return False
        if isinstance(owner, torch.UntypedStorage):
            start = owner.data_ptr()
            if not start <= self.region.start <= self.region.stop <= start + owner.nbytes():
                return False  # Somebody has resized it: that memory is another's now, or nobody's.
        return self.content == _content(part, self.region)


class Written:
    """What steps have changed in place, for as long as a data set or somebody else holds it, and may give it again."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._numbers: dict[object, int] = {}
        self._places: list[tuple[int, int]] = []
        self._longest = 0
        self._count = count()

    def add(self, parts: Iterable[Any]) -> None:
        """Take note of tensors and arrays, as steps have left them."""
        for part in parts:
            if isinstance(part, ARRAYS):
                number, region = next(self._count), Region.of(part)
                self._known.pop(self._numbers.get(region.key, -1), None)
                owner = ref(_owner_of(part), partial(self._forget, number, region.key))
                self._known[number] = _Known(owner, region, _content(part, region))
                self._numbers[region.key] = number
                if len(self._places) > 2 * len(self._known) + _MIN_STALE:
                    # Another thread's collector may forget one at any time, so these are left behind till now.
                    self._places = sorted((k.region.start, n) for n, k in list(self._known.items()))
                insort(self._places, (region.start, number))
                self._longest = max(self._longest, region.stop - region.start)

    def _forget(self, number: int, key: object, _: object) -> None:
        self._known.pop(number, None)
        if self._numbers.get(key) == number:
            self._numbers.pop(key, None)

    def has_part_of(self, data: Data) -> bool:
        """Return whether a batch is, in part, as a step has left it: a buffer that was filled anew isn't."""
        if not self._known:  # The usual case.
            return False
        parts = [part for part in parts_of(data).values() if isinstance(part, ARRAYS)]
        return any(known.is_as_left(part) for part in parts for known in self._near(Region.of(part)))

    def _near(self, region: Region) -> Iterator[_Known]:
        first = bisect_left(self._places, (region.start - self._longest,))
        for start, number in self._places[first:]:
            if start > region.stop:
                return
            known = self._known.get(number)
            if known is not None and (known.region.stop > region.start or known.region.key == region.key):
                yield known


WRITTEN = Written()
"""Of the whole process: several trainers, and their evaluations, may read the same data."""


class WrittenHere:
    """What one reader's steps have changed in place: noted for the process, and held where it can't be watched."""

    def __init__(self) -> None:
        self._held: dict[object, _Part] = {}
        self._num_bytes = 0

    def add(self, parts: Iterable[Any]) -> None:
        """Take note of tensors and arrays; of other libraries' memory the first up to the bound is held, one at least.

        Args:
            parts: as steps have left them.
        """
        for part in parts:
            if isinstance(part, ARRAYS):
                WRITTEN.add([part])
                if self._num_bytes < _MAX_HELD and _is_of_others(part):
                    key = Region.of(part).key
                    self._num_bytes += 0 if key in self._held else part.nbytes
                    self._held[key] = part


def _is_of_others(part: _Part) -> bool:
    """Return whether a part's memory may stay when all that can be watched of it has gone."""
    owner = _owner_of(part)
    if isinstance(owner, np.ndarray):
        return owner.base is not None
    if not isinstance(owner, torch.UntypedStorage):
        return False
    # Workers' memory can't be resized either. It's PyTorch's, and each held tensor would keep a file open.
    return owner.device.type == "cpu" and not owner.resizable() and not owner.is_shared()


def _owner_of(part: _Part) -> object:
    """Return what a view is of: the view goes with its batch, and that stays."""
    base: Any = part
    while isinstance(base, np.ndarray):
        part, base = base, base.base
    part = base if isinstance(base, Tensor) else part
    # Tensors that share memory (`detach()`, `data`) share this object, for as long as the memory is there.
    return part.untyped_storage() if isinstance(part, Tensor) and Region.of(part).view is not None else part


def _content(part: _Part, region: Region) -> object:
    # An array may share a tensor's memory and fill it past its count; an accelerator's none, and a copy would wait.
    is_readable = region.view is not None and not (isinstance(part, Tensor) and part.device.type != "cpu")
    return hash(state_of(region.view)) if is_readable else state_of(part)
