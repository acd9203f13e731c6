"""Whether somebody has changed a batch since it was given: a loss in place, or a layer with `inplace=True`.

What a loss puts into a batch's lists and dictionaries reaches nobody: these are its own. The tensors in them aren't. A
tensor has a count of its changes, and reading it costs nothing. An array has none: one of up to 64 KiB is kept whole,
and of a larger one 4,096 sums of its bits, which takes 0.1 ms a megabyte. What is written past the count, through
`.data` or an array that shares the memory, isn't seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from cosmati.core.batch import Batch, Data
from cosmati.core.containers import shallow_copy
from cosmati.errors import DataError
from cosmati.train.content import content_digest
from cosmati.train.user_objects import fields_of

_MAX_KEPT = 1 << 16
"""Bytes of the largest array that's kept whole."""
_NUM_SUMS = 1 << 12
_MAX_DEPTH = 12
_MAX_PARTS = 2_000
"""Of one batch that are looked at."""
_ARRAYS = (Tensor, np.ndarray)
_PLAIN = frozenset({str, bytes, bool, int, float, complex, type(None)})
_Parts = Mapping[Any, Any]
"""Tensors and arrays by the way that leads to them, and what objects of the user's hold beside them."""


class Mark:
    """A batch's tensors and arrays as they are now.

    Args:
        data: the batch.
    """

    def __init__(self, data: Data) -> None:
        self._parts = _parts_of(data)
        self._states = _states_of(self._parts)

    def is_same(self, data: Data) -> bool:
        """Return whether a batch has the same parts as then, each as it was, and no others."""
        now = _parts_of(data)
        is_same = now.keys() == self._parts.keys() and _states_of(now) == self._states and len(now) < _MAX_PARTS
        return is_same and all(now[path] is part for path, part in self._parts.items() if isinstance(part, _ARRAYS))

    def has_changed(self, data: Data) -> bool:
        """Return whether a tensor or an array of then is another one now; what was added beside them doesn't count."""
        return bool(self.changed_in(data))

    def changed_in(self, data: Data) -> list[Any]:
        """Return what stands now where a tensor or an array of then has changed."""
        if self.is_same(data):
            return []
        now, changed = _parts_of(data), []
        for (path, part), was, state in zip(self._parts.items(), self._states, _states_of(self._parts), strict=True):
            if isinstance(part, _ARRAYS):
                other = now.get(path)
                if was != state or (other is not part and content_digest(other) != content_digest(part)):
                    changed.append(other)
        return changed


class Written:
    """What steps have changed in place, for as long as a data set or somebody else holds it, and may give it again."""

    def __init__(self) -> None:
        self._held: dict[object, tuple[ReferenceType[Any], object]] = {}

    def add(self, parts: Iterable[Any]) -> None:
        """Take note of tensors and arrays, as steps have left them."""
        for part in parts:
            if isinstance(part, _ARRAYS):
                where = _where(part)
                self._held[where] = ref(_owner_of(part), partial(self._forget, where)), _content(part)

    def _forget(self, where: object, _: object) -> None:
        self._held.pop(where, None)

    def has_part_of(self, data: Data) -> bool:
        """Return whether a batch is, in part, as a step has left it: a buffer that was filled anew isn't."""
        for part in _parts_of(data).values() if self._held else ():
            known = self._held.get(_where(part)) if isinstance(part, _ARRAYS) else None
            if known is not None and known[1] == _content(part):
                return True
        return False


class Repeated:
    """Batches for passes that follow one another: each has containers of its own, and the rows that were given.

    Args:
        batches: as they are now, bare or not.
    """

    def __init__(self, batches: Iterable[Data]) -> None:
        self._batches = [with_own_containers(batch) for batch in batches]
        self._marks = [Mark(batch) for batch in self._batches]

    def given_to(self, reader: str) -> list[Data]:
        """Return the batches for one pass.

        Args:
            reader: what reads them, in words.

        Raises:
            DataError: an earlier pass has changed them in place.
        """
        if any(mark.has_changed(batch) for mark, batch in zip(self._marks, self._batches, strict=True)):
            msg = (
                f"{reader} would read other rows than were given: a loss, a metric or the model's first layers have "
                "changed the batch in place before it. Let them change a copy (x = x.clone(); ReLU without "
                "inplace=True), and set no attribute of a batch object anew."
            )
            raise DataError(msg)
        return [with_own_containers(batch) for batch in self._batches]


