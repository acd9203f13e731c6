"""An object's options are its plain values that decide what it computes, by name, the same in every process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
import types
from argparse import Namespace
from collections import UserDict
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmati.core.later import later
from cosmati.core.state import parameter_root
from cosmati.train import options
from cosmati.train.options import (
    DECLARED,
    Described,
    describe_option,
    name_of,
    public_scalars,
    says_what,
    scalar_or_items,
)

HERE = __name__
TEMPERATURE, NOTES, TABLE, _HIDDEN, UNTOLD = 2.5, [1, 2], {"a": 1}, 7, None
COUNTS: dict[str, int] = {}


def digested(items: list[Any]) -> str:
    """Return what stands for a long list."""
    return f"{len(items)} items, {hashlib.sha256(json.dumps(items).encode()).hexdigest()[:32]}"


class Settings:
    """Of the user's own, without code that reads it."""

    rate = 0.5

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class Reading(Settings):
    """Its code reads its scale."""

    def apply(self) -> float:
        return self.scale  # type: ignore[attr-defined, no-any-return]


class Calling(Settings):
    """Computes by its scale, and by a global."""

    rate = 0.25

    def __call__(self, model: nn.Module, data: Any) -> float:
        return self.scale * TEMPERATURE  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def of_class(cls) -> float:
        return cls.rate


class Counting(Settings):
    """Declares what it counts, beside what its base declares."""

    forward_caches = ("calls",)


class CountingMore(Counting):
    forward_caches = ("seen",)


@dataclasses.dataclass
class Given:
    """A dataclass of the user's own."""

    scale: float = 1.0
    added: int = later(default=3)

    def apply(self) -> float:
        return self.scale


class Colour(Enum):
    RED = 1


