"""Options of the user's own objects, as plain values: what isn't in their code, and decides what they compute.

Of a function these are its defaults, what it closes over and the globals that it names; of an object its public
attributes; of a module those of all its modules. Names that begin with an underscore, and those that a class or
function declares in `forward_caches`, count or cache, and are left out. So are libraries' functions and objects, and on
which device or rank something is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cosmati.core.later import untold
from cosmati.core.state import parameter_root
from cosmati.train.user_code import (
    attributes_of,
    cell_content,
    code_digest,
    defaults_of,
    functions_within,
    globals_of,
    is_library,
    methods_of,
    module_of,
    names_filled,
    names_said,
    names_written,
)
from cosmati.train.user_objects import fields_of

Options = dict[str, Any]
"""Plain values by name, nested."""

_MAX_DEPTH = 6
_MAX_VALUES = 20_000
"""Values in all: a loss may name a table of rows, or objects that lead everywhere."""
_MAX_ITEMS = 32
"""Items of a list above which its digest stands for them."""
_MAX_BYTES = 1 << 28
"""Of a tensor, above which its content isn't compared."""

DECLARED = "(counts or caches)"
"""Stands for what is declared in `forward_caches`: who declares it later may resume, too."""

_HOW = {"device", "gpu", "gpu_id", "name_or_path", "gradient_checkpointing", "grad_checkpointing"}
_RANKS = {"rank", "local_rank", "global_rank", "node_rank", "process_index", "world_size"}
_FIRST = {"is_main", "is_master", "main_process", "master_process", "is_main_process", "is_master_process"}
_PLACE = frozenset({*_HOW, *_RANKS, *(f"ddp_{name}" for name in _RANKS), *_FIRST})
"""Names that say where and how something is computed, or was read from, and not what."""
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?")
_GROWS = frozenset({"append", "extend", "insert", "appendleft"})
_NAMESPACES = (Namespace, types.SimpleNamespace)
_TIMES = (1.4e9, 4e9)
"""Seconds since 1970 in which a fraction, or a whole number of nanoseconds, is when something was made."""
_OF_PROCESS = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d.*)?|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(.*/)?tmp[a-z0-9_]{8}(/.*)?"
)
"""What no two processes share: a time, a UUID, `tempfile`'s folders."""
_BY_STRINGS = frozenset({"getattr", "vars", "__dict__"})
"""With these, code reads attributes that it doesn't name."""
_CONTAINERS = (list, tuple, set, frozenset)
_SCALARS = (bool, int, float, complex, str, bytes, np.generic)


def name_of(value: object) -> str:
    """Return the full name of a function or class, or of an object's class."""
    own: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{module_of(own)}.{own.__qualname__}"


def scalar_or_items(value: Any) -> object:  # noqa: ANN401  (whatever `_is_plain` lets through)
    """Return a plain value as JSON holds it."""
    if isinstance(value, Mapping):
        return {str(key): scalar_or_items(item) for key, item in value.items()}
    return [scalar_or_items(item) for item in value] if isinstance(value, list | tuple) else _scalar(value)


def describe_option(value: object) -> object:
    """Return what stands for an option of an optimizer or a method: of the user's own functions, their code too."""
    is_own = not is_library(type(value).__module__) and not dataclasses.is_dataclass(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_own or isinstance(value, types.FunctionType | types.MethodType | partial | type) or " at 0x" in repr(value):
        return Described(with_code=True).value(value, None)
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)


def public_scalars(value: object, without: Iterable[str] = ()) -> Options:
    """Return the plain attributes of an object of the user's own class that count or cache nothing."""
    left_out = {*_declared(value), *without}
    return {
        name: scalar_or_items(one)
        for name, one in getattr(value, "__dict__", {}).items()
        if _is_public(name) and name not in left_out and _is_plain(one)
    }


