"""Where a model, a loss or a hook keeps state: parameters, buffers, attributes, closures, globals that it names.

A loss is any callable: a function that closes over a criterion, a method of a task, a `partial`. What it holds is found
by following names, a few levels deep, and not into libraries.
"""

from __future__ import annotations

import copy
import sys
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cosmati.train.reach import cached_results, methods_reached, names_in, said_by, said_within, strings_in
from cosmati.train.user_code import CACHED, cell_content, files_imported, globals_touched, is_library
from cosmati.train.user_objects import (
    LIBRARIES,
    MAX_ITEMS,
    NAMESPACES,
    fields_and_setters,
    is_of_library,
    is_users_own,
    leads_on,
    top_of,
    written_by,
)
from cosmati.train.values import is_container, items_of

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK, RESULT = "(hook)", "(...)"
"""In the names of places within a hook, and within what a cached function holds."""
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_CLASSES = (bool, int, float, Tensor, np.ndarray, list, dict, set, deque, bytearray, array, CACHED)
"""Kinds of what a class keeps for all its objects, among methods and constants."""
_SET_ONCE = frozenset({"problem_type"})
"""What Hugging Face's classifiers set in their configuration at the first batch, from the number of labels."""
_IN_PLACE = (Tensor, np.ndarray, bytearray, array)
_UNFILLED = types.CellType()
_DATA, _CODE, _MAX_HOPS = 2, 1, 8
"""Costs of a hop to what an object holds and to what code names, and how far they lead."""
_OF_FUNCTIONS = frozenset({"forward", "backward", "setup_context"})
"""Methods of `torch.autograd.Function`, which nobody calls by name."""
_MAX_STATE_BYTES = 1 << 30
_CODE_KINDS = (
    *(nn.Module, types.FunctionType, types.MethodType, partial),
    *(types.ModuleType, type, types.BuiltinFunctionType),
)


class Place(NamedTuple):
    """A place that keeps a value.

    Attributes:
        name: path of names that lead there.
        kind: `parameter`, `buffer` or `attribute`.
        value: as it is now.
        owner: the module whose parameter or buffer it is; None for another place.
        is_persistent: a buffer that belongs into a checkpoint.
        put: puts another value there; None where it can't be.
        attribute: the name by which code has to speak of it; empty where it may be read otherwise.
        is_followed: not where it leads to more than is looked at.
    """

    name: str
    kind: str
    value: object
    owner: nn.Module | None = None
    is_persistent: bool = False
    put: Callable[[Any], None] | None = None
    attribute: str = ""
    is_followed: bool = True


def places_in(roots: Mapping[str, object], spoken: set[str] | None = None) -> Iterator[Place]:
    """Yield each place once that some models and losses reach.

    A class or a function may declare names that nothing reads back: `forward_caches = ("history",)`.

    Args:
        roots: by the name with which their places' names begin.
        spoken: takes all names and strings in the code that's reached.
    """
    walk, said = _Walk(), said_by(root for name, root in roots.items() if name)
    for name, root in roots.items():
        yield from walk.inside(name, root, 0, frozenset() if name else said)
    if spoken is not None:
        spoken |= walk.spoken


def remember(roots: Mapping[str, object]) -> Callable[[], None]:
    """Copy what models and losses hold beside parameters that train; return a function that puts it back."""
    modules = [module for root in roots.values() if isinstance(root, nn.Module) for module in root.modules()]
    places = list(places_in(roots))
    parameters = [place.value for place in places if isinstance(place.value, nn.Parameter)]
    own = {id(one) for root in roots.values() if isinstance(root, nn.Module) for one in root.parameters()}
    seen = {id(one) for one in parameters if one.requires_grad and id(one) in own}
    if sum(one.numel() * one.element_size() for one in parameters if id(one) not in seen) > _MAX_STATE_BYTES:
        seen |= {id(one) for one in parameters}  # A large model, of which little trains.
    kept = [(part, copied) for p in places for part in _parts(p.value, seen) if (copied := _copied(part)) is not None]
    # What wasn't there is taken away: a cache, a layer that is made when it's first run.
    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    known = [(held, set(held)) for m in plain for held in (vars(m), m._parameters, m._buffers, m._modules)]  # noqa: SLF001
    tensors = [tensor for module in plain for tensor in (*module._parameters.values(), *module._buffers.values())]  # noqa: SLF001
    known += [(vars(tensor), set(vars(tensor))) for tensor in tensors if tensor is not None]

    def put_back() -> None:
        for held, names in known:
            for name in held.keys() - names:
                del held[name]
        with torch.no_grad():
            for part, copied in kept:
                _restore(part, copied)
            for place in places:
                if place.put is not None:
                    place.put(place.value)

    return put_back


