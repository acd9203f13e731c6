"""A hop to what an object holds costs two, one to what code names costs one, and eight lead nowhere further."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmati.train.held import places_in

ALIVE: list[object] = []


class Kept:
    """An object of the user's, at the end of a chain."""

    def __init__(self) -> None:
        self.number = 1


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Holder(nn.Module):
    """A module that holds one thing in an attribute."""

    def __init__(self, inner: object = None) -> None:
        super().__init__()
        self.inner = inner


def made_by_code(text: str, **names: object) -> Any:
    """Return a function of a file of its own, in which some names stand."""
    file: dict[str, object] = {"__name__": "a_file_of_ones_own", **names}
    exec(text, file)
    return file["made"]


def closed(inner: object) -> Callable[[], object]:
    return lambda: inner


def attributed(inner: object) -> Callable[[], object]:
    def made() -> None: ...

    vars(made)["inner"] = inner
    return made


def with_default(inner: object) -> Callable[[], object]:
    def made(inner: object = inner) -> None: ...

    return made


def with_keyword(inner: object) -> Callable[[], object]:
    def made(*, inner: object = inner) -> None: ...

    return made


def answered(inner: object) -> Callable[..., object]:
    def made(_text: str) -> object:
        return box[0]

    box = [inner]
    cached = cache(made)
    cached("a")
    box.clear()
    return cached


def on_tensor(inner: object) -> Any:
    tensor: Any = torch.zeros(1)
    tensor.inner = inner
    return tensor


def on_parameter(inner: object) -> object:
    module: Any = nn.Linear(1, 1)
    module.weight.inner = inner
    return module


def on_buffer(inner: object) -> nn.Module:
    module = Holder()
    module.register_buffer("seen", on_tensor(inner))
    return module


def hooked(inner: object) -> nn.Module:
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *given: given[-1] if inner else None)
    return module


def hooked_tensor(inner: object) -> nn.Module:
    module = nn.Linear(1, 1)
    module.weight.register_hook(lambda gradient: gradient if inner else None)
    return module


def bound(inner: object) -> object:
    return types.MethodType(made_by_code("def made(self): return inner", inner=inner), Slotted(None))


def in_method(inner: object) -> object:
    namespace = {"__module__": __name__, "__call__": made_by_code("def made(self): return inner", inner=inner)}
    return type("Called", (), namespace)()


def in_forward(inner: object) -> nn.Module:
    namespace = {"__module__": __name__, "forward": made_by_code("def made(self, rows): return inner", inner=inner)}
    module: nn.Module = type("Forward", (nn.Module,), namespace)()
    return module


def in_class(inner: object) -> object:
    return type("OfClass", (), {"__module__": __name__, "inner": inner})()


def named_class(inner: object) -> object:
    kind: Any = type("Named", (), {"__module__": __name__, "inner": inner})
    return lambda: kind.inner


def called_class(inner: object) -> object:
    method = made_by_code("def made(self): return inner", inner=inner)
    kind: Any = type("Called", (), {"__module__": __name__, "run": method})
    return lambda: kind.run


def in_file(inner: object) -> object:
    file = types.ModuleType("a_file_of_ones_own")
    vars(file).update(inner=inner)
    return lambda: file.inner


def referred(inner: Any) -> object:
    ALIVE.append(inner)
    return weakref.ref(inner)


WAYS: dict[str, tuple[Callable[[Any], object], int]] = {
    "a partial's argument": (lambda inner: partial(max, inner), 2),
    "a partial's keyword": (lambda inner: partial(max, key=inner), 2),
    "a partial's function": (lambda inner: partial(closed(inner)), 1),
    "a list": (lambda inner: [inner], 2),
    "a dict": (lambda inner: {"inner": inner}, 2),
    "an attribute": (lambda inner: types.SimpleNamespace(inner=inner), 2),
    "a slot": (Slotted, 2),
    "a closure": (closed, 1),
    "a default": (with_default, 1),
    "a keyword's default": (with_keyword, 1),
    "a function's attribute": (attributed, 2),
    "a global": (lambda inner: made_by_code("def made(): return inner", inner=inner), 1),
    "a weak reference": (referred, 2),
    "a container's method": (lambda inner: [inner].append, 4),
    "what a cached function holds": (answered, 2),
    "what a cached function closes over": (lambda inner: cache(closed(inner)), 1),
    "what a tensor holds": (lambda inner: types.SimpleNamespace(tensor=on_tensor(inner)), 4),
    "a module's attribute": (Holder, 2),
    "what a parameter holds": (on_parameter, 2),
    "what a buffer holds": (on_buffer, 2),
    "a module's hook": (hooked, 2),
    "a parameter's hook": (hooked_tensor, 2),
    "a bound method": (bound, 2),
    "a method": (in_method, 2),
    "a forward pass": (in_forward, 2),
    "an object's class": (in_class, 2),
    "a class that code names": (named_class, 3),
    "a method of a class that code names": (called_class, 3),
    "a file that code names": (in_file, 2),
}


def is_reached(root: object) -> bool:
    return any(place.name.endswith(".number") for place in places_in({"loss": root}))


@pytest.mark.parametrize("way", WAYS)
def test_hops_are_followed_until_they_cost_more_than_eight(way: str) -> None:
    wrap, cost = WAYS[way]
    root = wrap(Kept())
    for spent in range(10):
        assert is_reached(root) == (spent + cost <= 8), spent
        root = closed(root)  # Each of these costs one.
    ALIVE.clear()


def test_a_model_s_layers_are_as_near_as_itself() -> None:
    model: nn.Module = Holder(Kept())
    for _ in range(12):
        model = nn.Sequential(model)
    assert is_reached(model)


def test_what_an_import_names_is_two_hops_away(monkeypatch: pytest.MonkeyPatch) -> None:
    file = types.ModuleType("imported_by_a_loss")
    vars(file).update(inner=Kept())
    monkeypatch.setitem(sys.modules, file.__name__, file)
    root = made_by_code("def made():\n import imported_by_a_loss as one\n return one.inner")
    for spent in range(10):
        assert is_reached(root) == (spent + 2 <= 8), spent
        root = closed(root)


def test_a_tensor_is_a_place_whatever_leads_there() -> None:
    tensor: Tensor = torch.zeros(1)
    names = [place.name for place in places_in({"loss": closed(tensor)})]
    assert names == ["loss.inner"]
