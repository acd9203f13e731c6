"""What is a user's own object, what leads on, and where its attributes lie."""

from __future__ import annotations

import argparse
import collections
import functools
import math
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cosmati.train.user_objects import (
    fields_and_setters,
    fields_of,
    is_of_library,
    is_users_own,
    leads_on,
    top_of,
    written_by,
)


class Plain:
    def __init__(self) -> None:
        self.x, self.y = 1, 2


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self) -> None:
        self.x = 1


class Both(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.z = 3


class Empty:
    __slots__ = ()


class OneSlot:
    __slots__ = "only"  # noqa: PLC0205

    def __init__(self) -> None:
        self.only = 5


@pytest.mark.parametrize(
    ("value", "fields"),
    [(Plain(), {"x": 1, "y": 2}), (Slotted(), {"x": 1}), (Both(), {"x": 1, "z": 3}), (OneSlot(), {"only": 5}), (3, {})],
)
def test_attributes_lie_in_a_dictionary_or_in_slots(value: Any, fields: dict[str, int]) -> None:
    assert fields_of(value) == fields
    if fields:
        found = fields_and_setters(value)
        assert {name: own for name, own, _ in found} == fields
        for name, own, put in found:
            put(own + 10)
            assert getattr(value, name) == own + 10
            put(own)
        first = next(iter(fields))
        assert {name for name, _, _ in fields_and_setters(value, {first})} == fields.keys() - {first}


@pytest.mark.parametrize(
    ("value", "is_own"),
    [
        (Plain(), True),
        (Slotted(), True),
        (Empty(), False),
        (Plain, False),
        (types.SimpleNamespace(), True),
        (argparse.Namespace(), True),
        (threading.local(), True),
        (nn.Linear(1, 1), False),
        (collections.deque(), False),
        (torch.ones(1), False),
        (3, False),
    ],
)
def test_what_is_somebodys_own(value: object, is_own: bool) -> None:
    assert is_users_own(value) is is_own


def test_what_leads_on() -> None:
    def function() -> None: ...

    own = Plain()
    queue: list[int] = []
    for value in (nn.Linear(1, 1), function, functools.partial(function), weakref.ref(own), own, queue.append):
        assert leads_on(value)
    for value in (3, "text", torch.ones(1), [1], math.sin, len):
        assert not leads_on(value)


def test_whose_method_a_built_in_is() -> None:
    queue: list[int] = []
    tensor, array = torch.ones(1), np.ones(1)
    assert written_by(queue.append) is queue
    assert written_by(tensor.add_) is tensor
    assert written_by(array.fill) is array
    for other in (math.sin, "x".join, len, print, lambda: None, queue):
        assert written_by(other) is None


def test_what_comes_with_a_library() -> None:
    assert top_of("a.b.c") == "a"
    assert top_of(None) == ""
    for value in (math.sin, nn.functional.relu, torch.nn, nn.Linear, math):
        assert is_of_library(value)
    for value in (test_what_leads_on, Plain, [].append, 3):
        assert not is_of_library(value)
