"""Code that runs apart finds copies of what it reaches, wherever it looks, and afterwards everything is as it was."""

from __future__ import annotations

import io
import logging
import sys
import types
import weakref
from collections.abc import Callable
from enum import Enum
from functools import cache, cached_property, lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from cosmati.train import apart as module
from cosmati.train.apart import SharedError, apart
from cosmati.train.timing import Stopwatch
from tests.train import counting_file

STATE: dict[str, Any] = {"calls": 0}
ITEMS: list[int] = []
number = 0
unread: list[int] = []


class Setting:
    """A class of the user's own, which counts in its attributes and in its instances."""

    calls = 0
    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.own = 0

    @staticmethod
    def static() -> None:
        ITEMS.append(1)

    @classmethod
    def by_class(cls) -> None:
        cls.calls += 1
        cls.seen.append(1)

    def method(self) -> None:
        self.own += 1
        STATE["calls"] += 1

    @property
    def read(self) -> int:
        ITEMS.append(2)
        return len(ITEMS)

    @cached_property
    def once(self) -> int:
        ITEMS.append(3)
        return len(ITEMS)


class Child(Setting):
    """Inherits what counts."""


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = [0]

    def __call__(self) -> None:
        self.count[0] += 1


def by_global() -> None:
    global number  # noqa: PLW0603
    number += 1
    STATE["calls"] += 1


def by_new_global() -> None:
    global fresh  # noqa: PLW0603
    fresh = 1  # type: ignore[name-defined]


def by_default(held: list[int] = [], *, named: list[int] = []) -> None:  # noqa: B006  (what users do)
    held.append(1)
    named.append(2)


def by_attribute() -> None:
    by_attribute.count += 1  # type: ignore[attr-defined]
    by_attribute.more = 1  # type: ignore[attr-defined]


by_attribute.count = 0  # type: ignore[attr-defined]


@cache
def kept() -> dict[str, int]:
    return {"calls": 0}


@lru_cache(maxsize=7)
def bounded(of: int) -> torch.Tensor:
    return torch.tensor([float(of)])


@cache
def thing() -> Setting:
    return Setting()


@cache
def filling(of: int) -> torch.Tensor:
    ITEMS.append(of)
    return torch.ones(1)


class HeldInSlot:
    __slots__ = ("call", "unset")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __call__(self) -> None:
        self.call()


def decorated(call: Callable[[], None]) -> Callable[[], None]:
    """Wrap a function as a library does."""

    def wrapper() -> None:
        call()

    wrapper.__module__ = "torch.somewhere"
    return wrapper


def by_cached() -> None:
    kept()["calls"] += 1
    bounded(3).add_(1)


def by_helper() -> None:
    by_global()
    Child.by_class()
    Setting().method()


def by_file() -> None:
    counting_file.normalised(torch.tensor(3.0))


def by_import() -> None:
    from tests.train import counting_file as again

    again.average = -1.0


def closing() -> tuple[Callable[[], None], Callable[[], tuple[int, list[int]]]]:
    count, held = 0, [0]

    def loss() -> None:
        nonlocal count
        count += 1
        held[0] += 1

    return loss, lambda: (count, held)


def reset() -> None:
    globals().update(number=0)
    globals().pop("fresh", None)
    STATE.update(calls=0)
    ITEMS.clear()
    Setting.calls = 0
    Setting.seen.clear()


@pytest.fixture(autouse=True)
def _as_at_first() -> None:
    reset()


def state_now() -> tuple[Any, ...]:
    counted = number, STATE["calls"], [*ITEMS], Setting.calls, [*Setting.seen], "calls" in vars(Child)
    defaults = by_default.__defaults__, by_default.__kwdefaults__
    attributes = dict(vars(by_attribute)), "fresh" in globals(), counting_file.average
    return (*counted, repr(defaults), attributes, dict(kept()), bounded(3).item())


FORMS: dict[str, Any] = {
    "global": by_global,
    "new global": by_new_global,
    "default": by_default,
    "attribute": by_attribute,
    "cached": by_cached,
    "helper": by_helper,
    "file": by_file,
    "import": by_import,
    "static method": Setting.static,
    "class method": Setting.by_class,
    "inherited class method": Child.by_class,
    "method": Setting().method,
    "partial": partial(by_helper),
    "partial of what is held": partial(lambda call: call(), by_global),
    "partial of what is named": partial(lambda call: call(), call=by_global),
    "what a cached function does": partial(filling, 5),
    "held in a slot": HeldInSlot(by_global),
    "within a library's decorator": decorated(by_global),
    "property": partial(getattr, Setting(), "read"),
    "cached property": partial(getattr, Setting(), "once"),
}