def _parts(value: object, seen: set[int]) -> Iterator[object]:
    """Yield a value, and what lies in its containers, each once."""
    if id(value) not in seen:
        seen.add(id(value))
        yield value
        if is_container(value) and len(value) <= MAX_ITEMS:
            for item in [item for _, item in items_of(value)] if isinstance(value, Mapping) else list(value):
                if is_container(item) or isinstance(item, _IN_PLACE):
                    yield from _parts(item, seen)


def _copied(value: object) -> object:
    """Return a copy of what may be written to in place, None of anything else."""
    if isinstance(value, Tensor):
        # An expanded one is read only; a huge one is data.
        is_written = value.layout is torch.strided and 0 not in value.stride()
        return value.detach().clone() if is_written and value.nbytes <= _MAX_STATE_BYTES else None
    if isinstance(value, np.ndarray):
        is_written = value.flags.writeable and not isinstance(value, np.memmap) and value.nbytes <= _MAX_STATE_BYTES
        return value.copy() if is_written else None
    return copy.copy(value) if type(value) in (list, dict, set, deque, bytearray, array) else None


def _restore(value: Any, copied: Any) -> None:  # noqa: ANN401  (of the kinds that are copied)
    """Write a copy back, in place: others may hold the same object."""
    if isinstance(value, Tensor):
        value.copy_(copied)
    elif isinstance(value, np.ndarray):
        value[...] = copied
    elif isinstance(value, list | bytearray | array):
        value[:] = copied
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(copied)


