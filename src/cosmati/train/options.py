"""Options of the user's own objects, as plain values: what isn't in their code, and decides what they compute.

Of a function these are its defaults, what it closes over and the globals that it names; of an object its public
attributes; of a module those of all its modules. Names that begin with an underscore, and those that a class or
function declares in `forward_caches`, count or cache, and are left out. So are libraries' functions and objects, and on
which device or rank something is.
"""

from __future__ import annotations

import dataclasses
import dis
import hashlib
import json
import math
import re
import sys
import sysconfig
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cosmati.core.state import parameter_root

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
_PLACE = frozenset({"rank", "local_rank", "global_rank", "process_index", "world_size", *_HOW})
"""Names that say where and how something is computed, or was read from, and not what."""
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?")
_GROWS = frozenset({"append", "extend", "insert", "appendleft"})
_NAMESPACES = (Namespace, types.SimpleNamespace)
_TIMES = (1.4e9, 4e9)
"""Seconds since 1970 in which a fraction is when something was made: no two processes share it."""
_SCALARS = (bool, int, float, complex, str, bytes, np.generic)


def name_of(value: object) -> str:
    """Return the full name of a function or class, or of an object's class."""
    own: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{own.__module__}.{own.__qualname__}"


def module_options(module: nn.Module) -> Options:
    """Return a module's own plain attributes that it doesn't print, but for what counts or caches."""
    shown, declared = {*re.findall(r"(\w+)=", module.extra_repr())}, _declared(module)
    return {
        name: DECLARED if name in declared else scalar_or_items(value)
        for name, value in vars(module).items()
        if name != "training" and _is_public(name) and _is_plain(value) and name not in shown
    }


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
    """

    def __init__(self, tensors: Iterable[Tensor] = (), *, with_code: bool = False) -> None:
        self._with_code = with_code
        self._own = {id(tensor) for tensor in tensors}
        self._open: list[int] = []
        self._left = _MAX_VALUES

    def loss(self, loss: object) -> Options:
        """Return a loss's name, options and state."""
        return {"is": name_of(loss), **(self._within(loss, lambda: dict(self._options(loss))) or {})}

    def _options(self, loss: object) -> Iterator[tuple[str, object]]:
        if isinstance(loss, partial):
            yield "of", self.loss(loss.func)
            yield "given", [self.value(value) for value in loss.args] + [self.value(loss.keywords)]
        elif isinstance(loss, types.FunctionType):
            cells = zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True)
            said, skipped = _said_in([loss]), _declared(loss)
            held = {name: DECLARED if name in skipped else _content(cell) for name, cell in cells}
            yield "closure", {n: self.value(v, said) for n, v in held.items() if not _is_record(v, said)}
            yield "defaults", [self.value(v, said) for v in (*(loss.__defaults__ or ()), *_keyword_defaults(loss))]
            yield from self._globals([loss])
        elif isinstance(loss, types.MethodType):
            owner = loss.__self__
            yield "owner", self._named(vars(owner), owner) if isinstance(owner, type) else self.value(owner, None)
            yield from self._globals(_methods(type(owner)))
        else:
            if isinstance(loss, nn.Module):
                yield "module", self._module(loss, without="")
            yield from self._named(getattr(loss, "__dict__", {}), loss).items()
            yield from self._globals(_methods(type(loss)))

    def _named(self, values: Mapping[str, object], owner: object, said: frozenset[str] | None = None) -> Options:
        """Describe public attributes, all, or only those that some code speaks of."""
        own = _said_in(_methods(owner if isinstance(owner, type) else type(owner)))
        declared = _declared(owner)
        names = [name for name in values if _is_public(name) and name != "training"]
        if said is not None:
            names = [name for name in names if name in said | own] or names
        found = {}
        for name in names:
            value = DECLARED if name in declared else values[name]
            # Modules of a module are described with it; what a list collects is a record, no option.
            if not (_is_record(value, own) or (isinstance(value, nn.Module) and isinstance(owner, nn.Module))):
                found[name] = self.value(value, own | (said or frozenset()))
        return {name: value for name, value in found.items() if value is not None}

    def _globals(self, functions: Iterable[types.FunctionType]) -> Iterator[tuple[str, Options]]:
        """Yield what functions name of the user's own besides modules, functions without options, and classes."""
        found: Options = {}
        for function in functions:
            if is_library(function.__module__):
                continue
            said, skipped = _said_in([function]), _declared(function)
            for name in _globals_of(function.__code__):
                value = DECLARED if name in skipped else function.__globals__.get(name)
                if not _is_public(name) or value is function or _is_record(value, said):
                    continue
                told: object
                if isinstance(value, type):
                    # Of a class that holds settings, those that are read.
                    spoken = {n: v for n, v in vars(value).items() if n in said and _is_public(n) and _is_plain(v)}
                    told = {} if is_library(value.__module__) else {n: scalar_or_items(v) for n, v in spoken.items()}
                else:
                    told = None if isinstance(value, types.ModuleType) else self.value(value, said)
                if told and told != f"{getattr(value, '__module__', None)}.{name}":
                    found[name] = told
        if found:
            yield "globals", found

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
            return self._tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return self._tensor(torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8))
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
            if self._with_code and not is_library(value.__module__):
                told["code"] = _code_digest(value)
            return {"is": name_of(value), **told} if told else name_of(value)
        is_ours = isinstance(value, _NAMESPACES) or dataclasses.is_dataclass(value)
        if isinstance(value, type) or (callable(value) and not hasattr(value, "__dict__")):
            return name_of(value)
        if not is_ours and is_library(type(value).__module__):
            return None  # A logger, an optimizer, a generator.
        options = self._named(_fields(value), value, frozenset() if said is None else said)
        return {"is": name_of(value), **options} if options else name_of(value)

    def _items(self, items: list[Any]) -> object:
        if len(items) <= _MAX_ITEMS and not any(isinstance(item, Mapping) and len(item) > _MAX_ITEMS for item in items):
            return items
        text = json.dumps(items, default=str)
        return f"{len(items)} items, {hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def _tensor(self, tensor: Tensor) -> str:
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
        if id(tensor) in self._own:
            return "of the model"
        if not is_plain or tensor.nbytes > _MAX_BYTES:
            return f"{tensor.dtype}{list(tensor.shape)}"
        return parameter_root({"": tensor.detach()}).hex()

    def _module(self, value: nn.Module, without: str | None = None) -> Options:
        modules: Options = {name or "(root)": f"{name_of(m)}({m.extra_repr()})" for name, m in value.named_modules()}
        options = {name or "(root)": module_options(m) for name, m in value.named_modules() if name != without}
        modules |= {"options": told} if (told := {name: one for name, one in options.items() if one}) else {}
        if any(id(tensor) in self._own for tensor in (*value.parameters(), *value.buffers())):
            return modules
        tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return modules | ({"state": parameter_root(tensors).hex()} if tensors else {})


