"""The content of a value, as something that can be compared later: tensors bit for bit, containers item by item."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import ChainMap, OrderedDict, UserDict, deque
from collections.abc import Collection, ItemsView, Mapping
from contextvars import ContextVar
from itertools import chain
from multiprocessing.sharedctypes import SynchronizedBase
from types import MappingProxyType
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from cosmati.core.sparse import sparse_parts

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MAPPINGS = frozenset({ChainMap, UserDict, MappingProxyType, WeakKeyDictionary, WeakValueDictionary})
MAX_BYTES = 1 << 30
"""Of arrays in one value that are compared; tensors of any size are."""
MAX_VALUES = 1 << 24
"""Items in one value that are compared."""
MAX_DEPTH = 32
_COST = 16
"""Of an item that is read by itself; of plain ones thousands are read at once."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MAX_COPIED = 1 << 16
"""Elements of the largest tensor that is compared whole; of a larger one, the sums of so many parts of its bits are."""
_NUM_PARTS = 4096
_TOGETHER = 64
"""Parts that are summed at a time, since PyTorch widens all that it sums to int64."""
_MAX_KEPT = 10_000
"""Bytes of an array, or items of a container, above which a digest stands for them: a loss may name a data set."""


def is_container(value: object) -> TypeGuard[Collection[Any]]:
    """Say whether a value's items are in memory. Another mapping may read them when they're asked for, from a file."""
    return isinstance(value, _CONTAINERS) or type(value) in _MAPPINGS


def items_of(mapping: Mapping[Any, Any]) -> ItemsView[Any, Any]:
    """Return a container's keys and values; of a dict, those that it holds, whatever its own class makes of them."""
    if isinstance(mapping, OrderedDict):
        return OrderedDict.items(mapping)
    return dict.items(mapping) if isinstance(mapping, dict) else mapping.items()


def content_of(value: object, trained: Collection[int] = ()) -> object:
    """Return something that's equal to its like as long as the value is the same."""
    return read(value, trained)[0]


def read(value: object, trained: Collection[int] = ()) -> tuple[object, bool]:
    """Return a value's content, and whether that's all of it: not where it has more than is compared.

    Args:
        value: anything.
        trained: `id` of each parameter whose content doesn't count where it lies in a container.
    """
    reader = _Reader(trained)
    return reader.content(value, 0), reader.is_whole