class Raising:
    """Can't be looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError


def plain(model: nn.Module, data: Any) -> float:
    return 1.0


def scaled(model: nn.Module, data: Any, scale: float = 3.0, *, shift: float = 4.0, gain: float = 5.0) -> float:
    return scale + shift + gain


def by_scale(settings: Any) -> float:
    return settings.scale  # type: ignore[no-any-return]


# Names


def test_a_name_is_that_of_a_function_a_class_or_an_objects_class() -> None:
    assert name_of(plain) == f"{HERE}.plain"
    assert name_of(Settings) == name_of(Settings()) == f"{HERE}.Settings"
    assert name_of(Calling.of_class) == f"{HERE}.Calling.of_class"
    assert name_of(3) == name_of(int) == "builtins.int"


@pytest.mark.parametrize("name", ["device", "_gpu_id", "RANK", "ddp_local_rank", "is_main_process", "name_or_path"])
def test_names_of_places_say_nothing_of_what_is_computed(name: str) -> None:
    assert not says_what(name)
    assert public_scalars(Settings(**{name: 1, "scale": 2})) == {"scale": 2}


@pytest.mark.parametrize("name", ["scale", "ranks", "ddp_device", "_scale"])
def test_other_names_do(name: str) -> None:
    assert says_what(name)


# Plain values


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (True, True),
        (3, 3),
        (-1.5, -1.5),
        ("cosine", "cosine"),
        (b"ab", "b'ab'"),
        (1 + 2j, "(1+2j)"),
        (np.float32(1.5), 1.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.float64("nan"), "nan"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ("cuda:1", None),
        ("cpu", None),
        ("cpu:", "cpu:"),
        ("on cuda", "on cuda"),
        ("2026-01-31", "2026-01-31"),
        ("2026-01-31 12:30", None),
        ("2026-01-31T12:30:05.25", None),
        ("123e4567-e89b-12d3-a456-426614174000", None),
        ("/tmp/tmpab12cd_9/rows", None),
        ("/data/temporary/rows", "/data/temporary/rows"),
    ],
)
def test_a_scalar_is_told_as_json_holds_it_but_for_what_belongs_to_one_process(value: Any, told: object) -> None:
    for found in (scalar_or_items(value), Described().value(value, None), Described().value(value)):
        assert found == told
        assert type(found) is type(told)
    assert scalar_or_items([value]) == [told]


@pytest.mark.parametrize(
    ("value", "is_time"),
    [
        (1.5e9 + 0.25, True),
        (1.4e9 + 0.25, True),
        (4e9 - 0.25, True),
        (1.4e9 - 0.25, False),
        (4e9 + 0.25, False),
        (1.5e9, False),
        (1.4e9, False),
        (15 * 10**17, True),
        (14 * 10**17, False),
        (14 * 10**17 + 1000, True),
        (4 * 10**18, False),
        (4 * 10**18 - 1000, True),
        (15 * 10**8, False),
        (0.5, False),
        (-(15 * 10**17), False),
    ],
)
def test_a_fraction_of_a_second_or_nanoseconds_of_these_years_are_when_something_was_made(
    value: float, is_time: bool
) -> None:
    assert scalar_or_items(value) == (None if is_time else value)


def test_plain_values_nest_as_lists_and_by_strings() -> None:
    assert scalar_or_items({1: (2, [np.int64(3)]), "b": {"c": b"d"}}) == {"1": [2, [3]], "b": {"c": "b'd'"}}
    assert scalar_or_items(UserDict(a=(1,))) == {"a": [1]}
    assert scalar_or_items((1, "cpu")) == [1, None]


@pytest.mark.parametrize(
    ("value", "is_plain"),
    [
        (1, True),
        ("text", True),
        ("cuda:0", False),
        (None, False),
        (object(), False),
        ([], False),
        ({}, False),
        ([1], True),
        ((1, 2.0), True),
        ([1, None], False),
        ({"a": 1}, True),
        ({"a": None, "b": 1}, False),
        ([[1]], True),
        ({"a": {"b": 1}}, True),
        ([[[1]]], False),
        ({"a": {"b": {"c": 1}}}, False),
        ([0] * 32, True),
        ([0] * 33, False),
        ({1, 2}, False),
    ],
)
def test_attributes_count_as_plain_values_where_they_are_few_and_flat(value: object, is_plain: bool) -> None:
    assert public_scalars(Settings(one=value)) == ({"one": scalar_or_items(value)} if is_plain else {})


def test_of_an_optimizer_public_attributes_are_told_but_for_counts_and_what_is_left_out() -> None:
    value = CountingMore(scale=1.0, _own=2, calls=3, seen=4, lr=5, rows=object())
    assert public_scalars(value) == {"scale": 1.0, "lr": 5}
    assert public_scalars(value, ["lr"]) == {"scale": 1.0}
    assert public_scalars(3) == {}


# Options of methods and optimizers


def test_an_option_that_prints_itself_is_told_as_printed() -> None:
    for value in (None, True, 3, 1.5, "a"):
        assert describe_option(value) is value
    assert describe_option(Given(2.0)) == "Given(scale=2.0, added=3)"
    assert describe_option(torch.device("cpu")) == "device(type='cpu')"
    assert describe_option((1, 2)) == "(1, 2)"
    assert describe_option({"b", "a"}) == ["'a'", "'b'"]
    assert describe_option(frozenset({2, 1})) == ["1", "2"]
    assert describe_option(object()) is None


def test_an_option_of_ones_own_is_told_with_its_code() -> None:
    told: Any = describe_option(plain)
    assert told == {"is": f"{HERE}.plain", "code": told["code"]}
    assert told["code"] != describe_option(by_scale)["code"]  # type: ignore[index]
    assert describe_option(Settings(scale=2)) == {"is": f"{HERE}.Settings", "scale": 2}
    called: Any = describe_option(Calling(scale=2, note="x"))
    assert called == {"is": f"{HERE}.Calling", "scale": 2, "code": called["code"]}
    assert describe_option(Settings) == f"{HERE}.Settings"
    given: Any = describe_option(partial(len, [1]))
    assert given == {"is": "functools.partial", "of": {"is": "builtins.len"}, "given": [[1], {}]}
    method: Any = describe_option(Given(2.0).apply)
    assert method["owner"] == {"is": f"{HERE}.Given", "scale": 2.0}


# Losses


def test_a_partial_is_told_by_its_function_and_what_it_is_given() -> None:
    settings = Namespace(scale=2.0, out="here")
    told = Described().loss(partial(by_scale, settings, gain=settings, _own=1))
    held = {"is": "argparse.Namespace", "scale": 2.0}
    assert told == {
        "is": "functools.partial",
        "of": {"is": f"{HERE}.by_scale", "closure": {}, "defaults": []},
        "given": [held, {"gain": held}],
    }


def test_a_function_is_told_by_its_defaults_in_the_order_of_names() -> None:
    assert Described().loss(scaled) == {"is": f"{HERE}.scaled", "closure": {}, "defaults": [3.0, 5.0, 4.0]}
    assert Described().loss(plain) == {"is": f"{HERE}.plain", "closure": {}, "defaults": []}


def test_a_function_is_told_by_what_it_closes_over_but_for_records_and_counts() -> None:
    held, seen, settings, calls = [1, 2], [5], Namespace(scale=2.0, out="here"), {"a": 1}

    def own(model: nn.Module, data: Any) -> Any:
        seen.append(1)
        return settings.scale, calls, held

    def other(model: nn.Module, data: Any) -> Any:
        return held

    own.forward_caches = ("calls",)  # type: ignore[attr-defined]
    assert Described().loss(own)["closure"] == {
        "calls": DECLARED,
        "settings": {"is": "argparse.Namespace", "scale": 2.0},
    }
    assert Described().loss(other)["closure"] == {"held": [1, 2]}


def test_a_functions_attributes_are_told_but_for_what_it_writes_or_declares() -> None:
    def own(model: nn.Module, data: Any) -> float:
        own.calls += 1  # type: ignore[attr-defined]
        return own.settings.scale  # type: ignore[attr-defined, no-any-return]

    vars(own).update(calls=3, settings=Namespace(scale=2.0, out="a"), gain=4, _hidden=5, seen=6)
    own.forward_caches = ("seen",)  # type: ignore[attr-defined]
    assert Described().loss(own)["attributes"] == {
        "settings": {"is": "argparse.Namespace", "scale": 2.0},
        "gain": 4,
    }
    assert "attributes" not in Described().loss(plain)


def test_a_method_is_told_by_its_owner_and_a_class_method_by_its_class() -> None:
    told = Described().loss(Calling(scale=2.0, note="x").__call__)
    assert told == {
        "is": f"{HERE}.Calling.__call__",
        "owner": told["owner"],
        "globals": {"TEMPERATURE": 2.5},
    }
    assert told["owner"]["scale"] == 2.0
    assert "note" not in told["owner"]

    class Own:
        rate, _hidden, forward_caches = 0.25, 3, ("calls",)
        calls = 4

        @classmethod
        def loss(cls) -> float:
            return cls.rate + cls.calls

    told = Described(with_code=True).loss(Own.loss)
    assert told["owner"]["rate"] == 0.25
    assert told["owner"]["calls"] == DECLARED
    assert "_hidden" not in told["owner"]
    assert told["code"]
    assert "code" in Described(with_code=True).loss(Calling(scale=1).__call__)


def test_an_object_is_told_by_its_attributes_and_by_the_globals_of_its_methods() -> None:
    assert Described().loss(Calling(scale=2.0, note="x", _own=3, rank=4)) == {
        "is": f"{HERE}.Calling",
        "scale": 2.0,
        "note": "x",
        "globals": {"TEMPERATURE": 2.5},
    }


def test_a_loss_that_cannot_be_looked_at_has_its_name_and_the_next_is_told_as_ever() -> None:
    described = Described()
    assert described.loss(Raising()) == {"is": f"{HERE}.Raising"}
    assert described.value([Raising(), [1]]) == [None, [1]]
    # What raised is closed again, or the seventh would be too deep.
    assert described.value([Raising() for _ in range(9)]) == [None] * 9
    assert described.value([[[[[1]]]]]) == [[[[[1]]]]]


class Criterion(nn.Module):
    """A loss with a module and a value of its own."""

    def __init__(self, weight: float = 0.5) -> None:
        super().__init__()
        self.weight, self.inner = weight, nn.Dropout(0.25)
        self.helper = Settings(scale=1)
        self.__dict__["unlisted"] = nn.Identity()

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows) * self.weight  # type: ignore[no-any-return]


def test_a_loss_that_is_a_module_is_told_by_its_modules_and_its_attributes() -> None:
    criterion = Criterion()
    criterion.inner.note = "x"  # type: ignore[assignment]
    assert Described().loss(criterion) == {
        "is": f"{HERE}.Criterion",
        "module": {
            "(root)": f"{HERE}.Criterion()",
            "inner": "torch.nn.modules.dropout.Dropout(p=0.25, inplace=False)",
            "options": {"inner": {"note": "x"}},
        },
        "weight": 0.5,
        "helper": {"is": f"{HERE}.Settings", "scale": 1},
    }


# Code


def test_code_is_told_of_the_users_own_functions_and_only_where_it_is_asked_for() -> None:
    assert "code" not in Described().loss(plain)
    assert "code" in Described(with_code=True).loss(plain)
    assert "code" not in Described(with_code=True).loss(nn.functional.relu)
    assert "code" not in Described(with_code=True).loss(Settings(scale=1).__init__)  # type: ignore[misc]
    assert Described(with_code=True).value(nn.functional.relu) == "torch.nn.functional.relu"


# Globals


def reads_all(model: nn.Module) -> Any:
    return TEMPERATURE, TABLE, NOTES, _HIDDEN, UNTOLD, plain, alias, scaled, Calling.rate, Given, reads_all


alias = plain


def records(model: nn.Module) -> Any:
    NOTES.extend([3])
    return TEMPERATURE


def fills(model: nn.Module) -> Any:
    COUNTS["a"] = 1
    return TEMPERATURE


def writes_rate(model: nn.Module) -> Any:
    Calling.rate = 0.5
    return Calling.rate


def test_a_global_is_told_by_name_but_for_what_its_name_already_says() -> None:
    (found,) = Described().globals([reads_all])
    assert found == (
        "globals",
        {
            "TEMPERATURE": 2.5,
            "TABLE": {"a": 1},
            "NOTES": [1, 2],
            "alias": f"{HERE}.plain",
            "scaled": {"is": f"{HERE}.scaled", "defaults": [3.0, 5.0, 4.0]},
            "Calling": {"rate": 0.25},
        },
    )


def test_what_code_appends_to_fills_or_writes_is_no_global_option() -> None:
    assert list(Described().globals([records])) == [("globals", {"TEMPERATURE": 2.5})]
    assert list(Described().globals([fills])) == [("globals", {"COUNTS": DECLARED, "TEMPERATURE": 2.5})]
    assert list(Described().globals([writes_rate])) == []
    assert list(Described().globals([plain])) == []
    assert list(Described().globals([nn.functional.relu])) == []


def test_what_a_function_or_an_owner_declares_is_told_without_its_value() -> None:
    def own(model: nn.Module) -> Any:
        return TEMPERATURE, NOTES, Calling.rate

    own.forward_caches = ("TEMPERATURE",)  # type: ignore[attr-defined]

    class Owner:
        forward_caches = ("NOTES", "rate")

    assert dict(Described().globals([own], Owner, 3))["globals"] == {
        "TEMPERATURE": DECLARED,
        "NOTES": DECLARED,
        "Calling": {"rate": DECLARED},
    }


def test_of_a_class_or_module_the_plain_values_that_code_reads_are_told_and_of_a_librarys_none() -> None:
    own = types.ModuleType("settings_of_ones_own")
    vars(own).update(scale=2.0, unread=3, _hidden=4, calls=5, rows=object(), rank=6)
    said = frozenset({"scale", "_hidden", "calls", "rows", "rank", "pi", "rate"})
    assert options._settings_in(own, said, frozenset({"calls"})) == {"scale": 2.0, "calls": DECLARED}
    assert options._settings_in(math, said, frozenset()) == {}
    assert options._settings_in(Settings, said, frozenset()) == {"rate": 0.5}
    library = type("Library", (), {"scale": 1, "__module__": "torch"})
    assert options._settings_in(library, said, frozenset()) == {}


# Any object


class Held(Settings):
    """Its code speaks of one attribute, and adds to another."""

    def apply(self) -> Any:
        self.seen.append(self.scale)  # type: ignore[attr-defined]
        return self.inner  # type: ignore[attr-defined]


def test_of_an_object_what_code_speaks_of_counts_or_all_where_it_speaks_of_none() -> None:
    value = Settings(scale=1, out="a", other=2)
    assert Described().value(value) == {"is": f"{HERE}.Settings", "scale": 1, "out": "a", "other": 2}
    assert Described().value(value, None) == Described().value(value)
    assert Described().value(value, frozenset({"out"})) == {"is": f"{HERE}.Settings", "out": "a"}
    assert Described().value(Reading(scale=1, out="a"), None) == {"is": f"{HERE}.Reading", "scale": 1}
    assert Described().value(Reading(scale=1, out="a"), frozenset({"out"})) == {
        "is": f"{HERE}.Reading",
        "scale": 1,
        "out": "a",
    }
    assert Described().value(Settings(none=None, _own=1, training=True)) == f"{HERE}.Settings"
    assert Described().value(Counting(calls=1, scale=2)) == {"is": f"{HERE}.Counting", "calls": DECLARED, "scale": 2}


def test_within_an_object_its_own_code_and_that_which_holds_it_are_asked() -> None:
    inner = Settings(scale=1, out="a", other=2)
    value = Held(scale=3, inner=inner, seen=[1])
    told = {"is": f"{HERE}.Settings", "scale": 1}
    assert Described().value(value, None) == {"is": f"{HERE}.Held", "scale": 3, "inner": told}
    assert Described().value(value, frozenset({"out"})) == {
        "is": f"{HERE}.Held",
        "scale": 3,
        "inner": {**told, "out": "a"},
    }


def test_later_options_of_a_dataclass_are_told_where_they_have_another_value() -> None:
    assert Described().value(Given(2.0)) == {"is": f"{HERE}.Given", "scale": 2.0}
    assert Described().value(Given(2.0, 4), frozenset({"added"})) == {"is": f"{HERE}.Given", "scale": 2.0, "added": 4}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, None),
        (torch.device("cpu"), None),
        (torch.float16, "torch.float16"),
        (torch.Size([2, 3]), "torch.Size([2, 3])"),
        (Colour.RED, "Colour.RED"),
        (Settings, f"{HERE}.Settings"),
        (len, "builtins.len"),
        (threading.Lock(), None),
        (datetime(2026, 1, 1, tzinfo=UTC), None),
        (plain, f"{HERE}.plain"),
        (math.sqrt, "math.sqrt"),
        (wraps, "functools.wraps"),
        (types.SimpleNamespace(a=1), {"is": "types.SimpleNamespace", "a": 1}),
        (partial(plain, 1), {"is": "functools.partial", "given": [1, {}]}),
        ((1, [2]), [1, [2]]),
        ({3, 10, 2}, [10, 2, 3]),
        (np.asarray(["a", None], dtype=object), None),
    ],
)
def test_what_stands_for_a_value(value: Any, told: object) -> None:
    for said in (None, frozenset()):
        found = Described().value(value, said)
        if isinstance(value, partial):
            found.pop("of")  # type: ignore[attr-defined]
        assert found == told


def test_a_function_among_values_is_told_by_what_it_has() -> None:
    assert Described().value(scaled) == {"is": f"{HERE}.scaled", "defaults": [3.0, 5.0, 4.0]}
    assert Described().value([Calling(scale=1).of_class])[0]["owner"]["rate"] == 0.25  # type: ignore[index]


def test_a_list_that_code_adds_to_is_a_record_and_others_are_not() -> None:
    for name in ("append", "extend", "insert", "appendleft"):
        assert Described().value([1, 2], frozenset({name})) is None
    assert Described().value([1, 2], frozenset({"add"})) == [1, 2]
    assert Described().value((1, 2), frozenset({"append"})) == [1, 2]
    assert Described().value([1, 2], None) == [1, 2]


def test_of_a_mapping_the_keys_that_code_speaks_of_count_and_of_a_dict_all_where_there_are_none() -> None:
    settings = {"scale": 1, "out": Settings(a=1, b=2), "_own": 3, "": 4, 5: 6, "device": "x"}
    everything = {"scale": 1, "out": {"is": f"{HERE}.Settings", "a": 1, "b": 2}, "5": 6}
    assert Described().value(settings) == Described().value(settings, None) == everything
    assert Described().value(settings, frozenset({"scale", "_own"})) == {"scale": 1}
    assert Described().value(settings, frozenset({"out", "a"})) == {"out": {"is": f"{HERE}.Settings", "a": 1}}
    assert Described().value(settings, frozenset({"other"})) == everything
    assert Described().value(UserDict(settings), frozenset({"scale"})) == {"scale": 1}
    assert Described().value(UserDict(settings), frozenset({"other"})) == {}
    assert Described().value(UserDict(settings), None) == {}


def test_of_the_members_of_a_set_or_list_what_code_speaks_of_counts() -> None:
    member, said, told = Settings(a=1, b=2), frozenset({"a"}), {"is": f"{HERE}.Settings", "a": 1}
    assert Described().value([member, (member,)], said) == [told, [told]]
    assert Described().value({member}, said) == [told]


def test_above_32_items_a_digest_stands_for_them() -> None:
    assert Described().value(list(range(32))) == list(range(32))
    assert Described().value(list(range(33))) == digested(list(range(33)))
    assert Described().value(set(range(33))) == digested(sorted(range(33), key=repr))
    pairs = {f"k{i}": i for i in range(33)}
    assert Described().value(pairs) == digested([pairs])
    few = dict([*pairs.items()][:32])
    assert Described().value(few) == few
    assert Described().value([few, 1, [2]]) == [few, 1, [2]]
    many = Settings(**dict([*pairs.items()][:31]))
    assert Described().value([many]) == [Described().value(many)]
    many.more = 1  # type: ignore[attr-defined]
    assert Described().value([1, many]) == digested([1, Described().value(many)])


def test_what_lies_too_deep_or_in_itself_has_its_name() -> None:
    deep: Any = []
    for _ in range(9):
        deep = [deep]
    assert Described().value(deep) == [[[[[[["builtins.list"]]]]]]]
    assert Described().value([[[[[[[None, torch.device("cpu"), 1, Colour.RED]]]]]]]) == [
        [[[[[[None, None, 1, "Colour.RED"]]]]]]
    ]
    circle: list[Any] = [1]
    circle.append([circle])
    assert Described().value(circle) == [1, ["builtins.list"]]


def test_a_record_is_left_out_where_a_list_is_too_deep_to_be_told() -> None:
    deep: Any = [records, Held(seen=[1], scale=3, inner=(2,))]
    for _ in range(5):
        deep = [deep]
    told: Any = Described().value(deep)
    for _ in range(5):
        (told,) = told
    assert told == [
        {"is": f"{HERE}.records", "globals": {"TEMPERATURE": 2.5}},
        {"is": f"{HERE}.Held", "scale": 3, "inner": "builtins.tuple"},
    ]


def test_of_more_than_20_000_values_the_rest_have_their_names() -> None:
    assert Described().value([[]] * 20_001) == digested([*[[]] * 19_999, "builtins.list", "builtins.list"])


# Tensors and modules


def test_a_tensor_is_told_by_its_digest_or_where_it_has_none_by_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.arange(3.0)
    assert Described().value(one) == parameter_root({"": one}).hex() != Described().value(one + 1)
    assert Described([one]).value(one) == "of the model"
    assert Described([one + 1]).value(one) == parameter_root({"": one}).hex()
    assert Described().value(torch.empty(2, 3, device="meta")) == "torch.float32[2, 3]"
    assert Described().value(one.to_sparse()) == "torch.float32[3]"
    assert Described().value(one.clone().requires_grad_()) == Described().value(one)
    monkeypatch.setattr(options, "parameter_root", lambda _: b"\x01")
    # Of one element in memory, so that no quarter of a gigabyte is.
    assert Described().value(torch.zeros(1, dtype=torch.uint8).expand(1 << 28)) == "01"
    assert Described().value(torch.zeros(1, dtype=torch.uint8).expand((1 << 28) + 1)) == "torch.uint8[268435457]"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantized_and_nested_tensors_are_told() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    assert Described().value(quantized) == "torch.qint8[3]"
    parts = [torch.ones(2), torch.zeros(3)]
    told = ", ".join(parameter_root({"": part}).hex() for part in parts)
    assert Described().value(torch.nested.nested_tensor(parts)) == told


def test_an_array_is_told_by_its_bytes_an_empty_one_too() -> None:
    for array, held in ((np.arange(3, dtype=np.int16), [0, 0, 1, 0, 2, 0]), (np.zeros(0), [0])):
        assert Described().value(array) == parameter_root({"": torch.tensor(held, dtype=torch.uint8)}).hex()


class Layer(nn.Module):
    """No library's code reads what it has."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        vars(self).update(given)

    def apply_own(self) -> int:
        return 1


