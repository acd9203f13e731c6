"""Whether somebody has changed a batch since it was given: a loss in place, or a layer with `inplace=True`.

What a loss puts into a batch's lists and dictionaries reaches nobody: these are its own. The tensors in them aren't. A
tensor has a count of its changes, and reading it costs nothing. An array has none: one of up to 64 KiB is kept whole,
and of a larger one 4,096 sums of its words, each weighted by its place so that their order counts, which takes 0.3 ms a
megabyte. What is written past the count, through `.data` or an array that shares the memory, isn't seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from cosmati.core.batch import Batch, Data
from cosmati.core.containers import shallow_copy
from cosmati.errors import DataError
from cosmati.train.content import content_digest
from cosmati.train.user_objects import fields_of

_MAX_KEPT = 1 << 16
"""Bytes of the largest array that's kept whole."""
_NUM_SUMS = 1 << 12
_VERSION = operator.attrgetter("_version")
_MAX_DEPTH = 12
_MAX_PARTS = 2_000
"""Of one batch that are looked at."""
ARRAYS = (Tensor, np.ndarray)
_PLAIN = frozenset({str, bytes, bool, int, float, complex, type(None)})
_Parts = Mapping[Any, Any]
"""Tensors and arrays by the way that leads to them, and what objects of the user's hold beside them."""


class Mark:
    """A batch's tensors and arrays as they are now.

    Args:
        data: the batch.
    """

    def __init__(self, data: Data) -> None:
        nest = data.data if isinstance(data, Batch) else data
        # The usual case: nobody puts another tensor into a tuple.
        self._fixed = nest if type(nest) is tuple and {*map(type, nest)} == {Tensor} else ()
        self._held = {} if self._fixed else parts_of(nest)
        self._states = _states_of(self._fixed or self._held.values())

    @property
    def _parts(self) -> _Parts:
        return dict(enumerate(self._fixed)) if self._fixed else self._held

    def is_same(self, data: Data) -> bool:
        """Return whether a batch has the same parts as then, each as it was, and no others."""
        nest = data.data if isinstance(data, Batch) else data
        if nest is self._fixed:
            return _states_of(self._fixed) == self._states
        now, then = parts_of(nest), self._parts
        if now.keys() != then.keys() or _states_of(now.values()) != self._states or len(now) >= _MAX_PARTS:
            return False
        if all(map(operator.is_, now.values(), then.values())):
            return True
        return all(_is_it(now[path], part) for path, part in then.items() if isinstance(part, ARRAYS))

    def has_changed(self, data: Data) -> bool:
        """Return whether a tensor or an array of then is another one now; what was added beside them doesn't count."""
        return bool(self.changed_in(data))

    def changed_in(self, data: Data) -> list[Any]:
        """Return what stands now where a tensor or an array of then has changed."""
        if self.is_same(data):
            return []
        now, then, changed = parts_of(data), self._parts, []
        for (path, part), was, state in zip(then.items(), self._states, _states_of(then.values()), strict=True):
            if isinstance(part, ARRAYS):
                other = now.get(path)
                if was != state or (other is not part and content_digest(other) != content_digest(part)):
                    changed.append(other)
        return changed


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


def _is_it(now: object, part: object) -> bool:
    """Return whether it's the part of then, of the same state: a data frame makes arrays over its columns each time."""
    if now is part or not (isinstance(now, np.ndarray) and isinstance(part, np.ndarray)):
        return now is part
    return bool(now.dtype == part.dtype and now.shape == part.shape)


def with_own_containers(data: Data) -> Data:
    """Return a batch, or a bare nest, whose lists and dictionaries are nobody else's; the tensors are the same."""
    if isinstance(data, Batch):
        return dataclasses.replace(data, data=shallow_copy(data.data))
    return shallow_copy(data)


class StepRows:
    """A step's rows, whole or in microbatches, and whether they've been changed.

    Args:
        given: as they are now.
    """

    def __init__(self, given: Data | Sequence[Batch]) -> None:
        is_list = isinstance(given, list) and given and isinstance(given[0], Batch)
        self._marks = [(Mark(batch), batch) for batch in given] if is_list else [(Mark(given), given)]

    def have_changed(self) -> bool:
        """Return whether a tensor or an array of them is another one now."""
        return any(mark.has_changed(batch) for mark, batch in self._marks)

    def changed(self) -> list[Any]:
        """Return what stands now where a tensor or an array has changed."""
        return [part for mark, batch in self._marks for part in mark.changed_in(batch)]


def parts_of(data: Data) -> _Parts:
    """Return a batch's tensors and arrays by the way that leads to them, and the plain fields of objects there."""
    data = data.data if isinstance(data, Batch) else data
    if type(data) in (tuple, list, dict):  # The usual case, in a microsecond.
        found = dict(data if type(data) is dict else enumerate(data))
        if {*map(type, found.values())} == {Tensor}:
            return found
    return dict(islice(_walk(data, (), ()), _MAX_PARTS))


def _walk(node: Any, path: tuple[object, ...], within: tuple[int, ...]) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    if isinstance(node, ARRAYS):
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
        elif callable(getattr(node, "to_numpy", None)):
            held = _columns_of(node)
        else:
            held = fields_of(node)
            yield (*path, "is"), {name: value for name, value in held.items() if type(value) in _PLAIN}
        for name, child in held.items():
            if type(child) not in _PLAIN:
                yield from _walk(child, (*path, name), (*within, id(node)))


def _columns_of(frame: Any) -> dict[Any, Any]:  # noqa: ANN401
    """Return arrays over a data frame's columns, or over a column: who writes to it makes others, or changes these."""
    if not hasattr(frame, "columns"):
        return {"values": np.asarray(frame)}
    return {(i, name): np.asarray(frame[name]) for i, name in enumerate(frame.columns)}


def _states_of(parts: Collection[Any]) -> list[object]:
    try:
        return [*map(_VERSION, parts)]
    except (AttributeError, RuntimeError):  # Some have none: arrays, and tensors of inference mode.
        return [state_of(part) for part in parts]


def state_of(part: object) -> object:
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
    whole = held.nbytes - held.nbytes % (4 * _NUM_SUMS)
    words = held[:whole].view(np.uint32).reshape(_NUM_SUMS, -1)
    # An odd factor keeps each bit of a word. Weights in a series would miss some exchanges: a, b, b, a for b, a, a, b.
    weights = np.frombuffer(hashlib.shake_128().digest(8 * words.shape[1]), np.uint64) | np.uint64(1)
    sums = np.einsum("ij,j->i", words, weights, dtype=np.uint64)
    return sums.tobytes() + held[whole:].tobytes()