@pytest.mark.parametrize("name", FORMS)
def test_code_leaves_no_trace_whatever_it_counts_in(name: str) -> None:
    before, places = state_now(), (STATE, ITEMS, Setting.seen, by_default.__defaults__, kept())
    with apart((FORMS[name], [FORMS[name]])) as (copied, _):
        copied()
        copied()
        assert state_now() != before, "it counts where it looks"
    assert state_now() == before
    now = STATE, ITEMS, Setting.seen, by_default.__defaults__, kept()
    assert all(one is other for one, other in zip(now, places, strict=True))


def test_a_closure_counts_apart_and_is_put_back() -> None:
    loss, told = closing()
    held = told()[1]
    with apart(loss) as copied:
        copied()
        assert told() == (1, [1])
        assert told()[1] is not held
    assert told() == (0, [0])
    assert told()[1] is held


def test_objects_are_copies_and_share_one_another() -> None:
    model, slotted = nn.Linear(2, 2), Slotted()
    shared = Setting()
    with apart({"model": model, "losses": [slotted, (shared, shared)]}) as copied:
        copied["losses"][0]()
        copied["model"].weight.data.zero_()
        one, other = copied["losses"][1]
        one.method()
        assert one is other is not shared
        assert STATE["calls"] == 1
    assert slotted.count == [0]
    assert bool(model.weight.ne(0).any())
    assert (shared.own, STATE["calls"]) == (0, 0)


def test_an_error_puts_everything_back_too() -> None:
    def fails() -> None:
        with apart(by_global) as copied:
            copied()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (number, STATE) == (0, {"calls": 0})


def test_what_code_does_not_name_is_not_copied() -> None:
    before = unread
    with apart(by_global):
        assert globals()["unread"] is before
        assert sys.modules[__name__].ITEMS is ITEMS
    reach = module._Reach()
    reach.follow((by_global, torch.nn.functional.relu, len, 3, "text", None, torch.float32, np.float64(2)))
    assert {id(place.value) for place in reach.places} >= {id(STATE)}
    assert not any(place.value is unread for place in reach.places)
    assert reach.modules == []


def test_imported_modules_and_caches_stand_for_themselves() -> None:
    reach = module._Reach()
    reach.follow([by_cached, np, types.SimpleNamespace(of=torch)])
    assert {id(one) for one in reach.modules} == {id(np), id(torch)}
    assert reach.caches.keys() == {id(kept), id(bounded)}
    assert reach.caches[id(bounded)].cache_parameters() == {"maxsize": 7, "typed": False}  # type: ignore[attr-defined]


class Closes:
    def __del__(self) -> None:
        pass


class Cached:
    @cache  # noqa: B019
    def of(self) -> int:
        return 1

    @staticmethod
    @cache
    def static() -> int:
        return 1


class Kind(Enum):
    one = 1


NOT_APART: dict[str, Callable[[], Any]] = {
    "an open file": io.BytesIO,
    "a logger": lambda: logging.getLogger("x"),
    "what closes": Closes,
    "what belongs to a run": Stopwatch,
    "within": lambda: {"x": [(Closes(),)]},
    "held by an object": lambda: types.SimpleNamespace(it=Closes()),
    "held by a partial": lambda: partial(id, Closes()),
    "named by a partial": lambda: partial(dict, it=Closes()),
    "what a key is": lambda: {Closes(): 1},
    "a static method that caches": Cached,
    "a cached object": lambda: (thing(), thing)[1],
    "a list's own method": lambda: types.SimpleNamespace(note=ITEMS.append),
    "a model that is looked at from afar": lambda: weakref.ref(MODEL),
    "an object of the user's own, too": lambda: weakref.WeakValueDictionary(a=SETTING),
    "and as a key": lambda: weakref.WeakKeyDictionary({SETTING: 1}),
}
MODEL, SETTING = nn.Linear(2, 2), Setting()


@pytest.mark.parametrize("name", NOT_APART)
def test_what_a_copy_would_not_be_apart_from_is_refused(name: str) -> None:
    value, before = NOT_APART[name](), state_now()
    with pytest.raises(SharedError), apart([by_global, value]):
        pass
    assert state_now() == before


def test_tensors_and_arrays_are_copied_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 48)
    tensor, array = torch.zeros(8), np.zeros(2)
    with apart([tensor, array, tensor]) as (one, other, again):
        one.add_(1)
        np.add(other, 1, out=other)
        assert one is again
    assert not tensor.any()
    assert not array.any()
    with pytest.raises(SharedError), apart([tensor, array, torch.zeros(1, dtype=torch.uint8)]):
        pass
    assert module.LARGEST == 48


def test_so_many_values_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(bound: int) -> bool:
        monkeypatch.setattr(module, "_MAX_VALUES", bound)
        reach = module._Reach()
        try:
            reach.follow([[1], [2, "x"], [3.0]])
        except SharedError:
            return True
        return False

    assert [refused(bound) for bound in range(1, 8)] == [True] * 4 + [False] * 3, "four lists, and the class of lists"


def test_members_of_enumerations_are_the_same() -> None:
    with apart([Kind.one, Kind, lambda: Kind.one]) as (one, kind, _):
        assert one is Kind.one
        assert kind is Kind
