"""Where a model, a loss or a hook keeps state: parameters, buffers, attributes, closures, globals that it names.

A loss is any callable: a function that closes over a criterion, a method of a task, a `partial`. What it holds is found
by following names, a few levels deep, and not into libraries.
"""

from __future__ import annotations

import copy
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_CLASSES = (bool, int, float, Tensor, np.ndarray, list, dict, set, deque)
"""Kinds of what a class keeps for all its objects, among methods and constants."""
_SET_ONCE = frozenset({"problem_type"})
"""What Hugging Face's classifiers set in their configuration at the first batch, from the number of labels."""
_MAX_DEPTH = 4
_MAX_ITEMS = 100
"""Items of a container in which modules and objects are looked for."""
_LIBRARIES = frozenset({"torch", "numpy", "cosmati", "builtins", *sys.stdlib_module_names}) - {"__main__"}
_Containers = list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any] | deque[Any]
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)


class Place(NamedTuple):
    """A place that keeps a value.

    Attributes:
        name: path of names that lead there.
        kind: `parameter`, `buffer` or `attribute`.
        value: as it is now.
        owner: the module whose parameter or buffer it is; None for another place.
        is_persistent: a buffer that belongs into a checkpoint.
        put: puts another value there; None where it can't be.
    """

    name: str
    kind: str
    value: object
    owner: nn.Module | None = None
    is_persistent: bool = False
    put: Callable[[Any], None] | None = None


def places_in(roots: Mapping[str, object]) -> Iterator[Place]:
    """Yield each place once that some models and losses reach.

    A class or a function may declare names that nothing reads back: `forward_caches = ("history",)`.

    Args:
        roots: by the name with which their places' names begin.
    """
    walk = _Walk()
    for name, root in roots.items():
        yield from walk.inside(name, root, 0)


def remember(roots: Mapping[str, object]) -> Callable[[], None]:
    """Copy what models and losses hold beside parameters; return a function that puts it back."""
    kept = [(place, _copied(place.value)) for place in places_in(roots) if place.kind != "parameter"]
    modules = [module for root in roots.values() if isinstance(root, nn.Module) for module in root.modules()]
    # What wasn't there is taken away: a cache, a layer that is made when it's first run.
    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    known = [(held, set(held)) for m in plain for held in (vars(m), m._buffers, m._modules)]  # noqa: SLF001

    def put_back() -> None:
        for held, names in known:
            for name in held.keys() - names:
                del held[name]
        with torch.no_grad():
            for place, copied in kept:
                _restore(place.value, copied)
                if place.put is not None:
                    place.put(place.value)

    return put_back


def _copied(value: object) -> object:
    """Return a copy of what may be written to in place, None of anything else."""
    if isinstance(value, Tensor):
        # An expanded one is read only; a huge one is data.
        is_written = value.layout is torch.strided and 0 not in value.stride() and not isinstance(value, nn.Parameter)
        return value.detach().clone() if is_written and value.nbytes <= _MAX_STATE_BYTES else None
    is_small = isinstance(value, np.ndarray) and value.nbytes <= _MAX_BYTES and not isinstance(value, np.memmap)
    return copy.copy(value) if is_small or type(value) in (list, dict, set, deque) else None


def _restore(value: Any, copied: Any) -> None:  # noqa: ANN401  (of the kinds that are copied)
    """Write a copy back, in place: others may hold the same object."""
    if copied is None:
        return
    if isinstance(value, Tensor):
        value.copy_(copied)
    elif isinstance(value, np.ndarray | list):
        value[:] = copied
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(copied)


