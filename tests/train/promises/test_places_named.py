"""Each place that a value lies in is told once: by the path of names there, its kind, its owner, and how to set it."""

from __future__ import annotations

import argparse
import threading
import types
import weakref
from collections import OrderedDict, deque
from functools import cache, lru_cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.loss import Classification
from cosmati.train import held
from cosmati.train.held import Place, places_in

COUNT = 0
TABLE: dict[str, Any] = {}


class Kept:
    """An object of the user's with one number."""

    def __init__(self, number: int = 1) -> None:
        self.number = number


def found(root: object, **others: object) -> dict[str, Place]:
    """Return the places in a root by name; each name is there once."""
    places = list(places_in({"loss": root, **others}))
    by_name = {place.name: place for place in places}
    assert len(by_name) == len(places), [place.name for place in places]
    return by_name


def named(root: object) -> list[str]:
    return [*found(root)]


def made_by_code(text: str, **names: object) -> Any:
    """Return a function of a file of its own, in which some names stand."""
    file: dict[str, object] = {"__name__": "a_file_of_ones_own", **names}
    exec(text, file)
    return file["made"]


def test_a_partial_s_arguments_are_numbered_and_named() -> None:
    root = partial(partial(max, [0], Kept()), [1], key=[2])
    places = found(root)
    assert [(name, place.kind, place.put) for name, place in places.items() if name != "loss(1).number"] == [
        ("loss(0)", "attribute", None),
        ("loss(1)", "attribute", None),
        ("loss(2)", "attribute", None),
        ("loss(key)", "attribute", None),
    ]
    assert [places[name].value for name in ("loss(0)", "loss(2)", "loss(key)")] == [[0], [1], [2]]


def test_attributes_can_be_set_and_are_spoken_of_by_name() -> None:
    class Slotted:
        __slots__ = ("inner",)
        inner: int

    kept, slotted = Kept(), Slotted()
    slotted.inner = 3
    for owner, name in ((kept, "number"), (slotted, "inner")):
        place = found(owner)[f"loss.{name}"]
        assert (place.kind, place.owner, place.attribute) == ("attribute", None, name)
        assert place.is_followed
        assert place.put is not None
        place.put(7)
        assert getattr(owner, name) == 7


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace, threading.local])
def test_attributes_of_namespaces_are_spoken_of_by_name(kind: type) -> None:
    owner = kind()
    owner.number = 1
    assert found(owner)["loss.number"].attribute == "number"


def test_attributes_of_a_library_s_class_may_be_read_by_it() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

    assert found(Layer())["loss.scale"].attribute == ""
    assert found(Classification(3))["loss.num_classes"].attribute == ""


def test_only_a_root_may_be_an_object_of_a_library() -> None:
    task = Classification(3)
    assert "loss.num_classes" in named(task)
    assert named([task]) == []
    assert named(types.SimpleNamespace(task=task)) == ["loss.task"]
    assert named(3) == []


def test_items_of_containers_lead_on_by_key_and_number() -> None:
    assert named([Kept(), 3, Kept()]) == ["loss[0].number", "loss[2].number"]
    assert named((3, Kept())) == ["loss[1].number"]
    assert named({"a": Kept(), 4: Kept()}) == ["loss[a].number", "loss[4].number"]
    assert named(OrderedDict(a=Kept())) == ["loss[a].number"]
    assert named(deque([3, Kept()])) == ["loss[1].number"]


def test_a_container_of_ones_own_keeps_more_than_items() -> None:
    class Longer(list[Any]):
        number = 4

    longer = Longer([Kept()])
    longer.note = "b"  # type: ignore[attr-defined]
    assert named(longer) == ["loss[0].number", "loss.note", "Longer.number"]