def _is_public(name: str) -> bool:
    return name[0] != "_" and name.lower() not in _PLACE


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
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # Of NaN's equal there's none.
    if isinstance(value, float) and _TIMES[0] < value < _TIMES[1] and not value.is_integer():
        return None
    return value if isinstance(value, bool | int | float | str) else repr(value)


def _fields(value: object) -> dict[str, object]:
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _keyword_defaults(function: types.FunctionType) -> list[object]:
    return [value for _, value in sorted((function.__kwdefaults__ or {}).items())]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals_of(code: types.CodeType) -> list[str]:
    """Return the globals that a function's code reads, and doesn't write: what it writes is state."""
    steps = [step for one in _codes(code) for step in dis.get_instructions(one)]
    read, written = ({step.argval for step in steps if step.opname == name} for name in ("LOAD_GLOBAL", "STORE_GLOBAL"))
    return sorted(read - written)


def _said_in(functions: Iterable[types.FunctionType]) -> frozenset[str]:
    """Return the names, and the strings, in functions' code and in that of the user's functions which they name."""
    said: set[str] = set()
    known: set[int] = set()
    waiting = list(functions)
    while waiting and len(known) < _MAX_ITEMS:
        function = waiting.pop()
        if id(function) in known or is_library(function.__module__):
            continue
        known.add(id(function))
        for code in _codes(function.__code__):
            said.update(code.co_names, (one for one in code.co_consts if isinstance(one, str)))
        held = [_content(cell) for cell in function.__closure__ or ()]
        held += [function.__globals__.get(name) for name in _globals_of(function.__code__)]
        waiting += [one for one in held if isinstance(one, types.FunctionType)]
    return frozenset(said)


def _methods(kind: type) -> list[types.FunctionType]:
    """Return the functions of the user's own classes: not those that set an object up."""
    own = [one for one in kind.__mro__ if not is_library(one.__module__)]
    return [
        function
        for one in own
        for name, function in vars(one).items()
        if isinstance(function, types.FunctionType) and name not in ("__init__", "__post_init__", "__repr__")
    ]


def _code_digest(function: types.FunctionType) -> str:
    """Return the digest of a function's code, and by which Python: another one compiles it to another."""
    told = []
    for code in _codes(function.__code__):
        plain = [c for c in code.co_consts if not isinstance(c, types.CodeType) and c != (function.__doc__ or "")]
        plain = [sorted(c, key=repr) if isinstance(c, frozenset) else c for c in plain]
        told.append((code.co_code.hex(), code.co_names, plain))
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    return f"{digest} of Python {sys.version_info[0]}.{sys.version_info[1]}"


_SITES = frozenset({"site-packages", "dist-packages"})


@cache
def is_library(module: str | None) -> bool:
    """Say whether a module is a library's, by where it lies."""
    top = (module or "").partition(".")[0]
    if top in ("cosmati", "torch", "numpy", "builtins"):
        return True
    if top in ("", "__main__"):
        return False
    found = sys.modules.get(str(module)) or sys.modules.get(top)
    file = getattr(found, "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names
    path = Path(file)
    return bool(_SITES & {*path.parts}) or path.is_relative_to(sysconfig.get_paths()["stdlib"])