class _Reader:
    def __init__(self, trained: Collection[int]) -> None:
        self._trained = trained
        self._num_left, self._bytes_left = MAX_VALUES, MAX_BYTES
        self._open: set[int] = set()
        self.is_whole = True

    def content(self, value: Any, depth: int) -> object:  # noqa: ANN401
        try:
            return type(value), self._told(value, depth)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # noqa: BLE001  (of others' objects: a generator without state, a view that was released)
            self.is_whole = False
            return type(value), id(value)

    def _told(self, value: Any, depth: int) -> object:  # noqa: ANN401
        content: object = id(value)
        if type(value) in _PLAIN:
            content = repr(value)
        elif isinstance(value, nn.Parameter) and depth and id(value) in self._trained:
            pass  # A list of a module's own parameters (a recurrent layer's): they move at each commit.
        elif isinstance(value, Tensor):
            content = _bits(value)
        elif isinstance(value, np.ndarray):
            content = (value.dtype.str, value.shape, self._array(value, depth))
        elif is_container(value):
            content = self._container(value, depth)
        elif isinstance(value, bool | int | float | complex | str | bytes):
            content = repr(value)
        elif isinstance(value, bytearray | memoryview | array):
            content = self._bytes(np.frombuffer(memoryview(value).tobytes(), np.uint8))
        else:
            content = self._state(value, depth)
        return content

    def _state(self, value: Any, depth: int) -> object:  # noqa: ANN401
        """Return what a generator of random numbers, or a cell that others can write to, holds."""
        if isinstance(value, torch.Generator):
            return _bits(value.get_state())
        if isinstance(value, np.random.Generator):
            return self.content(value.bit_generator.state, depth)
        if isinstance(value, np.random.RandomState | random.Random):
            held = value.get_state() if isinstance(value, np.random.RandomState) else value.getstate()
            return self.content(held, depth)
        if isinstance(value, SobolEngine):
            return self.content(vars(value), depth)
        if isinstance(value, ContextVar) and depth < MAX_DEPTH:
            return self.content(value.get(None), depth + 1)
        return bytes(value.get_obj()) if isinstance(value, SynchronizedBase) else id(value)

    def _array(self, value: np.ndarray[Any, Any], depth: int) -> object:
        if value.dtype.hasobject:
            return self.content(value.tolist(), depth)
        if _is_file(value):
            return id(value)
        return self._bytes(np.ascontiguousarray(value).ravel().view(np.uint8))

    def _bytes(self, held: np.ndarray[Any, Any]) -> object:
        self._bytes_left -= held.nbytes
        if self._bytes_left < 0:
            return self._lost()
        return held.tobytes() if held.nbytes <= _MAX_KEPT else hashlib.sha256(held.data).digest()

    def _lost(self) -> object:
        self.is_whole = False
        return None

    def _container(self, value: Collection[Any], depth: int) -> object:
        if id(value) in self._open:
            return id(value)
        if depth >= MAX_DEPTH or len(value) > self._num_left:
            return self._lost()
        self._open.add(id(value))
        try:
            return len(value), self._all_items(value, depth)
        finally:
            self._open.remove(id(value))

    def _all_items(self, value: Collection[Any], depth: int) -> object:
        items = list(chain.from_iterable(items_of(value)) if isinstance(value, Mapping) else value)
        is_sorted = isinstance(value, set | frozenset)
        if len(items) <= _MAX_KEPT:
            return self._items(items, depth, is_sorted=is_sorted)
        digest, items = hashlib.sha256(), sorted(items, key=repr) if is_sorted else items
        for first in range(0, len(items), _MAX_KEPT):
            digest.update(repr(self._items(items[first : first + _MAX_KEPT], depth)).encode())
        return digest.digest()

    def _items(self, items: list[Any], depth: int, *, is_sorted: bool = False) -> object:
        kinds = {*map(type, items)}
        # Pairs of a path and a label, say.
        inner = {*map(type, chain.from_iterable(items))} if kinds == {tuple} else kinds
        is_plain = inner <= _PLAIN
        self._num_left -= len(items) * (1 if is_plain else _COST)
        if self._num_left < 0:
            return self._lost()
        if is_plain:
            return repr(sorted(items, key=repr) if is_sorted else items)
        told = [self.content(item, depth + 1) for item in items]
        return sorted(told, key=repr) if is_sorted else told


def _is_file(value: Any) -> bool:  # noqa: ANN401  (an array, or what it's a view of)
    """Say whether an array is a file's that it can't write to."""
    is_read = not value.flags.writeable
    while isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
        value = value.base
    return is_read and isinstance(value, np.memmap)


def _bits(tensor: Tensor) -> object:
    """Return a tensor's content. Version counters don't tell: kernels of norms and `.data` write without marking."""
    if tensor.is_nested:
        return [_bits(part) for part in tensor.detach().unbind()]
    if (part := getattr(tensor.detach(), "to_local", None)) is not None:  # of a sharded one, this rank's
        tensor = part()
    if parts := sparse_parts(tensor.detach()):
        return tensor.layout, tuple(tensor.shape), *map(_bits, parts)
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return id(tensor), tensor._version  # noqa: SLF001
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    if flat.numel() > _MAX_COPIED:
        bits = flat.view(_INTEGERS[flat.element_size()])
        whole = bits.numel() - bits.numel() % _NUM_PARTS
        parts = bits[:whole].view(_NUM_PARTS, -1).split(_TOGETHER)
        flat = torch.cat([*(some.sum(1, dtype=torch.int64) for some in parts), bits[whole:].long()])
    return tensor.dtype, tuple(tensor.shape), flat.cpu().view(torch.uint8).numpy().tobytes()
