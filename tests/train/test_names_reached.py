"""Which functions losses and models run is told by the names in their code; what caches hold is told by arguments."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from functools import cache, cached_property, lru_cache, partial
from types import FunctionType
from typing import Any

import pytest
from torch import Tensor, nn

from cosmati.train.reach import (
    cached_results,
    functions_run,
    methods_reached,
    names_in,
    said_by,
    strings_in,
)


def names(functions: Iterable[FunctionType]) -> list[str]:
    """By their class, in the order in which they were found."""
    return [function.__qualname__.rpartition("<locals>.")[2] for function in functions]


class Base:
    def helper(self) -> int:
        return self.deepest()  # type: ignore[attr-defined,no-any-return]

    def deepest(self) -> int:
        return 0

    def unused(self) -> int:
        return self.deepest()


class Derived(Base):
    def __init__(self) -> None:
        self.spare()

    def __repr__(self) -> str:
        return str(self.spare())

    def __getitem__(self, index: int) -> int:
        return self.by_item

    def __len__(self) -> int:
        return 1

    def __private(self) -> int:
        return 2

    def forward(self) -> int:
        return self.helper() + self.doubled

    def deepest(self) -> int:
        return super().deepest() + self.forward()

    def spare(self) -> int:
        return 1

    @property
    def doubled(self) -> int:
        return self.of_class() + self.remembered

    @classmethod
    def of_class(cls) -> int:
        return cls.static()

    @staticmethod
    def static() -> int:
        return 3

    @cached_property
    def remembered(self) -> int:
        return 4

    @cached_property
    def by_item(self) -> int:
        return 5


def test_methods_are_reached_from_names_through_names() -> None:
    python_s = ["Derived.__getitem__", "Derived.__len__"]
    # What code names comes first, then what Python runs without a name, then what they call, class by class.
    assert names(methods_reached(Derived, {"forward", "gone"})) == [
        "Derived.forward", *python_s, "Derived.doubled", "Base.helper", "Derived.by_item", "Derived.of_class",
        "Derived.remembered", "Derived.deepest", "Base.deepest", "Derived.static",
    ]  # fmt: skip
    assert names(methods_reached(Derived, ())) == [*python_s, "Derived.by_item"]
    assert names(methods_reached(Derived, {"unused", "spare"})) == [
        "Derived.spare", "Base.unused", *python_s, "Derived.deepest", "Base.deepest", "Derived.by_item",
        "Derived.forward", "Derived.doubled", "Base.helper", "Derived.of_class", "Derived.remembered", "Derived.static",
    ]  # fmt: skip


def test_each_function_is_found_once_though_all_call_each_other() -> None:
    class Circle:
        def a(self) -> Any:
            return self.b, self.c, self.a

        def b(self) -> Any:
            return self.a, self.c

        def c(self) -> Any:
            return self.a, self.b

    assert names(methods_reached(Circle, {"c", "a"})) == ["Circle.a", "Circle.c", "Circle.b"]


def test_classes_of_libraries_are_left_alone() -> None:
    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(self.extra_repr())  # type: ignore[arg-type]

    assert names(methods_reached(Layer, {"forward", "reset_parameters"})) == ["Layer.forward"]
    assert methods_reached(nn.Linear, {"forward"}) == []
    assert methods_reached(int, {"bit_length"}) == []


SETS_UP = "init post_init new repr str del eq hash reduce getstate setstate init_subclass"


@pytest.mark.parametrize("name", [*(f"__{name}__" for name in SETS_UP.split()), "__call", "call__", "_call_"])
def test_what_sets_up_prints_or_compares_runs_only_where_it_is_named(name: str) -> None:
    def function(self: object) -> None: ...

    kind = type("Kind", (), {name: function, "__module__": __name__})
    assert methods_reached(kind, ()) == []
    assert methods_reached(kind, {name}) == [function]


@pytest.mark.parametrize("name", ["__call__", "__iter__", "__getattr__", "__enter__", "__", "___"])
def test_what_python_runs_without_a_name_is_reached(name: str) -> None:
    def function(self: object) -> None: ...

    assert methods_reached(type("Kind", (), {name: function, "__module__": __name__}), ()) == [function]


def outer(value: Any) -> Any:
    def inner() -> Any:
        return value.attribute, getattr(value, "spelled"), SOME  # noqa: B009

    return inner, helper


def helper(value: Any) -> Any:
    return value.of_helper, "said by the helper", 3


SOME = 1


def test_names_and_strings_are_those_of_functions_within_too() -> None:
    assert names_in(outer) == {"attribute", "getattr", "SOME", "helper"}
    assert {"spelled"} <= strings_in(outer)
    assert all(isinstance(one, str) for one in strings_in(helper))
    assert "said by the helper" in strings_in(helper)
    assert "said by the helper" not in strings_in(outer)
    assert not names_in(outer) & {"value", "inner", "of_helper"}


class Called:
    def __call__(self, given: nn.Module, data: Any) -> Any:
        return self.method(given)

    def forward(self, given: nn.Module, data: Any) -> Any:
        return given.by_forward

    def method(self, given: nn.Module) -> Any:
        return given.by_method

    def other(self, given: nn.Module) -> Any:
        return given.by_other


def test_losses_say_what_they_name_and_what_those_name() -> None:
    said = said_by([outer])
    assert {"attribute", "spelled", "of_helper", "said by the helper"} <= said
    assert not said & {"by_method", "value"}
    assert said_by([]) == frozenset()
    called = said_by([outer, Called()])
    assert said < called
    assert {"by_method", "by_forward"} <= called
    assert "by_other" not in called


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (helper, ["helper"]),
        (Called(), ["Called.forward", "Called.__call__", "Called.method"]),
        (Called().other, ["Called.other", "Called.__call__", "Called.method"]),
        (print, []),
    ],
)
def test_a_loss_runs_itself_or_its_methods_also_within_partials(loss: Any, found: list[str], times: int) -> None:
    for index in range(times):
        # PyTorch's and Python's own nest; a class derived from it doesn't flatten.
        loss = type("Derived", (partial,), {})(loss, **{f"keyword{index}": 1})
    plain = nn.Linear(1, 1)
    assert names(functions_run(plain, [loss])) == found
    assert names(functions_run(plain, [loss, helper])) == [*found, "helper"]


class Block(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return self.mix(rows)

    def mix(self, rows: Tensor) -> Tensor:
        return rows

    def named_by_loss(self) -> object:
        return self.further.encode

    def unnamed(self) -> None: ...


class Encoder(nn.Module):
    def encode(self) -> None: ...

    def unnamed(self) -> None: ...


def hook(module: nn.Module, given: Any) -> None: ...


def loss_naming_a_method(model: Any, data: Any) -> Any:
    return model.named_by_loss()


def test_models_run_forward_what_losses_name_and_what_any_module_names() -> None:
    model = nn.Sequential(Block(), Encoder())
    assert names(functions_run(model, [])) == ["Block.forward", "Block.mix"]
    found = sorted(names(functions_run(model, [loss_naming_a_method])))
    assert found == ["Block.forward", "Block.mix", "Block.named_by_loss", "Encoder.encode", "loss_naming_a_method"]
    # Whichever module comes first.
    backwards = nn.Sequential(Encoder(), Block())
    assert sorted(names(functions_run(backwards, [loss_naming_a_method]))) == found
    model[1].register_forward_pre_hook(hook)
    model[0].register_forward_pre_hook(partial(hook))
    assert sorted(names(functions_run(model, [loss_naming_a_method]))) == sorted([*found, "hook"])


# ------------------------------------------------------------------------------------------------------------- caches


CACHES: list[Callable[[Any], Any]] = [cache, lru_cache(16), lru_cache(16, typed=True)]


@pytest.mark.parametrize("cached", CACHES)
def test_results_are_told_by_arguments_in_their_order(cached: Callable[[Any], Any]) -> None:
    @cached
    def made(*arguments: Any, **keywords: Any) -> list[Any]:
        return [*arguments, *keywords]

    assert cached_results(made) == []
    for arguments in ((3,), ("b",), (), (1, "a"), ((1, 2),), (None,), ("x" * 99,)):
        made(*arguments)
    made(keyword=1)
    told = cached_results(made)
    assert told is not None
    is_typed = made.cache_parameters()["typed"]
    by_result = {str(result): name for name, result in told}
    assert len(told) == 8
    assert [name for name, _ in told] == sorted(name for name, _ in told)
    assert by_result["[]"] == by_result["['keyword']"] == by_result["[(1, 2)]"] == ""
    if not is_typed:  # Otherwise the types are among the arguments.
        assert (by_result["[3]"], by_result["['b']"]) == ("[3]", "['b']")
        assert by_result["[1, 'a']"] == "[(1, 'a')]"
        assert by_result["[None]"] == "[(None,)]"
        assert by_result[str(["x" * 99])] == "['" + "x" * 38
    assert made.cache_info().hits == 0, "it was never called"


@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("plain", [None, True, 3, 0.5, "text"])
def test_plain_results_cannot_change_and_are_left_out(cached: Callable[[Any], Any], plain: object) -> None:
    @cached
    def made(number: int) -> object:
        return plain if number else [number]

    made(1), made(0)
    assert cached_results(made) == [("" if made.cache_parameters()["typed"] else "[0]", [0])]


class Named(str):
    """Not plain: it may have attributes."""

    __slots__ = ("kept",)


def test_results_and_arguments_of_derived_classes_are_not_plain() -> None:
    @cache
    def made(given: object) -> object:
        return given

    text = Named("text")
    made(text)
    found = cached_results(made)
    assert found is not None
    assert [(name, result is text) for name, result in found] == [("", True)]


@pytest.mark.parametrize("bound", [None, 2])
def test_of_alike_names_the_order_is_that_of_identities(bound: int | None) -> None:
    @lru_cache(bound)
    def made(given: object) -> object:
        return given

    one, other = [object(), object()]
    made(one), made(other)
    found = cached_results(made)
    assert found is not None
    assert [id(result) for _, result in found] == sorted([id(one), id(other)])


def test_a_bounded_cache_tells_what_it_still_holds() -> None:
    @lru_cache(2)
    def made(number: int) -> list[int]:
        return [number]

    for number in (1, 2, 3, 2):
        made(number)
    assert cached_results(made) == [("[2]", [2]), ("[3]", [3])]
    made.cache_clear()
    assert cached_results(made) == []


@pytest.mark.parametrize("bound", [None, 8, 0])
def test_results_that_look_like_what_a_cache_is_made_of(bound: int | None) -> None:
    @lru_cache(bound)
    def made(number: int) -> object:
        return [{"a": 1}, made, made.__wrapped__, type(made), {}][number]

    for number in range(5):
        made(number)
    found = cached_results(made)
    # A cache's own class among the results isn't told from what belongs to it: nothing is told then.
    if bound == 8:
        assert found is None
    else:
        assert found is not None
        assert len(found) == (0 if bound == 0 else 5)


def test_where_python_tells_otherwise_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    @cache
    def made(number: int) -> list[int]:
        return [number]

    made(1)
    assert cached_results(made) == [("[1]", [1])]
    held = gc.get_referents(made)
    place = [index for index, one in enumerate(held) if one is made.__wrapped__][-1]
    for other in (
        [one for one in held if one is not made.__wrapped__],
        [*held[: place - 1], [], *held[place:]],
        [*held[: place - 1], {}, *held[place:]],
    ):
        with monkeypatch.context() as patched:
            patched.setattr("cosmati.train.reach.gc.get_referents", lambda _, other=other: other)
            assert cached_results(made) is None
    functools.update_wrapper(made, names_in)
    assert cached_results(made) is None, "it says that it is of another function"