def with_own_containers(data: Data) -> Data:
    """Return a batch, or a bare nest, whose lists and dictionaries are nobody else's; the tensors are the same."""
    if isinstance(data, Batch):
        return dataclasses.replace(data, data=shallow_copy(data.data))
    return shallow_copy(data)


def change_since(given: Data | Sequence[Batch]) -> Callable[[], bool]:
    """Take note of a step's rows, whole or in microbatches; return what tells whether they've been changed."""
    batches = list(given) if isinstance(given, list) and given and isinstance(given[0], Batch) else [given]
    marks = [Mark(batch) for batch in batches]
    return lambda: any(mark.has_changed(batch) for mark, batch in zip(marks, batches, strict=True))


def _owner_of(part: Tensor | np.ndarray[Any, Any]) -> object:
    """Return what a view is of: the view goes with its batch, and that stays."""
    base: Any = part
    while isinstance(base, np.ndarray):
        part, base = base, base.base
    part = base if isinstance(base, Tensor) else part
    # Tensors that share memory (`detach()`, `data`) share this object, for as long as the memory is there.
    return part.untyped_storage() if isinstance(part, Tensor) and isinstance(_where(part), tuple) else part


def _where(part: Tensor | np.ndarray[Any, Any]) -> object:
    if isinstance(part, np.ndarray):
        return part.ctypes.data, part.shape, part.strides
    has_memory = part.layout is torch.strided and not part.is_nested and part.device.type != "meta" and part.numel()
    return (part.data_ptr(), part.shape, part.stride()) if has_memory else id(part)


def _content(part: Tensor | np.ndarray[Any, Any]) -> object:
    # An array may share a tensor's memory and fill it past its count; an accelerator's none, and a copy would wait.
    if isinstance(part, Tensor) and part.device.type == "cpu" and isinstance(_where(part), tuple):
        part = part.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _state(part)


def _parts_of(data: Data) -> _Parts:
    data = data.data if isinstance(data, Batch) else data
    if type(data) in (tuple, list, dict):  # The usual case, in a microsecond.
        found = data if type(data) is dict else dict(enumerate(data))
        if {*map(type, found.values())} == {Tensor}:
            return found.copy()
    return dict(islice(_walk(data, (), ()), _MAX_PARTS))


def _walk(node: Any, path: tuple[object, ...], within: tuple[int, ...]) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    if isinstance(node, _ARRAYS):
        yield (path[0] if len(path) == 1 else path), node
    elif callable(node) or len(within) > _MAX_DEPTH or id(node) in within:
        return
    else:
        if isinstance(node, list | tuple):
            if {*map(type, node)} <= _PLAIN:
                return
            held: dict[Any, Any] = dict(enumerate(node))
        elif isinstance(node, Mapping):
            held = dict(node)
        else:
            held = fields_of(node)
            yield (*path, "is"), {name: value for name, value in held.items() if type(value) in _PLAIN}
        for name, child in held.items():
            if type(child) not in _PLAIN:
                yield from _walk(child, (*path, name), (*within, id(node)))


def _states_of(parts: _Parts) -> list[object]:
    try:
        return [part._version for part in parts.values()]  # noqa: SLF001
    except (AttributeError, RuntimeError):  # Some have none: arrays, and tensors of inference mode.
        return [_state(part) for part in parts.values()]


def _state(part: object) -> object:
    """Return what's another one when a part was changed."""
    if isinstance(part, Tensor):
        return None if part.is_inference() else part._version  # noqa: SLF001
    if not isinstance(part, np.ndarray):
        return part
    if part.dtype.hasobject:
        return content_digest(part)
    held = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    if held.nbytes <= _MAX_KEPT:
        return held.tobytes()
    whole = held.nbytes - held.nbytes % (8 * _NUM_SUMS)
    sums = held[:whole].view(np.uint64).reshape(_NUM_SUMS, -1).sum(1)
    return sums.tobytes() + held[whole:].tobytes()
