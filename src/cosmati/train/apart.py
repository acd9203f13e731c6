"""Runs the user's code apart from its state: on copies, whatever of it lies outside the objects that are copied.

A copy of a model and its losses isn't apart from them: a function is never copied, nor its closure, defaults and
attributes; classes and modules of the user's own count and collect; code names globals. What the code reaches in these
places is copied together with model and losses, put there for as long as the copies run, and taken out again.
"""

from __future__ import annotations

import copy
import io
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cosmati.core.function_code import names_read
from cosmati.train.reach import cached_results
from cosmati.train.user_code import (
    CACHED,
    cell_content,
    files_imported,
    functions_of,
    globals_touched,
    is_library,
)
from cosmati.train.user_objects import is_users_own, written_by
from cosmati.train.values import is_container, items_of

LARGEST = 1 << 30
"""Bytes of tensors and arrays above which no copy is made."""

_MAX_VALUES = 200_000
_CONSTANTS = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device, np.generic)
_NO_COPIES = ("cosmati.train", "torch._dynamo", "torch._C._distributed_c10d")
"""Modules with objects that lead to all there is, or that a copy can't stand for."""


class SharedError(Exception):
    """A copy wouldn't be apart from what it was made of."""


class _Place(NamedTuple):
    """Where a value lies that no copy of an object takes along."""

    value: object
    get: Callable[[], object]
    put: Callable[[Any], None]


@contextmanager
def apart(value: Any) -> Iterator[Any]:  # noqa: ANN401  (a nest of the user's objects)
    """Give a deep copy whose code finds copies wherever it looks; afterwards everything is as it was.

    Args:
        value: a nest of models, losses and what they hold.

    Raises:
        SharedError: it holds what can't be copied apart: an open file, a logger, more than `LARGEST` bytes.
    """
    reach = _Reach()
    reach.follow(value)
    stands_for = reach.caches | {id(module): module for module in reach.modules}
    copied, placed = copy.deepcopy((value, [place.value for place in reach.places]), stands_for)
    try:
        for place, own in zip(reach.places, placed, strict=True):
            if own is not place.value:
                place.put(own)
        yield copied
    finally:
        for held, absent, remove in reach.namespaces:
            for name in [name for name in held if absent(name)]:
                remove(name)
        for place in reach.places:
            if place.get() is not place.value:
                place.put(place.value)


