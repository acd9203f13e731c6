"""What the user's code reaches by name: methods that call each other, and names that functions speak of."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from cosmati.core.function_code import codes_in, names_read
from cosmati.train.user_code import CACHED, functions_of, hooks_of, is_library, names_said

_SETS_UP = frozenset(
    {f"__{name}__" for name in "init post_init new repr str del eq hash reduce getstate setstate init_subclass".split()}  # noqa: SIM905
)


def methods_reached(kind: type, said: Iterable[str]) -> list[types.FunctionType]:
    """Return the methods of the user's own classes that code may run, those before which are called by them.

    Args:
        kind: a class.
        said: names in the code that runs them. Python's own (`__call__`, `__getitem__`) are run without being named.
    """
    own: dict[str, list[types.FunctionType]] = {}
    for one in kind.__mro__:
        for name, value in {} if is_library(one.__module__) else vars(one).items():
            own.setdefault(name, []).extend(functions_of(value))
    unnamed = [name for name in own if name[:2] == "__" == name[-2:] and name not in _SETS_UP]
    waiting = deque([*sorted(own.keys() & said), *unnamed])
    known, found = set(waiting), []
    while waiting:
        for function in own[waiting.popleft()]:
            found.append(function)
            called = sorted((names_in(function) & own.keys()) - known)
            waiting.extend(called)
            known.update(called)
    return found


def names_in(function: types.FunctionType) -> frozenset[str]:
    """Return the globals and attributes that a function names."""
    return frozenset(names_read(function.__code__))


def strings_in(function: types.FunctionType) -> set[str]:
    """Return the strings in a function: `getattr` takes names from there."""
    return {one for code in codes_in(function.__code__) for one in code.co_consts if isinstance(one, str)}


def said_by(losses: Iterable[object]) -> frozenset[str]:
    """Return the names in the code of losses: they call methods of the model that they're given."""
    return names_said(_run_by(losses))


def functions_run(model: nn.Module, losses: Sequence[object]) -> list[types.FunctionType]:
    """Return the user's functions and methods that losses and forward passes run, as far as names tell."""
    functions = _run_by(losses)
    said = said_within(model, names_said(functions)) | {"forward"}
    for kind in dict.fromkeys(map(type, model.modules())):
        functions += methods_reached(kind, said)
    return functions + hooks_of(model.modules())


def said_within(model: nn.Module, said: frozenset[str]) -> frozenset[str]:
    """Return some names, and those in the methods of a model's modules that they lead to, whichever comes first."""
    kinds = dict.fromkeys(map(type, model.modules()))
    while True:
        run = [function for kind in kinds for function in methods_reached(kind, said | {"forward"})]
        more = said.union(*map(names_in, run))
        if more == said:
            return said
        said = more


def _run_by(losses: Iterable[object]) -> list[types.FunctionType]:
    functions: list[types.FunctionType] = []
    for loss in losses:
        root = loss
        while isinstance(root, partial):
            root = root.func
        if isinstance(root, types.MethodType):
            functions += methods_reached(type(root.__self__), {getattr(root, "__name__", "")})
        elif isinstance(root, types.FunctionType):
            functions.append(root)
        else:
            functions += methods_reached(type(root), {"forward"})
    return functions


def cached_results(function: Any) -> list[tuple[str, object]] | None:  # noqa: ANN401  (of the kind `CACHED`)
    """Return what a cached function holds, by arguments as far as they're plain; None where Python doesn't tell.

    It's looked up among what the garbage collector sees: calling the function would run the user's code.
    """
    held, size = gc.get_referents(function), function.cache_info().currsize
    before = [index for index, one in enumerate(held) if one is function.__wrapped__][-1:]
    cache = held[before[0] - 1] if before else None  # CPython lists the cache, then the function.
    if not isinstance(cache, dict):
        return None
    found = list(cache.items())
    if any(type(value).__name__ == _LINK for value in cache.values()):
        # With a bound, the cache leads to links, and what they hold is listed before it: key, result, kind of link.
        listed = [one for one in held if not (isinstance(one, type) and one.__name__ in (_LINK, CACHED.__name__))]
        keys = {id(key) for key in cache}
        found = [pair for pair in zip(listed[::2], listed[1::2], strict=False) if id(pair[0]) in keys]
    if len(found) != size:
        return None
    told = [(_told(key), result) for key, result in found if type(result) not in _PLAIN]
    return sorted(told, key=lambda pair: (pair[0], id(pair[1])))


_LINK = "_lru_list_elem"
_PLAIN = frozenset({type(None), bool, int, float, str})


def _told(key: object) -> str:
    is_plain = type(key) in _PLAIN or (isinstance(key, tuple) and all(type(one) in _PLAIN for one in key))
    return f"[{key!r}]"[:40] if is_plain and key != () else ""
