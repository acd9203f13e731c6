"""Copies of the user's containers: what is put into one is in no other, and no code of the user's makes it anew."""

from __future__ import annotations

import copy
import dataclasses
import operator
import types
from argparse import Namespace
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

Data = Any
"""The user's own structure of tensors: no narrower type exists."""

_NAMESPACES = (types.SimpleNamespace, Namespace)


def rebuilt(function: Callable[[Data], Data], data: Data) -> Data:
    """Return a container of the same type with a function applied to each child; a leaf as it is."""
    if isinstance(data, Mapping):
        return with_items(data, {name: function(value) for name, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(function(value) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(function(value) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return with_fields(data, {f.name: function(getattr(data, f.name)) for f in dataclasses.fields(data)})
    return data


def with_items(data: Mapping[Any, Data], items: Mapping[Any, Data]) -> Any:  # noqa: ANN401  (of the same type)
    """Return a copy of a mapping with other values for some names; a dictionary where its type can't be copied."""
    made = _own_mapping(data) if isinstance(data, MutableMapping) else dict(data)
    for name, value in items.items():
        made[name] = value
    return made


def with_fields(data: Data, values: Mapping[str, Data]) -> Data:
    """Return a copy of a dataclass with other values in some fields, without its `__post_init__`.

    One that scales rows would scale them again. A field that the class computes follows from the others where
    computing it leaves these as they are.
    """
    made = copy.copy(data)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    fields = dataclasses.fields(data)
    if not all(field.init for field in fields):
        # It may write into its rows.
        given = {field.name: _cloned(getattr(made, field.name)) for field in fields if field.init}
        computed = dataclasses.replace(made, **given)
        if all(_is_untouched(getattr(computed, name), value) for name, value in given.items()):
            for field in fields:
                if not field.init:
                    object.__setattr__(made, field.name, getattr(computed, field.name))
    return made


def _cloned(data: Data) -> Data:
    if isinstance(data, Tensor):
        return data.clone()
    return data.copy() if isinstance(data, np.ndarray) else rebuilt(_cloned, data)


def _is_untouched(data: Data, given: Data) -> bool:
    return data is given and not (isinstance(data, Tensor) and not data.is_inference() and data._version)  # noqa: SLF001


def shallow_copy(data: Data) -> Data:
    """Return a nest with the same leaves in containers of its own: what's put into these, nobody else finds."""
    kind = type(data)
    if kind is Tensor or (kind is tuple and {*map(type, data)} == {Tensor}):
        return data
    if kind is dict:
        return {name: shallow_copy(value) for name, value in data.items()}
    if isinstance(data, tuple):
        items = [shallow_copy(item) for item in data]
        if not all(map(operator.is_, items, data)):
            data = kind(*items) if hasattr(data, "_fields") else kind(items)
        return data
    made: Any
    put: Callable[[Any, Data], object]
    if isinstance(data, list | MutableMapping):
        made = _own_mapping(data) if isinstance(data, MutableMapping) else _own_copy(data)
        put, held = made.__setitem__, dict(enumerate(data) if isinstance(data, list) else data)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        made = copy.copy(data)
        put, held = partial(object.__setattr__, made), {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
    elif isinstance(data, _NAMESPACES):
        made = copy.copy(data)
        put, held = partial(setattr, made), vars(data)
    else:
        return data
    for name, value in held.items():
        own = shallow_copy(value)
        if own is not value:
            put(name, own)
    return made


def _own_mapping(data: MutableMapping[Any, Data]) -> MutableMapping[Any, Data]:
    """Copy a mapping of any class; where copy and original still share their items, return a dictionary."""
    made = _own_copy(data)
    return made if isinstance(data, dict | UserDict) or not _writes_to(made, data) else dict(data)


def _own_copy(data: Any) -> Any:  # noqa: ANN401  (of the same type)
    """Copy a container, and those in its attributes: `copy.copy` hands on the one that a class keeps its items in."""
    made = copy.copy(data)
    held = getattr(data, "__dict__", {})
    if held is data:  # Its names are attributes.
        made.__dict__ = made
        return made
    for name, value in held.items():
        if isinstance(value, dict | list | set) and made.__dict__.get(name) is value:
            made.__dict__[name] = copy.copy(value)
    return made


def _writes_to(made: MutableMapping[Any, Data], data: MutableMapping[Any, Data]) -> bool:
    """Say whether what's put into a copy stands in the original, by trying; both are left as they were."""
    for name, value in data.items():
        if isinstance(value, Tensor | np.ndarray):
            other = copy.copy(value)
            try:
                made[name] = other
            except Exception:  # noqa: BLE001  (of the user's own class; what can't be written to, nobody changes)
                return False
            is_shared = data[name] is other  # noqa: PLR1733  (the copy may have written it)
            made[name] = value
            return is_shared
    return False