class Described:
    """Describes a run's losses, and other objects, without what they hold of the model in training.

    Args:
        tensors: of the model: they're the run's state, and no options.
        with_code: tell functions apart by their code too. Of losses, a fixed microbatch does (`Probe`).
        in_model: what is described belongs to the model, so that the model's own modules aren't told once more.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), *, with_code: bool = False, in_model: bool = False) -> None:
        self._with_code, self._in_model = with_code, in_model
        self._own = {id(tensor) for tensor in tensors}
        self._open: list[int] = []
        self._left = _MAX_VALUES

    def loss(self, loss: object) -> Options:
        """Return a loss's name, options and state."""
        return {"is": name_of(loss), **(self._within(loss, lambda: dict(self._options(loss))) or {})}

    def _options(self, loss: object) -> Iterator[tuple[str, object]]:
        if isinstance(loss, partial):
            said = names_said(functions_within(loss))
            yield "of", self.loss(loss.func)
            given = {name: self.value(value, said) for name, value in loss.keywords.items() if _is_public(name)}
            yield "given", [*(self.value(value, said) for value in loss.args), given]
        elif isinstance(loss, types.FunctionType):
            cells = zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True)
            said, skipped = names_said([loss]), _declared(loss)
            held = {name: DECLARED if name in skipped else cell_content(cell) for name, cell in cells}
            yield "closure", {n: self.value(v, said) for n, v in held.items() if not _is_record(v, said)}
            yield "defaults", [self.value(v, said) for v in defaults_of(loss)]
            skipped |= names_written([loss]) | {"forward_caches"}
            own = {n: self.value(v, said) for n, v in vars(loss).items() if _is_public(n) and n not in skipped}
            yield from [("attributes", own)] if own else []
            yield from self.globals([loss], loss)
            yield from self._code([loss])
        elif isinstance(loss, types.MethodType):
            owner = loss.__self__
            told = self._named(attributes_of(owner), owner) if isinstance(owner, type) else self.value(owner, None)
            methods = methods_of(owner if isinstance(owner, type) else type(owner))
            yield from [("owner", told), *self.globals(methods, owner), *self._code(methods)]
        else:
            if isinstance(loss, nn.Module):
                yield "module", self._module(loss, without="")
            yield from self._named(getattr(loss, "__dict__", {}), loss).items()
            yield from self.globals(methods_of(type(loss)), loss)

    def _code(self, functions: Sequence[types.FunctionType]) -> Iterator[tuple[str, str]]:
        if self._with_code and functions and not is_library(functions[0].__module__):
            yield "code", code_digest(*functions)

    def _named(self, values: Mapping[str, object], owner: object, said: frozenset[str] | None = None) -> Options:
        """Describe public attributes, all, or only those that some code speaks of."""
        own = names_said(methods_of(owner if isinstance(owner, type) else type(owner)))
        declared = _declared(owner)
        names = [name for name in values if _is_public(name) and name not in {"training", *untold(owner)}]
        if said is not None:
            names = [name for name in names if name in said | own] or names
        found = {}
        for name in names:
            value = DECLARED if name in declared else values[name]
            # Modules of a module are described with it; what a list collects is a record, no option.
            if not (_is_record(value, own) or (isinstance(value, nn.Module) and isinstance(owner, nn.Module))):
                found[name] = self.value(value, own | (said or frozenset()))
        return {name: value for name, value in found.items() if value is not None}

    def globals(self, functions: Sequence[types.FunctionType], *owners: object) -> Iterator[tuple[str, Options]]:
        """Yield what functions name of the user's own: but for modules and classes, of which what is read counts.

        Args:
            functions: not those that are a library's.
            owners: objects or classes whose methods they are, which may declare what these count or cache.
        """
        found: Options = {}
        counts = names_filled(functions).union(*map(_declared, owners))
        for function in [one for one in functions if not is_library(one.__module__)]:
            said, skipped = names_said([function]), counts | _declared(function)
            for name in globals_of(function.__code__):
                value = DECLARED if name in skipped else function.__globals__.get(name)
                if not _is_public(name) or value is function or _is_record(value, said):
                    continue
                told: object
                if isinstance(value, type | types.ModuleType):
                    told = _settings_in(value, said - names_written([function]), counts)
                else:
                    told = self.value(value, said)
                if told and told != f"{module_of(value)}.{name}":
                    found[name] = told
        if found:
            yield "globals", found

    def module(self, module: nn.Module, said: frozenset[str], written: frozenset[str]) -> Options:
        """Return a module's own options that it doesn't print, but for what counts or caches.

        Args:
            module: of the model in training.
            said: names that the code of model and losses speaks of: of settings, these count, or all where it's none.
            written: names of attributes to which that code gives new values.
        """
        shown, declared = {*re.findall(r"(\w+)=", module.extra_repr())}, _declared(module)
        reads_all = not _is_read_by_users_alone(type(module)) or bool(said & _BY_STRINGS)
        found: Options = {}
        for name, value in vars(module).items():
            if name == "training" or not _is_public(name) or name in shown or isinstance(value, Tensor | np.ndarray):
                continue
            if name in declared:
                found[name] = DECLARED
            elif not (reads_all or name in said or isinstance(value, list | tuple)):
                continue  # Whom it was made for, when, and where it's kept.
            elif isinstance(value, dict) and _is_plain(value):
                found[name] = scalar_or_items({key: value[key] for key in value if key in said} or value)
            elif _is_plain(value):
                found[name] = scalar_or_items(value)
            elif name not in written and not isinstance(value, (dict, nn.Module, *_CONTAINERS)):
                found[name] = name_of(value) if isinstance(value, types.MethodType) else self.value(value, said)
        return {name: value for name, value in found.items() if value is not None}

    def contents(self, module: nn.Module, written: frozenset[str]) -> Options:
        """Return the digests of a module's plain tensors and of its buffers that no checkpoint holds."""
        left_out = written | _declared(module)
        lost = {name: getattr(module, name, None) for name in module._non_persistent_buffers_set}  # noqa: SLF001
        # What is made of a parameter (weight_norm's weight of weight_g) is drawn with it, and restored with it.
        made_of = tuple(name for name, _ in module.named_parameters(recurse=False))
        held = {n: v for n, v in vars(module).items() if not any(one.startswith(f"{n}_") for one in made_of)} | lost
        return {
            name: self.value(value)
            for name, value in held.items()
            if isinstance(value, Tensor | np.ndarray) and (name in lost or _is_public(name)) and name not in left_out
        }

    def value(self, value: Any, said: frozenset[str] | None = frozenset()) -> object:  # noqa: ANN401, PLR0911
        """Return what stands for any object.

        Args:
            value: anything of the user's.
            said: names that the code which holds it speaks of; of an object without code of its own, only these
                attributes count, or all where there is none of them. None asks for what its own code speaks of.
        """
        self._left -= 1
        if isinstance(value, _SCALARS):
            return _scalar(value)
        if isinstance(value, Tensor):
            return self._within(value, lambda: self._tensor(value))
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return self._within(value, lambda: self._array(value))
        if isinstance(value, torch.dtype | torch.Size | Enum):
            return str(value)
        if value is None or isinstance(value, torch.device):
            return None
        if self._left < 0 or len(self._open) > _MAX_DEPTH or any(one == id(value) for one in self._open):
            return name_of(value)
        return self._within(value, lambda: self._container(value, said))

    def _within(self, value: object, describe: Any) -> Any:  # noqa: ANN401
        """Describe what may hold itself; None where it raises when it's looked at."""
        self._open.append(id(value))
        try:
            return describe()
        except Exception:  # noqa: BLE001  (of the user's own objects: properties, mappings)
            return None
        finally:
            self._open.pop()

    def _container(self, value: Any, said: frozenset[str] | None) -> object:  # noqa: ANN401, PLR0911
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, set | frozenset):
            return self._items(sorted((self.value(item, said) for item in value), key=repr))
        if isinstance(value, list | tuple):
            if _is_record(value, said or frozenset()):
                return None
            return self._items([self.value(item, said) for item in value])
        if isinstance(value, Mapping):
            keys = [key for key in value if said and key in said] or (list(value) if isinstance(value, dict) else [])
            pairs = {str(key): self.value(value[key], said) for key in keys if _is_public(str(key) or "_")}
            return pairs if len(pairs) <= _MAX_ITEMS else self._items([pairs])
        if isinstance(value, partial | types.MethodType):
            return self.loss(value)
        if isinstance(value, types.FunctionType):
            options = {} if is_library(value.__module__) else dict(self._options(value))
            told = {name: option for name, option in options.items() if option}
            return {"is": name_of(value), **told} if told else name_of(value)
        is_ours = isinstance(value, _NAMESPACES) or dataclasses.is_dataclass(value)
        if isinstance(value, type) or (callable(value) and not hasattr(value, "__dict__")):
            return name_of(value)
        if not is_ours and is_library(type(value).__module__):
            return None  # A logger, an optimizer, a generator.
        options = self._named(fields_of(value), value, frozenset() if said is None else said)
        options |= dict(self._code(methods_of(type(value)) if callable(value) else ()))
        return {"is": name_of(value), **options} if options else name_of(value)

    def _items(self, items: list[Any]) -> object:
        if len(items) <= _MAX_ITEMS and not any(isinstance(item, Mapping) and len(item) > _MAX_ITEMS for item in items):
            return items
        text = json.dumps(items, default=str)
        return f"{len(items)} items, {hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def _array(self, array: np.ndarray[Any, Any]) -> str:
        return self._tensor(torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8))

    def _tensor(self, tensor: Tensor) -> str:
        if tensor.is_nested:
            return ", ".join(map(self._tensor, tensor.unbind()))
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
        if id(tensor) in self._own:
            return "of the model"
        if not is_plain or tensor.nbytes > _MAX_BYTES:
            return f"{tensor.dtype}{list(tensor.shape)}"
        return parameter_root({"": tensor.detach()}).hex()

    def _module(self, value: nn.Module, without: str | None = None) -> Options:
        is_own = any(id(tensor) in self._own for tensor in (*value.parameters(), *value.buffers()))
        if is_own and self._in_model:
            return {}
        modules: Options = {name or "(root)": f"{name_of(m)}({m.extra_repr()})" for name, m in value.named_modules()}
        options = {name or "(root)": _printless(m) for name, m in value.named_modules() if name != without}
        modules |= {"options": told} if (told := {name: one for name, one in options.items() if one}) else {}
        if is_own:
            return modules
        tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return modules | ({"state": parameter_root(tensors).hex()} if tensors else {})


