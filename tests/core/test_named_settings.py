"""Settings without a name, or of another tool's name, are told with the call as it's written here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from cosmati.core.named_settings import KnownNames, NamedSettings


@dataclass(frozen=True, kw_only=True)
class Settings(NamedSettings):
    other_names: ClassVar = {
        "learning_rate": "rate",
        "epochs": "budget='{}ep'",
        "name": "budget={!r}",
        "fixed": "rate=0.5",
        "far": "elsewhere",
        "gone": "elsewhere='{}'",
    }

    rate: float = 0.1
    budget: str = "1ep"


@dataclass(frozen=True, kw_only=True)
class Plain(NamedSettings):
    rate: float = 0.1
    budget: str = "1ep"


def told(kind: Any, *values: object, **settings: object) -> str:
    with pytest.raises(TypeError) as caught:
        kind(*values, **settings)
    return str(caught.value)


def test_settings_by_name_are_taken() -> None:
    one = Settings(rate=0.5, budget="2ep")
    assert (one.rate, one.budget) == (0.5, "2ep")
    assert Settings() == Settings(rate=0.1)
    assert type(one) is Settings


@dataclass(frozen=True, kw_only=True)
class Needing(Settings):
    every: str


def test_what_has_to_be_given_is_told_first() -> None:
    assert told(Needing, "1ba") == "Needing takes its settings by name: Needing(every='1ba')."
    assert told(Needing, "1ba", 0.5) == "Needing takes its settings by name: Needing(every='1ba', rate=0.5)."


def test_values_without_a_name_are_told_with_theirs() -> None:
    assert told(Settings, 0.5) == "Settings takes its settings by name: Settings(rate=0.5)."
    assert told(Settings, 0.5, "2ep") == "Settings takes its settings by name: Settings(rate=0.5, budget='2ep')."
    assert told(Settings, 0.5, budget="2ep") == "Settings takes its settings by name: Settings(rate=0.5, budget='2ep')."


def test_more_values_than_settings_are_pythons_to_refuse() -> None:
    why = told(Settings, 1, 2, 3)
    assert "positional argument" in why
    assert "by name" not in why


def test_an_unknown_name_beside_values_is_told_first() -> None:
    assert told(Settings, 0.5, learning_rate=1) == "Settings has no 'learning_rate'. Here it's Settings(rate=1)."


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"learning_rate": 0.5}, "Settings has no 'learning_rate'. Here it's Settings(rate=0.5)."),
        ({"epochs": 3}, "Settings has no 'epochs'. Here it's Settings(budget='3ep')."),
        ({"name": "a'b"}, "Settings has no 'name'. Here it's Settings(budget=\"a'b\")."),
        ({"fixed": 3}, "Settings has no 'fixed'. Here it's Settings(rate=0.5)."),
        # What another tool's name stands for has to be a setting here; else names that are near are.
        ({"far": 3}, "Settings has no 'far'. It has rate, budget."),
        ({"gone": 3}, "Settings has no 'gone'. It has rate, budget."),
        ({"rates": 3}, "Settings has no 'rates'. Here it's Settings(rate=3)."),
        ({"budgets": "x"}, "Settings has no 'budgets'. Here it's Settings(budget='x')."),
        ({"zzz": 3}, "Settings has no 'zzz'. It has rate, budget."),
        ({"zzz": 3, "rates": 3}, "Settings has no 'zzz'. It has rate, budget."),
        ({"rate": 1, "rates": 3}, "Settings has no 'rates'. Here it's Settings(rate=3)."),
    ],
)
def test_an_unknown_name_is_told_as_it_is_called_here(settings: dict[str, object], why: str) -> None:
    assert told(Settings, **settings) == why


def test_a_class_that_knows_no_other_names_tells_its_own() -> None:
    assert told(Plain, learning_rate=1) == "Plain has no 'learning_rate'. It has rate, budget."
    assert dict(NamedSettings.other_names) == dict(KnownNames.other_names) == {}
    with pytest.raises(TypeError) as caught:
        Plain(1)  # type: ignore[misc]
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_class_of_the_users_own_may_take_values_without_names() -> None:
    class Own(Plain):
        def __init__(self, rate: float, *, budget: str = "9ep") -> None:
            super().__init__(rate=rate, budget=budget)

    assert (Own(0.5).rate, Own(0.5, budget="2ep").budget) == (0.5, "2ep")
    # With a signature of its own, Python's words are the right ones.
    assert "missing" in told(Own)
    assert "rate" in told(Own)
    assert "takes its settings" not in told(Own, 1, 2)
    assert "unexpected keyword argument 'zzz'" in told(Own, 1, zzz=3)


def test_a_class_of_the_users_own_may_take_any_name() -> None:
    class Any_(Plain):  # noqa: N801  (it's any)
        def __init__(self, **more: object) -> None:
            super().__init__(rate=float(len(more)))

    assert Any_(zzz=1, yyy=2).rate == 2.0
    assert "positional" in told(Any_, 1)


# Classes with a signature of their own.


class Known(KnownNames):
    other_names: ClassVar = {"lr": "rate", "epochs": "budget='{}ep'"}

    def __init__(self, first: int, rate: float = 0.1, *, budget: str = "1ep") -> None:
        self.given = (first, rate, budget)


def test_known_names_are_taken_with_and_without_a_name() -> None:
    assert Known(1).given == (1, 0.1, "1ep")
    assert Known(1, 0.5, budget="2ep").given == (1, 0.5, "2ep")
    assert Known(first=1, rate=0.5).given == (1, 0.5, "1ep")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"lr": 0.5}, "Known has no 'lr'. Here it's Known(rate=0.5)."),
        ({"epochs": 3}, "Known has no 'epochs'. Here it's Known(budget='3ep')."),
        ({"firs": 3}, "Known has no 'firs'. Here it's Known(first=3)."),
        ({"zzz": 3, "lr": 1}, "Known has no 'zzz'. It has first, rate, budget."),
        ({"self": 3}, "Known has no 'self'. It has first, rate, budget."),
    ],
)
def test_unknown_arguments_are_told_as_they_are_called_here(settings: dict[str, object], why: str) -> None:
    with pytest.raises(TypeError) as caught:
        Known.__new__(Known, 1, **settings)
    assert str(caught.value) == why


def test_what_a_signature_lacks_is_pythons_to_refuse() -> None:
    assert "missing" in told(Known)
    assert "positional" in told(Known, 1, 2, "3ep")


def test_a_signature_that_takes_any_name_refuses_none() -> None:
    class Free(KnownNames):
        def __init__(self, *values: int, rate: float = 0.1, **more: object) -> None:
            self.given = (values, rate, more)

    assert Free(1, 2, rate=0.5, zzz=3).given == ((1, 2), 0.5, {"zzz": 3})

    class Many(KnownNames):
        def __init__(self, *values: int, rate: float = 0.1) -> None:
            self.given = (values, rate)

    assert Many(1, 2, rate=0.5).given == ((1, 2), 0.5)
    assert told(Many, 1, values=3) == "Many has no 'values'. It has rate."
