"""Reads the user's functions: what their code names, and which code is a library's."""

from __future__ import annotations

import dis
import hashlib
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from cosmati.core.function_code import codes_in, names_read

_MAX_FUNCTIONS = 32
"""Of which the names are read: functions name others."""
_MAX_FILLING = 1000


def cell_content(cell: types.CellType) -> object:
    """Return what a closure's cell holds, None before it's filled."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


@lru_cache(maxsize=1 << 14)
def methods_called(code: types.CodeType) -> frozenset[str]:
    """Return the names of the methods that a function's code calls: not those of attributes that it reads."""
    # From Python 3.12 on, one operation loads both, and a bit tells them apart.
    both = ("LOAD_ATTR", "LOAD_SUPER_ATTR") if sys.version_info >= (3, 12) else ()
    steps = [step for one in codes_in(code) for step in dis.get_instructions(one)]
    return frozenset(
        step.argval for step in steps if step.opname == "LOAD_METHOD" or (step.opname in both and (step.arg or 0) & 1)
    )


def globals_of(code: types.CodeType) -> list[str]:
    """Return the globals that a function's code reads, and doesn't write: what it writes is state."""
    return sorted(_named_by(code, "LOAD_GLOBAL") - _named_by(code, "STORE_GLOBAL"))


def globals_touched(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a function's code reads or writes: not what it names as attributes of something else."""
    return _named_by(code, *_OF_GLOBALS)


def files_imported(code: types.CodeType) -> frozenset[str]:
    """Return the full names of the modules that a function imports when it runs."""
    return _named_by(code, "IMPORT_NAME")


_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
"""The last two are those of a class within a function, by release of Python."""


@lru_cache(maxsize=1 << 14)
def _named_by(code: types.CodeType, *operations: str) -> frozenset[str]:
    """Return the names in a code's steps of some kinds, and in those of the functions within it."""
    steps = (step for one in codes_in(code) for step in dis.get_instructions(one))
    return frozenset(step.argval for step in steps if step.opname in operations)


def names_said(functions: Iterable[types.FunctionType], limit: int = _MAX_FUNCTIONS) -> frozenset[str]:
    """Return the names, and the strings, in functions' code and in that of the user's functions which they name."""
    codes = [code for function in reached(functions, limit) for code in codes_in(function.__code__)]
    strings = {one for code in codes for one in code.co_consts if isinstance(one, str)}
    return frozenset(strings.union(*(code.co_names for code in codes)))


def reached(functions: Iterable[types.FunctionType], limit: int = _MAX_FUNCTIONS) -> Iterator[types.FunctionType]:
    """Yield the user's functions among some, and those that they name."""
    known: set[int] = set()
    waiting = list(functions)
    while waiting and len(known) < limit:
        function = waiting.pop()
        if id(function) in known or is_library(function.__module__):
            continue
        known.add(id(function))
        yield function
        held = [cell_content(cell) for cell in function.__closure__ or ()]
        held += [function.__globals__.get(name) for name in globals_of(function.__code__)]
        named = names_read(function.__code__)
        modules = [one for one in held if isinstance(one, types.ModuleType) and not is_library(one.__name__)]
        held += [vars(module).get(name) for module in modules for name in sorted(named & {*vars(module)})]
        waiting += [one for one in map(uncached, held) if isinstance(one, types.FunctionType)]


def names_written(functions: Iterable[types.FunctionType], limit: int = _MAX_FUNCTIONS) -> frozenset[str]:
    """Return the globals and attributes that functions, and those that they name, give new values: their state."""
    codes = [function.__code__ for function in reached(functions, limit)]
    return frozenset().union(*(_named_by(code, kind) for code in codes for kind in ("STORE_GLOBAL", "STORE_ATTR")))


def names_filled(functions: Iterable[types.FunctionType]) -> frozenset[str]:
    """Return the globals and attributes into which functions, and those that they name, store by item: `CACHE[k] = 1`.

    Of globals that are containers, those too that they add to by a method: `SEEN.add(k)`. Not those that are only
    counted up (`CACHE[key] += 1`).
    """
    found = list(reached(functions, _MAX_FILLING))
    stored = {name for function in found for code in codes_in(function.__code__) for name in _filled_by(code)}
    added = {
        name
        for function in found
        for code in codes_in(function.__code__)
        for name in _added_to(code)
        if isinstance(function.__globals__.get(name), dict | list | set | deque)
    }
    return frozenset(stored | added)


@lru_cache(maxsize=1 << 14)
def _filled_by(code: types.CodeType) -> frozenset[str]:
    steps = list(dis.get_instructions(code))
    stores = [index for index, step in enumerate(steps) if step.opname in ("STORE_SUBSCR", "STORE_SLICE")]
    return frozenset(name for index in stores if (name := _container(steps[:index], steps[index])))


def _container(steps: Sequence[dis.Instruction], store: dis.Instruction) -> str:
    """Return by which name the container was loaded whose item is stored: its source begins where the item's does."""
    start, end = _span(store)
    inner = [step for step in steps if None not in start and _span(step)[0] == start]
    # What's called gives a container of its own; and `CACHE[key] += 1` loads the item.
    if any(step.opname.startswith("CALL") or _span(step)[1] == end for step in inner):
        return ""
    return next((str(one.argval) for one in reversed(inner) if one.opname in ("LOAD_GLOBAL", "LOAD_ATTR")), "")


def _span(step: dis.Instruction) -> tuple[tuple[int | None, int | None], tuple[int | None, int | None]]:
    at = step.positions
    assert at is not None, "Python tells it from 3.11 on"
    return (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)


@lru_cache(maxsize=1 << 14)
def _added_to(code: types.CodeType) -> frozenset[str]:
    """Return the globals of which a method is called that adds something."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    return frozenset(
        str(one.argval)
        for one, method in pairwise(steps)
        if one.opname == "LOAD_GLOBAL" and method.opname in ("LOAD_METHOD", "LOAD_ATTR") and method.argval in _ADDS
    )


_ADDS = frozenset({"add", "append", "setdefault", "update"})


def functions_within(value: object) -> list[types.FunctionType]:
    """Return the user's functions that run when a loss or a model is called: its own, its methods, its modules'."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, types.FunctionType):
        return [value]
    owner = value.__self__ if isinstance(value, types.MethodType) else value
    held = list(owner.modules()) if isinstance(owner, nn.Module) else [owner]
    kinds = {one if isinstance(one, type) else type(one) for one in held}
    functions = [function for kind in sorted(kinds, key=repr) for function in methods_of(kind)]
    return functions + hooks_of(held)


def hooks_of(modules: Iterable[object]) -> list[types.FunctionType]:
    """Return the functions that are hooks of modules; of other objects, none."""
    hooks = [hook for one in modules for kind in HOOKS for hook in (getattr(one, kind, None) or {}).values()]
    return [hook for hook in hooks if isinstance(hook, types.FunctionType)]


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module keeps its hooks."""


_SET_UP = frozenset({"__init__", "__post_init__", "__new__"})
_OF_DATA = frozenset(
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __repr__ __str__ __reduce__ __getstate__ __setstate__ "  # noqa: SIM905
    "__copy__ __deepcopy__ __replace__ __setattr__ __delattr__".split()
)
"""Methods that speak of every attribute, whatever the rest reads; a dataclass has them made."""


def methods_of(kind: type) -> list[types.FunctionType]:
    """Return the functions of the user's own classes: not those that set an object up, compare or print it."""
    own = [one for one in kind.__mro__ if not is_library(one.__module__)]
    named = [(name, value) for one in own for name, value in vars(one).items() if name not in _SET_UP | _OF_DATA]
    return [function for _, value in named for function in functions_of(value)]


def defaults_of(function: types.FunctionType) -> list[object]:
    """Return the defaults of a function's arguments, those of keywords by name."""
    return [*(function.__defaults__ or ()), *(value for _, value in sorted((function.__kwdefaults__ or {}).items()))]


def attributes_of(kind: type) -> dict[str, object]:
    """Return the attributes of a class of the user's own, with what it inherits of others of theirs."""
    own = [one for one in reversed(kind.__mro__) if not is_library(one.__module__)]
    return {name: value for one in own for name, value in vars(one).items()}


def functions_of(value: object) -> list[types.FunctionType]:
    """Return the functions of a class's attribute: a method's, a property's."""
    held: list[object]
    if isinstance(value, property):
        held = [value.fget, value.fset]
    else:
        held = [getattr(value, "__func__", None) or getattr(value, "func", None) or value]
    return [one for one in map(uncached, held) if isinstance(one, types.FunctionType)]


def uncached(value: Any) -> object:  # noqa: ANN401
    """Return the function within what `functools.cache` or `lru_cache` made of it, anything else as it is."""
    return value.__wrapped__ if isinstance(value, CACHED) else value


CACHED = type(lru_cache(len))
"""What they make of a function."""


def code_digest(*functions: types.FunctionType) -> str:
    """Return the digest of functions' code, and by which Python: another one compiles it to another."""
    told = []
    for doc, code in [(one.__doc__ or "", code) for one in functions for code in codes_in(one.__code__)]:
        plain = [c for c in code.co_consts if not isinstance(c, types.CodeType) and c != doc]
        plain = [sorted(c, key=repr) if isinstance(c, frozenset) else c for c in plain]
        told.append((code.co_code.hex(), code.co_names, plain))
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    return f"{digest} of Python {sys.version_info[0]}.{sys.version_info[1]}"


SPAWNED = "__mp_main__"
"""The name that the script's module has in a process which multiprocessing spawned."""


def module_of(value: object) -> str:
    """Return the name of the module that a class or function is of; the script's is `__main__` in every process."""
    module = str(getattr(value, "__module__", None))
    return "__main__" if module == SPAWNED else module


_SITES = frozenset({"site-packages", "dist-packages"})


@cache
def is_library(module: str | None) -> bool:
    """Say whether a module is a library's, by where it lies."""
    top = (module or "").partition(".")[0]
    if top in ("cosmati", "torch", "numpy", "builtins"):
        return True
    if top in ("", "__main__", SPAWNED):
        return False
    found = sys.modules.get(str(module)) or sys.modules.get(top)
    file = getattr(found, "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names
    path = Path(file)
    return bool(_SITES & {*path.parts}) or path.is_relative_to(sysconfig.get_paths()["stdlib"])