class Dense(nn.Linear):
    """A library's code reads what it has."""

    forward_caches = ("calls",)


def test_a_module_in_what_is_described_is_told_with_its_state_and_what_it_does_not_print() -> None:
    held = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    held[0].note, held[0]._own, held[0].device, held.calls = "x", 1, "here", 2
    tensors = dict(held.named_parameters())
    assert Described().value(held) == {
        "(root)": "torch.nn.modules.container.Sequential()",
        "0": "torch.nn.modules.linear.Linear(in_features=2, out_features=1, bias=True)",
        "1": "torch.nn.modules.dropout.Dropout(p=0.5, inplace=False)",
        "options": {"(root)": {"calls": 2}, "0": {"note": "x"}},
        "state": parameter_root(tensors).hex(),
    }
    norm = nn.BatchNorm1d(2)
    tensors = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
    assert Described().value(norm)["state"] == parameter_root(tensors).hex()  # type: ignore[index]
    told: Any = Described().value(nn.Identity())
    assert told == {"(root)": "torch.nn.modules.linear.Identity()"}
    counting = Dense(2, 1)
    counting.calls, counting.rows = 3, [[[1]]]
    assert Described().value(counting)["options"] == {"(root)": {"calls": DECLARED}}  # type: ignore[index]


def test_a_module_of_the_model_is_told_without_its_state_and_within_the_model_not_at_all() -> None:
    held = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    told: Any = Described([held[0].weight]).value(held)
    assert "state" not in told
    assert told.keys() == {"(root)", "0", "1"}
    assert Described([held[0].weight], in_model=True).value(held) == {}
    assert "state" in Described([torch.zeros(1)], in_model=True).value(held)  # type: ignore[operator]
    norm = nn.BatchNorm1d(2, affine=False)
    assert "state" not in Described([norm.running_mean]).value(norm)  # type: ignore[operator, list-item]