def _printless(module: nn.Module) -> Options:
    """Return the plain attributes of a loss's module that it doesn't print."""
    shown, declared = {*re.findall(r"(\w+)=", module.extra_repr())}, _declared(module)
    return {
        name: DECLARED if name in declared else scalar_or_items(value)
        for name, value in vars(module).items()
        if name != "training" and _is_public(name) and _is_plain(value) and name not in shown
    }


def _settings_in(value: type | types.ModuleType, said: frozenset[str], counts: frozenset[str]) -> Options:
    """Return the plain values that code reads of a class, or of a module, of the user's own."""
    if is_library(value.__module__ if isinstance(value, type) else value.__name__):
        return {}
    held = attributes_of(value) if isinstance(value, type) else vars(value)
    spoken = {n: v for n, v in held.items() if n in said and _is_public(n) and _is_plain(v)}
    return {n: DECLARED if n in counts else scalar_or_items(v) for n, v in spoken.items()}


def _is_read_by_users_alone(kind: type) -> bool:
    """Say whether no library's code reads the attributes of a module's class: it has no other base than `Module`."""
    return all(one in (nn.Module, object) or not is_library(one.__module__) for one in kind.__mro__)


def says_what(name: str) -> bool:
    """Say whether a name isn't one of those for where and how something is computed, or read from."""
    return name.strip("_").lower() not in _PLACE


