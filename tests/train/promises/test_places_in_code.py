"""Of functions, classes, files and modules those places are told that the code which runs there may speak of."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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


def counted() -> Callable[..., object]:
    step = 0

    def loss(_model: object, *, weight: list[int] = [1], layer: type = nn.Linear) -> object:  # noqa: B006
        nonlocal step
        step += 1
        return step * loss.scale * len(weight) * COUNT  # type: ignore[attr-defined]

    loss.scale = 2.0  # type: ignore[attr-defined]
    return loss


def test_a_function_keeps_attributes_cells_defaults_and_globals() -> None:
    loss = counted()
    places = found(loss)
    assert [(name, place.value) for name, place in places.items() if name != "loss.loss"] == [
        ("loss.scale", 2.0),
        ("loss.step", 0),
        ("loss.weight", [1]),
        ("loss.COUNT", 0),
    ]
    assert {place.kind for place in places.values()} == {"attribute"}
    assert {place.attribute for place in places.values()} == {""}
    assert [name for name, place in places.items() if place.put is None] == ["loss.weight"]


def test_what_a_function_keeps_can_be_set() -> None:
    held = [0]

    def loss() -> object:
        return held, COUNT

    places = found(loss)
    loss.scale = 1.0  # type: ignore[attr-defined]
    for name, value in (("held", [4]), ("COUNT", 5)):
        put = places[f"loss.{name}"].put
        assert put is not None
        put(value)
    put = found(loss)["loss.scale"].put
    assert put is not None
    put(3.0)
    assert (*loss(), loss.scale) == ([4], 5, 3.0)  # type: ignore[misc, attr-defined]
    globals()["COUNT"] = 0


def test_defaults_by_position_are_numbered() -> None:
    def loss(_model: object, a: list[int] = [1], b: object = len, c: object = nn.Linear, d: int = 4) -> None: ...  # noqa: B006

    assert [(name, place.value) for name, place in found(loss).items()] == [
        ("loss.default 0", [1]),
        ("loss.default 3", 4),
    ]


def test_what_is_declared_is_skipped_wherever_a_function_keeps_it() -> None:
    history, other = [1], [2]

    def loss(_model: object, *, seen: list[int] = [3]) -> object:  # noqa: B006
        return history, other, seen, TABLE, COUNT

    loss.scale, loss.rate = 1.0, 2.0  # type: ignore[attr-defined]
    loss.forward_caches = ("history", "scale", "seen", "TABLE")  # type: ignore[attr-defined]
    assert named(loss) == ["loss.rate", "loss.other", "loss.COUNT"]


def test_what_a_class_declares_holds_for_its_methods_and_its_heirs() -> None:
    class Base:
        forward_caches: tuple[str, ...] = ("TABLE", "seen")
        seen = 1
        other = 2

        def __call__(self) -> object:
            return TABLE, COUNT

    class Heir(Base):
        forward_caches = ("rate",)
        rate = 3

    own = Heir()
    own.yours = 2  # type: ignore[attr-defined]
    assert named(own) == ["loss.yours", "Base.other", "loss.__call__.COUNT"]


def test_an_object_may_declare_what_it_and_its_class_keep() -> None:
    own = Constants()
    own.mine, own.yours, own.forward_caches = 1, 2, {"mine": 0, "number": 0, "forward_caches": 0}  # type: ignore[attr-defined]
    names = named(own)
    assert names[0] == "loss.yours"
    assert not {"loss.mine", "Constants.number"} & {*names}


def test_the_marks_of_wrappers_and_compilers_are_no_state() -> None:
    def loss() -> None: ...

    loss.__wrapped__ = loss  # type: ignore[attr-defined]
    loss._torchdynamo_disable = [1]  # type: ignore[attr-defined]
    assert named(loss) == []
    tensor = torch.zeros(1)
    tensor._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]
    tensor.note = 3  # type: ignore[attr-defined]
    held = types.SimpleNamespace(tensor=tensor, again=tensor)
    assert named(held) == ["loss.tensor", "loss.tensor.note", "loss.again"]
    put = found(held)["loss.tensor.note"].put
    assert put is not None
    put(4)
    assert tensor.note == 4  # type: ignore[attr-defined]


def test_a_cell_that_is_not_filled_is_no_place_and_one_of_none_is() -> None:
    def loss() -> object:
        return late

    assert named(loss) == []
    late = None
    assert [(name, place.value) for name, place in found(loss).items()] == [("loss.late", None)]


def test_a_cell_that_two_functions_share_is_told_once() -> None:
    mean = 0.0

    def one() -> float:
        return mean

    def other() -> float:
        return mean

    assert named([one, other]) == ["loss[0].mean"]


def test_a_global_that_two_functions_name_is_told_once() -> None:
    assert named([lambda: COUNT, lambda: COUNT + 1]) == ["loss[0].COUNT"]
    assert named([made_by_code("def made(): return a", a=1), made_by_code("def made(): return a", a=2)]) == [
        "loss[0].a",
        "loss[1].a",
    ]


def test_what_libraries_define_is_no_place() -> None:
    inner = len

    def loss() -> object:
        return inner, np, Tensor, partial, cross, missing  # type: ignore[name-defined]  # noqa: F821

    cross = nn.functional.cross_entropy
    assert named(loss) == []


def test_of_an_imported_file_that_is_there_what_is_said_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    file = types.ModuleType("imported_by_a_loss")
    vars(file).update(mean=1.0, other=2.0, nothing=np)
    read = made_by_code("def made():\n import imported_by_a_loss as one, json, absent_file\n return one.mean")
    assert named(read) == []
    monkeypatch.setitem(sys.modules, file.__name__, file)
    places = found(read)
    assert [(name, place.value) for name, place in places.items()] == [("loss.imported_by_a_loss.mean", 1.0)]
    put = places["loss.imported_by_a_loss.mean"].put
    assert put is not None
    put(3.0)
    assert file.mean == 3.0


class Level(Enum):
    LOW = 1


class Constants:
    """Of each kind that a class may keep, and some that are no state."""

    flag, number, rate = True, 3, 0.5
    tensor, array = torch.zeros(1), np.zeros(1)
    items: tuple[object, ...] = ()
    listed, mapped = [1], {"a": 1}
    title, kept = "words", Kept()
    problem_type = 3
    __hidden__ = 4

    def run(self) -> object:
        return self.number


def test_a_class_keeps_state_among_methods_and_constants() -> None:
    both = found([Constants(), Constants()])
    assert [*both] == [
        *(f"Constants.{name}" for name in ("flag", "number", "rate", "tensor", "array", "listed", "mapped")),
        *("Constants.kept", "Constants.kept.number"),
    ]
    put = both["Constants.number"].put
    assert put is not None
    put(8)
    assert Constants.number == 8
    put(3)


def test_of_a_class_that_code_names_only_what_it_says_is_told() -> None:
    assert named(lambda: Constants.rate) == ["Constants.rate"]
    assert named(lambda: Constants.run) == ["Constants.number"]
    assert named(lambda: Constants) == []
    assert named(lambda: Level.LOW) == []
    assert named(lambda: nn.Linear.in_features) == []


def test_the_passes_of_a_function_with_gradients_of_its_own_are_read() -> None:
    class Identity(torch.autograd.Function):
        seen, other = 1, 2

        @staticmethod
        def forward(context: Any, rows: Tensor) -> Tensor:
            return rows + len(TABLE)

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * Identity.seen

    names = named(lambda rows: Identity.apply(rows) + 0)  # type: ignore[no-untyped-call]
    assert sorted(name.rpartition(".")[2] for name in names) == ["TABLE", "seen"]


def test_what_the_loss_says_of_a_model_is_followed_there_and_not_in_other_losses() -> None:
    class Model(nn.Module):
        def encode(self, rows: object) -> object:
            return TABLE

        def decode(self, rows: object) -> object:
            return COUNT

    names = [place.name for place in places_in({"": Model(), "loss": lambda model, rows: model.encode(rows)})]
    assert names == ["encode.TABLE"]
    assert [place.name for place in places_in({"": Model(), "loss": len})] == []


def test_what_one_loss_says_is_not_followed_in_another() -> None:
    class Task:
        def __call__(self, _model: object) -> object:
            return COUNT

        def encode(self) -> object:
            return TABLE

    roots = {"a": Task(), "b": lambda model: model.encode()}
    assert [place.name for place in places_in(roots)] == ["a.__call__.COUNT"]


def test_names_and_strings_of_the_code_that_is_reached_are_given() -> None:
    spoken = {"before"}
    for _ in places_in({"loss": lambda model: getattr(model.layer, "depth")}, spoken):  # noqa: B009
        pass
    list(places_in({"loss": lambda model: model.other}))
    assert spoken == {"before", "layer", "depth", "getattr"}
