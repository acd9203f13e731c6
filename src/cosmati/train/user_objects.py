"""Which objects, functions and files are the user's own, and what they hold in slots and attributes."""

from __future__ import annotations

import sys
import threading
import types
import weakref
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from cosmati.train.user_code import CACHED, is_library
from cosmati.train.values import is_container, items_of

LIBRARIES = frozenset({"torch", "numpy", "cosmati", "builtins", *sys.stdlib_module_names}) - {"__main__"}
NAMESPACES = (Namespace, types.SimpleNamespace, threading.local)
MAX_ITEMS = 1000
"""Items of a container that are followed, each by itself."""


def fields_and_setters(owner: object, skipped: Collection[str] = ()) -> list[tuple[str, Any, Callable[[Any], None]]]:
    """Return an object's attributes but for some, those in slots too, and how to set them."""
    held = getattr(owner, "__dict__", {})
    slots = [(name, slot) for name, slot in _slots(type(owner)) if name not in skipped and hasattr(owner, name)]
    return [
        *((name, value, partial(held.__setitem__, name)) for name, value in held.items() if name not in skipped),
        *((name, slot.__get__(owner), partial(slot.__set__, owner)) for name, slot in slots),
    ]


def fields_of(value: object) -> dict[str, object]:
    """Return an object's attributes by name, those in slots too."""
    slots = [name for kind in type(value).__mro__ for name in _slot_names(kind) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slot_names(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _slots(kind: type) -> list[tuple[str, types.MemberDescriptorType]]:
    own = [one for one in kind.__mro__ if top_of(one.__module__) not in LIBRARIES]
    return [(n, one) for k in own for n, one in vars(k).items() if isinstance(one, types.MemberDescriptorType)]


def top_of(module: str | None) -> str:
    """Return the name of the package that a module is in."""
    return (module or "").partition(".")[0]


def leads_on(value: object, levels: int = 4) -> bool:
    """Say whether what's in a container is followed: containers of such, and whatever is deeper."""
    kinds = (nn.Module, types.FunctionType, types.MethodType, partial, weakref.ref, CACHED)
    if isinstance(value, kinds) or is_users_own(value) or written_by(value) is not None:
        return True
    if not is_container(value):
        return False
    within = enumerate(dict(items_of(value)).values() if isinstance(value, Mapping) else value)
    # Of others, and of many, the class tells: rows of data are such.
    distinct = {
        id(one) if n < MAX_ITEMS and (is_container(one) or callable(one)) else type(one): one for n, one in within
    }
    return not levels or any(leads_on(one, levels - 1) for one in distinct.values())


def written_by(value: Any) -> object:  # noqa: ANN401
    """Return the container, tensor or array whose method a built-in function is (`queue.append`); None of others."""
    if not isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        return None
    owner = value.__self__
    return owner if is_container(owner) or isinstance(owner, Tensor | np.ndarray) else None


def is_of_library(value: object) -> bool:
    """Say whether it's a file, a class, or a function that comes with a library."""
    if isinstance(value, types.FunctionType):
        return top_of(value.__module__) in LIBRARIES
    if isinstance(value, types.ModuleType | type):
        return is_library(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)
    return isinstance(value, types.BuiltinFunctionType) and written_by(value) is None


def is_users_own(value: object) -> bool:
    """Say whether it's a namespace, or an object of a class that no library here has."""
    if isinstance(value, NAMESPACES):
        return True
    is_own = not isinstance(value, type) and top_of(type(value).__module__) not in LIBRARIES
    return is_own and (hasattr(value, "__dict__") or bool(_slots(type(value))))