def _is_public(name: str) -> bool:
    return name[0] != "_" and says_what(name)


def _declared(owner: object) -> frozenset[str]:
    """Return the names that a function, a class or an object's class declares to count or cache."""
    if isinstance(owner, types.FunctionType):
        return frozenset(getattr(owner, "forward_caches", ()))
    kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
    return frozenset().union(*(vars(kind).get("forward_caches", ()) for kind in kinds))


def _is_record(value: object, said: frozenset[str]) -> bool:
    """Say whether a list is one that code appends to: what it holds has happened, and decides nothing."""
    return isinstance(value, list) and bool(said & _GROWS)


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return 0 < len(value) <= _MAX_ITEMS and depth < 2 and all(_is_plain(item, depth + 1) for item in items)
    return isinstance(value, _SCALARS) and not (isinstance(value, str) and _DEVICE.fullmatch(value))


def _scalar(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str) and (_DEVICE.fullmatch(value) or _OF_PROCESS.fullmatch(value)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # Of NaN's equal there's none.
    if isinstance(value, float) and _TIMES[0] < value < _TIMES[1] and not value.is_integer():
        return None
    if isinstance(value, int) and _TIMES[0] < value / 1e9 < _TIMES[1]:
        return None
    return value if isinstance(value, bool | int | float | str) else repr(value)