class _Walk:
    def __init__(self) -> None:
        self._seen: set[int] = set()

    def inside(self, path: str, value: object, depth: int) -> Iterator[Place]:
        """Yield the places within a value."""
        if isinstance(value, partial):
            yield from self.inside(path, value.func, depth)
            held = dict(enumerate(value.args)) | value.keywords
            for key, item in held.items():
                yield from self._at(f"{path}({key})", item, depth + 1, None)
        elif isinstance(value, types.MethodType):
            yield from self.inside(path, value.__self__, depth)
        elif id(value) in self._seen or depth > _MAX_DEPTH:
            return
        elif isinstance(value, nn.Module):
            for name, module in value.named_modules():
                yield from self._module(f"{path}.{name}".strip("."), module, depth)
        elif isinstance(value, types.FunctionType):
            self._seen.add(id(value))
            yield from self._function(path, value, depth)
        elif isinstance(value, _CONTAINERS):
            items = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
            for key, item in items[:_MAX_ITEMS]:
                if isinstance(item, nn.Module | types.FunctionType | types.MethodType | partial) or _is_users(item):
                    yield from self.inside(f"{path}[{key}]", item, depth + 1)
        elif hasattr(value, "__dict__") and (depth == 0 or _is_users(value)):
            self._seen.add(id(value))
            yield from self._attributes(path, value, vars(value), depth)

    def _at(self, path: str, value: object, depth: int, put: Callable[[Any], None] | None) -> Iterator[Place]:
        """Yield a place, and those within what it holds."""
        if not isinstance(value, types.ModuleType | type | types.BuiltinFunctionType):
            if not isinstance(value, nn.Module | types.FunctionType | types.MethodType | partial):
                yield Place(path, "attribute", value, put=put)
            if not isinstance(value, Tensor | np.ndarray):
                yield from self.inside(path, value, depth)

    def _attributes(
        self, path: str, owner: object, values: dict[str, Any], depth: int, skipped: frozenset[str] = frozenset()
    ) -> Iterator[Place]:
        declared = [vars(kind).get("forward_caches", ()) for kind in type(owner).__mro__]
        skipped = skipped.union(values.get("forward_caches", ()), _SET_ONCE, *declared)
        for name, value in list(values.items()):
            if name not in skipped:
                yield from self._at(f"{path}.{name}".lstrip("."), value, depth + 1, partial(values.__setitem__, name))
        for kind in type(owner).__mro__:
            if _top(kind.__module__) not in _LIBRARIES and id(kind) not in self._seen:
                self._seen.add(id(kind))
                for name, value in list(vars(kind).items()):
                    if isinstance(value, _OF_CLASSES) and name not in skipped and not name.startswith("__"):
                        yield Place(f"{kind.__name__}.{name}", "attribute", value, put=partial(setattr, kind, name))

    def _module(self, path: str, module: nn.Module, depth: int) -> Iterator[Place]:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        lost = module._non_persistent_buffers_set  # noqa: SLF001
        for name, parameter in module.named_parameters(recurse=False):
            yield Place(f"{path}.{name}".lstrip("."), "parameter", parameter, module)
            for kind in _PARAMETER_HOOKS:
                yield from self._hooks(f"{path}.{name}", getattr(parameter, kind, None), depth)
        for name, buffer in dict(module._buffers.items()).items():  # noqa: SLF001  (those that are None too)
            # TorchScript's take no other tensor.
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            put = None if is_scripted else partial(module._buffers.__setitem__, name)  # noqa: SLF001
            yield Place(f"{path}.{name}".lstrip("."), "buffer", buffer, module, name not in lost, put)
        for kind in _MODULE_HOOKS:
            yield from self._hooks(path, getattr(module, kind, None), depth)
        yield from self._attributes(path, module, vars(module), depth, _OF_EVERY_MODULE)
        if _is_users(module):
            # What forward names beside itself: a registry of losses, a counter of the file's.
            yield from self.inside(f"{path}.forward".lstrip("."), type(module).forward, depth + 1)

    def _hooks(self, path: str, hooks: Mapping[int, object] | None, depth: int) -> Iterator[Place]:
        for hook in list((hooks or {}).values()):
            # The loop's own hooks know the step.
            if not getattr(hook, "__module__", "").startswith("cosmati.") and not isinstance(hook, partial):
                yield from self.inside(f"{path}.hook".lstrip("."), hook, depth + 1)

    def _function(self, path: str, function: types.FunctionType, depth: int) -> Iterator[Place]:
        if _top(function.__module__) in _LIBRARIES and depth > 0:
            return
        skipped = getattr(function, "forward_caches", ())
        for name, value, put in _named(function):
            if name not in skipped and not _is_library(value):
                yield from self._at(f"{path}.{name}".lstrip("."), value, depth + 1, put)


