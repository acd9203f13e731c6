"""What public calls do where nothing is said is pinned: another default changes runs that nobody has touched.

A change of one is a decision. `python -m tests.test_defaults` writes the list anew.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cosmati
from cosmati import methods, optim
from cosmati.ledger import verify, writer
from cosmati.methods import functional
from cosmati.train import observers, replay
from cosmati.train.observers import monitors

LIST = Path(__file__).parent / "golden" / "defaults.txt"
MODULES = (cosmati, methods, functional, optim, observers, monitors, replay, verify, writer)


def _told(value: object) -> str:
    return value.__qualname__ if isinstance(value, types.FunctionType | type) else repr(value)


def _of_call(name: str, call: Callable[..., Any]) -> Iterator[str]:
    for own, parameter in inspect.signature(call).parameters.items():
        if parameter.default is not parameter.empty and not own.startswith("_"):
            yield f"{name}({own}={_told(parameter.default)})"


def _of_class(kind: type) -> Iterator[str]:
    """Of what it's made with, of its own public methods, and of fields whose default is made anew each time."""
    if issubclass(kind, enum.Enum):
        yield from (f"{kind.__name__}.{one.name} = {one.value!r}" for one in kind)
        return
    made = {f.name: f.default_factory for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    for line in _of_call(kind.__name__, kind):
        name = line.partition("(")[2].partition("=")[0]
        factory = made.get(name, dataclasses.MISSING)
        yield line if factory is dataclasses.MISSING else f"{kind.__name__}({name}={_told(factory())})"
    for name, call in inspect.getmembers(kind, lambda one: inspect.isfunction(one) or inspect.ismethod(one)):
        if not name.startswith("_") and call.__module__.startswith("cosmati."):
            yield from _of_call(f"{kind.__name__}.{name}", call)


def listed() -> list[str]:
    """Every default of a public name, a line each."""
    found = set[str]()
    for module in MODULES:
        for name in module.__all__:
            one = getattr(module, name)
            if isinstance(one, type):
                found.update(_of_class(one))
            elif inspect.isfunction(one):
                found.update(_of_call(name, one))
    return sorted(found)


def test_defaults_are_those_of_the_list() -> None:
    assert listed() == LIST.read_text().splitlines(), "if that's meant: python -m tests.test_defaults"


if __name__ == "__main__":
    LIST.write_text("\n".join(listed()) + "\n")