def test_of_a_module_that_only_users_code_reads_what_the_code_speaks_of_is_told() -> None:
    layer = Layer(scale=1.0, out="a", sizes=[1, 2], shape=(3,), empty=[], _own=1, rank=2, training=True)
    told = {"sizes": [1, 2], "shape": [3]}
    assert Described().module(layer, frozenset(), frozenset()) == told
    assert Described().module(layer, frozenset({"scale", "_own", "rank", "training"}), frozenset()) == {
        "scale": 1.0,
        **told,
    }
    for name in ("getattr", "vars", "__dict__"):
        assert Described().module(layer, frozenset({name}), frozenset()) == {"scale": 1.0, "out": "a", **told}


def test_of_a_module_that_a_librarys_code_reads_all_is_told_that_it_does_not_print() -> None:
    layer = Dense(2, 1)
    layer.scale, layer.calls, layer.table, layer.rows, layer.fill = 1.0, 2, torch.ones(1), np.ones(1), None
    assert Described().module(layer, frozenset(), frozenset()) == {"scale": 1.0, "calls": DECLARED}


def test_settings_functions_and_methods_of_a_module_are_told_unless_code_writes_them() -> None:
    settings = Namespace(scale=2.0, out="a")
    layer = Layer(settings=settings, act=scaled, config={"scale": 1, "out": "a"}, deep={"a": {"b": {"c": 1}}})
    vars(layer).update(inner=nn.Identity(), members={1}, route=Reading(scale=1).apply, place="cpu", none=None)
    said = frozenset({"settings", "act", "config", "deep", "inner", "members", "route", "place", "scale", "none"})
    held = {
        "settings": {"is": "argparse.Namespace", "scale": 2.0},
        "act": {"is": f"{HERE}.scaled", "defaults": [3.0, 5.0, 4.0]},
        "route": f"{HERE}.Reading.apply",
    }
    assert Described().module(layer, said, frozenset()) == {**held, "config": {"scale": 1}}
    assert Described().module(layer, said - {"scale"}, frozenset({"settings", "act", "route", "config"})) == {
        "config": {"scale": 1, "out": "a"}
    }