class _Reach:
    """What the code of some objects reaches.

    Attributes:
        places: outside the objects themselves.
        modules: imported ones, of which there's no copy.
        caches: for each cached function, by `id`, the same function with an empty cache.
        namespaces: that the code may add names to: which of its names aren't there yet, and how one is removed.
    """

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.modules: list[types.ModuleType] = []
        self.caches: dict[int, object] = {}
        self.namespaces: list[tuple[Mapping[str, Any], Callable[[str], bool], Callable[[str], object]]] = []
        self._seen: dict[object, object] = {}
        self._waiting: list[Any] = []
        self._num_bytes = 0

    def follow(self, value: object) -> None:
        """Follow everything that a value leads to.

        Raises:
            SharedError: it leads to what can't be copied.
        """
        self._waiting.append(value)
        while self._waiting:
            one = self._waiting.pop()
            if isinstance(one, _CONSTANTS) or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            if len(self._seen) > _MAX_VALUES:
                raise SharedError
            self._visit(one)

    def _visit(self, value: Any) -> None:  # noqa: ANN401
        if isinstance(value, Tensor | np.ndarray):
            self._num_bytes += value.nbytes
            if self._num_bytes > LARGEST:
                raise SharedError
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._waiting += [value.__func__, value.__self__]
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, partial):
            self._waiting += [value.func, *value.args, *value.keywords.values()]
        elif is_container(value):
            self._waiting += chain.from_iterable(items_of(value)) if isinstance(value, Mapping) else value
            self._object(value)
        elif isinstance(value, types.ModuleType):
            self.modules.append(value)
        elif isinstance(value, CACHED):
            self._cached(value)
        elif not isinstance(value, types.BuiltinFunctionType) or written_by(value) is not None:
            self._object(value)

    def _cached(self, function: Any) -> None:  # noqa: ANN401  (of the kind `CACHED`)
        self._waiting.append(function.__wrapped__)
        if is_library(function.__module__):
            return
        results = cached_results(function)
        # Anything else may be a model that was read from a file: that isn't done once more for each checkpoint.
        if results is None or not all(isinstance(one, Tensor | np.ndarray) or is_container(one) for _, one in results):
            raise SharedError
        self.caches[id(function)] = lru_cache(**function.cache_parameters())(function.__wrapped__)

    def _object(self, value: object) -> None:
        kind = type(value)
        # What ends with a copy may be the original's: an open file, a lock.
        if hasattr(kind, "__del__") or isinstance(value, io.IOBase | logging.Logger) or _leads_back(value):
            raise SharedError
        if kind.__module__.startswith(_NO_COPIES):
            raise SharedError
        self._waiting += [kind, *getattr(value, "__dict__", {}).values()]
        if not is_library(kind.__module__):
            members = [(name, member) for one in kind.__mro__ for name, member in vars(one).items()]
            slots = [name for name, member in members if isinstance(member, types.MemberDescriptorType)]
            self._waiting += [getattr(value, name) for name in slots if hasattr(value, name)]

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            if is_library(one.__module__) or issubclass(one, Enum) or ("class", id(one)) in self._seen:
                continue
            self._seen["class", id(one)] = one
            known = {*vars(one)}
            self.namespaces.append((vars(one), partial(_isnt_in, known), partial(type.__delattr__, one)))
            for name, value in list(vars(one).items()):
                self._waiting += functions_of(value)
                if isinstance(getattr(value, "__func__", None), CACHED):
                    raise SharedError
                is_method = hasattr(value, "__get__") and not isinstance(value, CACHED)
                if not (name.startswith(("__", "_abc_")) or is_method):
                    get, put = partial(vars(one).get, name), partial(type.__setattr__, one, name)
                    self._place(("in", id(one), name), value, get, put)

    def _function(self, function: types.FunctionType) -> None:
        cells = function.__closure__ or ()
        if is_library(function.__module__):
            # A decorator's: the function within it may be the user's.
            self._waiting += [one for one in map(cell_content, cells) if isinstance(one, types.FunctionType)]
            return
        for cell in cells:
            put = partial(setattr, cell, "cell_contents")
            self._place(("cell", id(cell)), cell_content(cell), partial(cell_content, cell), put)
        for name in ("__defaults__", "__kwdefaults__"):
            get, put = partial(getattr, function, name), partial(setattr, function, name)
            self._place((name, id(function)), get(), get, put)
        own = vars(function)
        self.namespaces.append((own, partial(_isnt_in, {*own}), own.__delitem__))
        self._names(own, {*own})
        code, globals_ = function.__code__, function.__globals__
        own_names, files = globals_touched(code), files_imported(code)
        self.namespaces.append((globals_, (own_names - {*globals_}).__contains__, globals_.__delitem__))
        self._names(globals_, {*own_names})
        imported = [sys.modules.get(name) for name in sorted(files)]
        self._modules([*map(globals_.get, sorted(own_names)), *imported], names_read(code))

    def _modules(self, values: list[Any], named: set[str]) -> None:
        """Follow what code names in modules of the user's own."""
        for module in values:
            if isinstance(module, types.ModuleType) and not is_library(module.__name__):
                held = vars(module)
                is_new = any(("in", id(held), name) not in self._seen for name in named & {*held})
                self._names(held, named)
                if is_new:
                    self._modules([held[name] for name in named & {*held}], named)

    def _names(self, held: dict[str, Any], names: set[str]) -> None:
        for name in names & {*held}:
            self._place(("in", id(held), name), held[name], partial(held.get, name), partial(held.__setitem__, name))

    def _place(self, key: object, value: object, get: Callable[[], object], put: Callable[[Any], None]) -> None:
        if key not in self._seen:
            self._seen[key] = value
            self.places.append(_Place(value, get, put))
            self._waiting.append(value)


def _leads_back(value: object) -> bool:
    """Say whether a copy of it leads to the original: `kept.append`, a module's weak reference to its parent."""
    if not isinstance(value, weakref.ref):
        return written_by(value) is not None
    return isinstance(value(), nn.Module | Tensor) or is_users_own(value())


def _isnt_in(known: set[str], name: str) -> bool:
    return name not in known