def _named(function: types.FunctionType) -> Iterator[tuple[str, object, Callable[[Any], None] | None]]:
    """Yield what a function closes over, has for defaults, and names among the globals of its file."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents, partial(setattr, cell, "cell_contents")
        except ValueError:  # not filled yet
            continue
    yield from ((f"default {index}", value, None) for index, value in enumerate(function.__defaults__ or ()))
    yield from ((name, value, None) for name, value in (function.__kwdefaults__ or {}).items())
    for name in sorted(_names_in(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name], partial(function.__globals__.__setitem__, name)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that a function's code reads, and the functions within it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_library(value: object) -> bool:
    """Say whether it's a module, a class, or a function that comes with a library."""
    if isinstance(value, types.FunctionType):
        return _top(value.__module__) in _LIBRARIES
    return isinstance(value, types.ModuleType | types.BuiltinFunctionType | type)


def _is_users(value: object) -> bool:
    """Say whether it's an object of a class that no library here has."""
    return hasattr(value, "__dict__") and not isinstance(value, type) and _top(type(value).__module__) not in _LIBRARIES


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MAX_COPIED = 1 << 16
"""Elements of the largest tensor that is compared whole; of a larger one, the sums of so many parts of its bits are."""
_NUM_PARTS = 4096
_MAX_BYTES = 1 << 24
_MAX_STATE_BYTES = 1 << 30
_MAX_LENGTH = 10_000
"""Of arrays and containers that are compared whole: a loss may name a whole data set."""


def content_of(value: object, depth: int = 0) -> object:
    """Return something that's equal to its like as long as the value is the same."""
    content: object = id(value)
    if isinstance(value, nn.Parameter) and depth:
        pass  # A list of a module's own parameters (a recurrent layer's): they move at each commit.
    elif isinstance(value, Tensor):
        content = _bits(value)
    elif isinstance(value, np.ndarray):
        is_small = value.nbytes <= _MAX_BYTES and not isinstance(value, np.memmap)
        content = (value.dtype.str, value.shape, value.tobytes() if is_small else id(value))
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        content = repr(value)
    elif depth < _MAX_DEPTH and isinstance(value, _CONTAINERS):
        content = len(value), [content_of(item, depth + 1) for item in _some(value)]
    return type(value), content


def _some(value: Mapping[Any, Any] | _Containers) -> list[Any]:
    """Return a container's items, in an order of their own; of a large one its first and last."""
    if isinstance(value, Mapping):
        items = [part for item in value.items() for part in item]
    else:
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
    return items if len(items) <= _MAX_LENGTH else [*items[:_MAX_ITEMS], *items[-_MAX_ITEMS:]]


def _bits(tensor: Tensor) -> object:
    """Return a tensor's content. Version counters don't tell: kernels of norms and `.data` write without marking."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        return id(tensor), tensor._version  # noqa: SLF001
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    if flat.numel() > _MAX_COPIED:
        bits = flat.view(_INTEGERS[flat.element_size()])
        whole = bits.numel() - bits.numel() % _NUM_PARTS
        flat = torch.cat([bits[:whole].view(_NUM_PARTS, -1).sum(1, dtype=torch.int64), bits[whole:].long()])
    return tensor.dtype, tuple(tensor.shape), flat.cpu().view(torch.uint8).numpy().tobytes()