def test_beyond_a_thousand_items_it_is_said_that_there_is_more() -> None:
    for beyond, is_whole in (([], True), ([Kept()], False), ([3, 4], True), ([3, Kept(), 3], False)):
        *places, last = places_in({"loss": [*(Kept() for _ in range(1000)), *beyond]})
        if not is_whole:
            assert (last.name, last.kind, last.value, last.is_followed) == ("loss", "attribute", None, False)
        assert all(place.is_followed for place in places)
        assert [place.name for place in [*places, last][:1000]] == [f"loss[{index}].number" for index in range(1000)]
        assert len(places) == (999 if is_whole else 1000)
    [more] = places_in({"": dict(enumerate([*range(1000), Kept()]))})
    assert (more.name, more.is_followed) == ("", False)


def test_what_is_reached_twice_is_told_once() -> None:
    kept = Kept()
    kept.me = kept  # type: ignore[attr-defined]
    assert named([kept, kept]) == ["loss[0].number", "loss[0].me"]
    assert [place.name for place in places_in({"a": kept, "b": kept})] == ["a.number", "a.me"]


def test_a_weak_reference_leads_on_and_is_a_place() -> None:
    kept = Kept()
    root = weakref.ref(kept)
    places = found(root)
    assert [(name, place.value, place.put) for name, place in places.items()] == [
        ("loss", kept, None),
        ("loss.number", 1, places["loss.number"].put),
    ]
    assert [place.name for place in places_in({"a": root, "b": root})] == ["a", "a.number"]
    del kept, places
    assert named(root) == []


def test_the_method_of_a_container_or_tensor_leads_to_it() -> None:
    history, scale = [Kept()], torch.zeros(2)
    assert found(history.append)["loss"].value is history
    assert named(history.append) == ["loss", "loss[0].number"]
    assert found(scale.add_)["loss"].value is scale
    assert [place.name for place in places_in({"a": history.append, "b": history.append})] == ["a", "a[0].number"]
    assert named(len) == []


def test_a_method_leads_to_its_object_and_to_what_it_names() -> None:
    class Task:
        def __init__(self) -> None:
            self.number = 1

        def run(self) -> object:
            return self.helper()

        def helper(self) -> int:
            return COUNT

        def unused(self) -> object:
            return TABLE

    assert named(Task().run) == ["loss.number", "loss.helper.COUNT"]
    assert named(Task().unused) == ["loss.number", "loss.unused.TABLE"]


def test_a_library_s_function_that_is_bound_is_not_read() -> None:
    inner = Kept()
    read = made_by_code("def made(self): return inner", inner=inner)
    bound = types.MethodType(read, types.SimpleNamespace())
    assert named(bound) == ["loss.inner", "loss.inner.number"]
    read.__module__ = "torch.somewhere"
    assert named(bound) == []


def test_a_library_s_function_is_read_where_it_is_the_loss() -> None:
    read = made_by_code("def made(): return inner", inner=Kept())
    read.__module__ = "torch.somewhere"
    assert named(read) == ["loss.inner", "loss.inner.number"]
    assert named([read]) == []


def test_a_cached_function_tells_what_it_holds() -> None:
    @cache
    def table(name: str) -> object:
        return TABLE or {"name": name}

    table("a")
    places = found(table)
    assert [*places] == ["loss.TABLE", "loss(...)['a']"]
    assert places["loss(...)['a']"].put is None
    assert [place.name for place in places_in({"a": table, "b": table})] == ["a.TABLE", "a(...)['a']"]


def test_one_result_of_many_arguments_is_told_once() -> None:
    kept = Kept()

    @lru_cache(maxsize=8)
    def table(_name: str) -> object:
        return kept

    table("a")
    table("b")
    assert named(table) == ["loss.kept", "loss.kept.number", "loss(...)['a']"]


def test_results_that_cannot_be_listed_are_said_not_to_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "cached_results", lambda _function: None)
    table = cache(lambda name: name)
    [place] = places_in({"loss": table})
    assert (place.name, place.kind, place.value, place.is_followed) == ("loss", "attribute", None, False)
    [place] = places_in({"": table})
    assert place.name == ""