class _Walk:
    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._declared: dict[int, frozenset[str]] = {}
        self.spoken: set[str] = set()

    def inside(self, path: str, value: object, depth: int, said: frozenset[str] = frozenset()) -> Iterator[Place]:
        """Yield the places within a value.

        Args:
            path: names that lead there.
            value: anything.
            depth: of hops that led there.
            said: names in the code that speaks of it: of a class and a file, only these are followed.
        """
        if isinstance(value, partial):
            yield from self.inside(path, value.func, depth, said)
            held = dict(enumerate(value.args)) | value.keywords
            for key, item in held.items():
                yield from self._at(f"{path}({key})", item, depth + _DATA, None)
        elif isinstance(value, types.MethodType):
            yield from self.inside(path, value.__self__, depth, said | {getattr(value, "__name__", "")})
            if not is_of_library(value.__func__):
                yield from self.inside(path, value.__func__, depth + _CODE)
        elif isinstance(value, CACHED):
            yield from self._cached(path, value, depth, said)
        elif (owner := value() if isinstance(value, weakref.ref) else written_by(value)) is not None:
            yield from self._at(path, owner, depth + _DATA, None, said, is_new=self._is_new(("of", id(owner))))
        elif depth <= _MAX_HOPS:
            yield from (self._code if isinstance(value, _CODE_KINDS) else self._data)(path, value, depth, said)

    def _code(self, path: str, value: object, depth: int, said: frozenset[str]) -> Iterator[Place]:
        if isinstance(value, types.FunctionType):
            if self._is_new(id(value)):
                yield from self._function(path, value, depth)
        elif is_of_library(value) or not self._is_new((id(value), said)):
            return
        elif isinstance(value, nn.Module):
            said = said_within(value, said)
            for name, module in value.named_modules():
                yield from self._module(f"{path}.{name}".strip("."), module, depth, said)
        elif isinstance(value, types.ModuleType):
            yield from self._globals(path, vars(value), sorted(said), depth, said)
        elif isinstance(value, type):
            yield from self._class(value, depth, said)

    def _data(self, path: str, value: object, depth: int, said: frozenset[str]) -> Iterator[Place]:
        if is_container(value):
            items = list(items_of(value)) if isinstance(value, Mapping) else list(enumerate(value))
            for key, item in items[:MAX_ITEMS]:
                if not leads_on(item):
                    continue
                within = f"{path}[{key}]"
                if not is_container(item):
                    yield from self.inside(within, item, depth + _DATA, said)
                elif self._is_new((id(item), said)):
                    yield from self.inside(within, item, depth, said)
            if any(map(leads_on, {type(item): item for _, item in items[MAX_ITEMS:]}.values())):
                yield Place(path.lstrip("."), "attribute", None, is_followed=False)
        # A container of the user's own class may keep something beside its items.
        if is_users_own(value) or (depth == 0 and hasattr(value, "__dict__")):
            functions = methods_reached(type(value), said)
            if self._is_new(id(value)):
                yield from self._attributes(path, value, depth, said.union(*map(names_in, functions)))
            yield from self._methods(path, type(value), functions, depth)

    def _cached(self, path: str, function: Any, depth: int, said: frozenset[str]) -> Iterator[Place]:  # noqa: ANN401
        """Yield what a cached function reaches, and what it holds: each caller is given the same object."""
        yield from self.inside(path, function.__wrapped__, depth, said)
        results = cached_results(function)
        if results is None:
            yield Place(path.lstrip("."), "attribute", None, is_followed=False)
        for arguments, result in results or ():
            is_new = self._is_new((id(function), id(result)))
            yield from self._at(f"{path}{RESULT}{arguments}", result, depth + _DATA, None, said, is_new=is_new)

    def _on_tensor(self, path: str, tensor: Tensor, depth: int) -> Iterator[Place]:
        """Yield a tensor's own attributes, but for the compiler's marks."""
        names = [name for name in vars(tensor) if not name.startswith("_dynamo")]
        for name in names if names and self._is_new(("on", id(tensor))) else ():
            put = partial(vars(tensor).__setitem__, name)
            yield from self._at(f"{path}.{name}", vars(tensor)[name], depth + _DATA, put)

    def _is_new(self, key: Hashable) -> bool:
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def _at(
        self,
        path: str,
        value: object,
        depth: int,
        put: Callable[[Any], None] | None,
        said: frozenset[str] = frozenset(),
        *,
        is_new: bool = True,
        attribute: str = "",
    ) -> Iterator[Place]:
        """Yield a place, and those within what it holds."""
        if is_new and not isinstance(value, _CODE_KINDS):
            yield Place(path.lstrip("."), "attribute", value, put=put, attribute=attribute)
        if isinstance(value, Tensor):
            yield from self._on_tensor(path, value, depth)
        elif not isinstance(value, np.ndarray):
            yield from self.inside(path, value, depth, said)

    def _attributes(
        self, path: str, owner: object, depth: int, said: frozenset[str], skipped: frozenset[str] = frozenset()
    ) -> Iterator[Place]:
        own = getattr(owner, "__dict__", {}).get("forward_caches", ())
        skipped = skipped.union(own, _SET_ONCE, _declared(type(owner)))
        # What a library's class holds, its own code may read.
        is_plain = all(kind is object or not is_library(kind.__module__) for kind in type(owner).__mro__)
        is_plain |= isinstance(owner, NAMESPACES)
        for name, value, put in fields_and_setters(owner, skipped):
            attribute = name if is_plain else ""
            yield from self._at(f"{path}.{name}", value, depth + _DATA, put, said, attribute=attribute)
        for kind in type(owner).__mro__:
            if top_of(kind.__module__) not in LIBRARIES and self._is_new(id(kind)):
                yield from self._of_class(kind, list(vars(kind)), depth, said, skipped)

    def _of_class(
        self, kind: type, names: Iterable[str], depth: int, said: frozenset[str], skipped: Collection[str]
    ) -> Iterator[Place]:
        """Yield what a class keeps for all its objects, among methods and constants."""
        for name in names if not issubclass(kind, Enum) else ():
            value = vars(kind)[name]
            is_state = isinstance(value, _OF_CLASSES) or is_users_own(value)
            if is_state and name not in skipped and not name.startswith("__") and self._is_new((id(kind), name)):
                yield from self._at(f"{kind.__name__}.{name}", value, depth + _DATA, partial(setattr, kind, name), said)

    def _class(self, kind: type, depth: int, said: frozenset[str]) -> Iterator[Place]:
        """Yield what code keeps in a class that it names, and what's named by the methods that it calls."""
        functions = methods_reached(kind, said | _OF_FUNCTIONS)
        said = said.union(*map(names_in, functions))
        for one in kind.__mro__:
            if not is_library(one.__module__):
                names = [name for name in vars(one) if name in said]
                yield from self._of_class(one, names, depth, said, _declared(kind))
        yield from self._methods(kind.__name__, kind, functions, depth)

    def _methods(self, path: str, kind: type, functions: Iterable[types.FunctionType], depth: int) -> Iterator[Place]:
        for function in functions:
            self._declared[id(function)] = _declared(kind)
            yield from self.inside(f"{path}.{function.__name__}", function, depth + _CODE)

    def _module(self, path: str, module: nn.Module, depth: int, said: frozenset[str]) -> Iterator[Place]:
        functions = methods_reached(type(module), said | {"forward"})
        if self._is_new(id(module)):
            lost = module._non_persistent_buffers_set  # noqa: SLF001
            for name, parameter in module.named_parameters(recurse=False):
                yield Place(f"{path}.{name}".lstrip("."), "parameter", parameter, module)
                yield from self._on_tensor(f"{path}.{name}", parameter, depth)
                for kind in _PARAMETER_HOOKS:
                    yield from self._hooks(f"{path}.{name}", getattr(parameter, kind, None), depth)
            for name, buffer in dict(module._buffers.items()).items():  # noqa: SLF001  (those that are None too)
                # TorchScript's take no other tensor.
                is_scripted = isinstance(module, torch.jit.ScriptModule)
                put = None if is_scripted else partial(module._buffers.__setitem__, name)  # noqa: SLF001
                yield Place(f"{path}.{name}".lstrip("."), "buffer", buffer, module, name not in lost, put)
                if buffer is not None:
                    yield from self._on_tensor(f"{path}.{name}", buffer, depth)
            for kind in _MODULE_HOOKS:
                yield from self._hooks(path, getattr(module, kind, None), depth)
            yield from self._attributes(path, module, depth, said, _OF_EVERY_MODULE | _recomputed(module))
            forward = type(module).forward if is_users_own(module) else None
            if isinstance(forward, types.FunctionType):
                # What forward names beside itself: a registry of losses, a counter of the file's.
                yield from self._methods(path, type(module), [forward], depth)
        yield from self._methods(path, type(module), functions, depth)

    def _hooks(self, path: str, hooks: Mapping[int, object] | None, depth: int) -> Iterator[Place]:
        for hook in list((hooks or {}).values()):
            # The loop's own hooks know the step.
            if not getattr(hook, "__module__", "").startswith("cosmati.") and not isinstance(hook, partial):
                yield from self.inside(f"{path}.{HOOK}", hook, depth + _CODE)

    def _function(self, path: str, function: types.FunctionType, depth: int) -> Iterator[Place]:
        """Yield what a function keeps, closes over, has for defaults, and names among the globals of its file."""
        if top_of(function.__module__) in LIBRARIES and depth > 0:
            return
        said = names_in(function)
        self.spoken |= said | strings_in(function)
        declared = getattr(function, "forward_caches", ())
        skipped = {"__class__", "__wrapped__", "forward_caches", *declared, *self._declared.get(id(function), ())}
        for name, value in list(vars(function).items()):
            if name not in skipped and not name.startswith("_torchdynamo"):  # the compiler's marks
                yield from self._at(
                    f"{path}.{name}", value, depth + _DATA, partial(vars(function).__setitem__, name), said
                )
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = cell_content(cell)
            if cell != _UNFILLED and name not in skipped and not is_of_library(value):
                put, is_new = partial(setattr, cell, "cell_contents"), self._is_new(id(cell))
                yield from self._at(f"{path}.{name}", value, depth + _CODE, put, said, is_new=is_new)
        defaults = {f"default {index}": value for index, value in enumerate(function.__defaults__ or ())}
        for name, value in (defaults | (function.__kwdefaults__ or {})).items():
            if name not in skipped and not is_of_library(value):
                yield from self._at(f"{path}.{name}", value, depth + _CODE, None, said)
        names = sorted(globals_touched(function.__code__) - skipped)
        yield from self._globals(path, function.__globals__, names, depth, said)
        for name in sorted(files_imported(function.__code__)):
            if name in sys.modules and not is_library(name):
                yield from self.inside(f"{path}.{name}", sys.modules[name], depth + _CODE, said)

    def _globals(
        self, path: str, file: dict[str, Any], names: Iterable[str], depth: int, said: frozenset[str]
    ) -> Iterator[Place]:
        for name in names:
            if name in file and not is_of_library(file[name]):
                put, is_new = partial(file.__setitem__, name), self._is_new((id(file), name))
                yield from self._at(f"{path}.{name}", file[name], depth + _CODE, put, said, is_new=is_new)


def _declared(kind: type) -> frozenset[str]:
    return frozenset().union(*(vars(one).get("forward_caches", ()) for one in kind.__mro__))


def _recomputed(module: nn.Module) -> frozenset[str]:
    """Return the attributes that hooks of PyTorch's (weight norm, pruning) compute anew before each forward pass."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]  # noqa: SLF001
    return frozenset(str(getattr(hook, "name", getattr(hook, "_tensor_name", ""))) for hook in hooks)