def test_a_plain_tensor_counts_though_a_module_below_has_parameters_of_such_a_name() -> None:
    layer = Layer(table=torch.ones(2), weight=torch.ones(3), _own=torch.ones(1), rank=torch.ones(1), scale=2.0)
    layer.table_layer = nn.Linear(1, 1)
    layer.weight_g = nn.Parameter(torch.ones(1))
    described = Described()
    assert described.contents(layer, frozenset()) == {"table": parameter_root({"": torch.ones(2)}).hex()}


def test_only_modules_of_ones_own_upon_module_itself_are_read_by_users_alone() -> None:
    read: Callable[[type], bool] = options._is_read_by_users_alone
    assert [read(kind) for kind in (Layer, type("Below", (Layer,), {}), Dense, nn.Linear)] == [True, True, False, False]


def test_what_is_declared_is_that_of_the_function_or_of_all_bases() -> None:
    def own() -> None: ...

    assert options._declared(own) == options._declared(Settings()) == options._declared(3) == frozenset()
    own.forward_caches = ["a"]  # type: ignore[attr-defined]
    assert options._declared(own) == {"a"}
    assert options._declared(CountingMore) == options._declared(CountingMore()) == {"calls", "seen"}


GAIN = 2.0


class Inherited(Settings):
    """Has its rate from its base."""

    scale = 3.0

    @classmethod
    def loss(cls, model: nn.Module, data: Tensor) -> float:
        return GAIN * cls.rate * cls.scale


def of_a_class(model: nn.Module, data: Tensor) -> float:
    return Inherited.rate * Inherited.scale


def test_what_a_class_inherits_counts_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Described().loss(of_a_class)["globals"] == {"Inherited": {"rate": 0.5, "scale": 3.0}}
    assert Described().loss(Inherited.loss)["owner"] == {"rate": 0.5, "scale": 3.0}
    monkeypatch.setattr(Settings, "rate", 0.25)
    assert Described().loss(of_a_class)["globals"] == {"Inherited": {"rate": 0.25, "scale": 3.0}}
    assert Described().loss(Inherited.loss)["owner"] == {"rate": 0.25, "scale": 3.0}
    monkeypatch.setattr(Inherited, "rate", 0.75, raising=False)
    assert Described().loss(of_a_class)["globals"] == {"Inherited": {"rate": 0.75, "scale": 3.0}}


def test_a_class_methods_globals_are_those_of_its_own_class() -> None:
    assert Described().loss(Inherited.loss)["globals"] == {"GAIN": 2.0}
