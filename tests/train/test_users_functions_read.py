"""Of the user's functions it's read what their code names, calls, writes and imports, and which code is theirs."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Callable
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmati.core.function_code import codes_in, names_read
from cosmati.train import user_code
from cosmati.train.user_code import (
    attributes_of,
    cell_content,
    code_digest,
    defaults_of,
    files_imported,
    functions_of,
    functions_within,
    globals_of,
    globals_touched,
    hooks_of,
    is_library,
    methods_called,
    methods_of,
    module_of,
    names_filled,
    names_said,
    names_written,
    reached,
    uncached,
)

HERE = "tests.train.test_users_functions_read"
FACTOR, COUNT = 2.0, 0


def compiled(source: str, name: str = "f", **names: Any) -> Any:
    """Return a function of a module that nobody has imported."""
    held = {"__name__": HERE, **names}
    exec(source, held)
    return held[name]


def of_lines(*lines: str, **names: Any) -> Any:
    return compiled("def f(x, *given):\n" + "".join(f"    {line}\n" for line in lines), **names)


def test_a_cell_that_is_not_filled_yet_holds_none() -> None:
    assert cell_content(types.CellType(3)) == 3
    assert cell_content(types.CellType()) is None


def test_a_functions_code_is_its_own_first_and_then_that_within() -> None:
    outer = of_lines("def first():", "    return lambda: 1", "return first")
    assert [one.co_name for one in codes_in(outer.__code__)] == ["f", "first", "<lambda>"]
    assert names_read(of_lines("g = lambda: x.deep(OUTER)", "return g(x).top").__code__) == {"deep", "OUTER", "top"}


def test_methods_are_those_that_are_called() -> None:
    code = of_lines("x.read", "x.called(1)", "g = lambda: x.within()", "y = x.kept", "y()", "FREE()").__code__
    assert methods_called(code) == {"called", "within"}


def test_globals_are_read_unless_they_are_written_somewhere() -> None:
    code = of_lines(
        "global written, gone", "written = Z + A + written", "del gone", "x.attribute = A", "def g():",
        "    return B.attribute", "class C:", "    y = INNER", "return g, C",
    ).__code__  # fmt: skip
    assert globals_of(code) == ["A", "B", "Z"]
    assert {"A", "B", "Z", "written", "gone", "INNER"} <= globals_touched(code)
    assert not {"attribute", "x", "g"} & globals_touched(code)


def test_imports_are_told_by_their_full_names() -> None:
    code = of_lines("import os.path", "from collections import abc", "def g():", "    import json").__code__
    assert files_imported(code) == {"os.path", "collections", "json"}


def helper(x: Any) -> Any:
    return x.deep


def first(x: Any) -> Any:
    return second(x)


def second(x: Any) -> Any:
    return third(x)


@cache
def third(x: Any) -> Any:
    return x.last, "said"


def test_functions_that_are_named_are_reached_once_and_their_names_are_said() -> None:
    assert [one.__name__ for one in reached([first])] == ["first", "second", "third"]
    assert [one.__name__ for one in reached([first, first, second])] == ["second", "third", "first"]
    assert [one.__name__ for one in reached([first], 2)] == ["first", "second"]
    assert list(reached([first], 0)) == []
    assert {"second", "third", "last", "said"} <= names_said([first])
    assert "said" not in names_said([first], 2)
    assert names_said([]) == frozenset()


def test_what_a_library_has_is_not_reached() -> None:
    uses = of_lines("return relu(x)", relu=torch.nn.functional.relu)
    assert list(reached([torch.nn.functional.relu])) == []
    assert list(reached([uses])) == [uses]


def test_functions_are_reached_through_closures_and_the_users_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed() -> Callable[[Any], Any]:
        held = helper
        return lambda x: held(x) + 1

    one = closed()
    assert [*reached([one])] == [one, helper]
    mine = types.ModuleType("file_of_mine_4711")
    mine.used, mine.unused = first, helper  # type: ignore[attr-defined]
    naming = of_lines("return mine.used(x)", mine=mine)
    assert [*reached([naming])][:2] == [naming, first]
    assert helper not in [*reached([naming])]
    theirs = types.ModuleType("torch.file_of_theirs")
    theirs.used = first  # type: ignore[attr-defined]
    assert [*reached([of_lines("return mine.used(x)", mine=theirs)])][1:] == []
    unfilled = compiled("def f():\n    def g(x):\n        return later(x)\n    return g\n    later = 1\n")()
    assert [*reached([unfilled])] == [unfilled]


def test_what_is_written_is_told_of_all_that_are_reached() -> None:
    writes = of_lines("global COUNT", "COUNT = 1", "x.kept = 2", "local = x.read", "return other(x)")
    writes.__globals__["other"] = of_lines("x.more = 1")
    assert names_written([writes]) == {"COUNT", "kept", "more"}
    assert names_written([writes], 1) == {"COUNT", "kept"}
    assert names_written([]) == frozenset()


def test_what_is_filled_is_told_of_all_that_are_reached() -> None:
    fills = of_lines("x.cache[1] = 2", "SEEN.add(x)", "NOTED.append(x)", "LEFT.pop(x)", "return other(x)")
    fills.__globals__.update(SEEN=set(), NOTED=nn.ModuleList(), LEFT=[], OTHER=[])
    fills.__globals__["other"] = of_lines("OTHER.append(x)", "def g():", "    x.inner[0:2] = 1", OTHER=[])
    assert names_filled([fills]) == {"cache", "SEEN", "OTHER", "inner"}
    many = of_lines(*(f"N{i} = C{i}.update(x)" for i in range(300)), "D[0] = 1", **{f"C{i}": {} for i in range(300)})
    assert names_filled([many]) == {"D", *(f"C{i}" for i in range(300))}


class Base:
    """Of one's own."""

    kept = 1
    both = 1

    def __init__(self) -> None:
        self.x = 1

    def __call__(self, x: Any) -> Any:
        return x

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def of_base(self) -> int:
        return 1


class Own(Base):
    both = 2  # type: ignore[assignment]

    @property
    def half(self) -> float:
        return 0.5

    @half.setter
    def half(self, value: float) -> None:
        self.x = 3

    @staticmethod
    def plain() -> int:
        return 1

    @classmethod
    def of_class(cls) -> int:
        return 1

    @cached_property
    def found(self) -> int:
        return 1

    @lru_cache(2)  # noqa: B019
    def kept_once(self) -> int:
        return 1


def test_a_classs_functions_are_its_own_and_its_bases_but_for_those_of_every_object() -> None:
    names = [one.__name__ for one in methods_of(Own)]
    assert names == ["half", "half", "plain", "of_class", "found", "kept_once", "__call__", "of_base"]
    assert methods_of(nn.Linear) == []
    assert attributes_of(Own)["both"] == 2
    assert {"kept", "of_base", "half"} <= attributes_of(Own).keys()
    assert attributes_of(nn.Linear) == {}
    assert "weight" not in attributes_of(type("Mine", (nn.Linear,), {"a": 1, "__module__": HERE}))


def test_the_functions_of_an_attribute() -> None:
    held = vars(Own)
    found = {name: [one.__name__ for one in functions_of(value)] for name, value in held.items()}
    assert found["half"] == ["half", "half"]
    assert (found["plain"], found["of_class"], found["found"]) == (["plain"], ["of_class"], ["found"])
    assert found["kept_once"] == ["kept_once"]
    assert functions_of(property(helper)) == [helper]
    assert functions_of(3) == functions_of(property()) == []
    assert uncached(third) is third.__wrapped__
    wrapping = functools.wraps(first)(of_lines("return x"))
    assert uncached(wrapping) is wrapping
    assert uncached(3) == 3


def test_defaults_are_in_order_those_by_name_by_their_names() -> None:
    def own(a: int, b: int = 1, *, z: int = 2, c: int = 3) -> None: ...

    assert defaults_of(own) == [1, 3, 2]  # type: ignore[arg-type]
    assert defaults_of(first) == []  # type: ignore[arg-type]


class Layer(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def test_functions_that_run_are_methods_of_all_modules_and_hooks() -> None:
    model = Model()
    layer, own = Layer.forward, Model.forward
    assert functions_within(model) == [layer, own]
    assert functions_within(partial(partial(first, 1), 2)) == [first]
    assert functions_within(first) == [first]
    assert functions_within(Own().of_base) == functions_within(Own()) == methods_of(Own)
    assert functions_within(Own.of_class) == methods_of(Own)
    assert functions_within(nn.Linear(1, 1)) == []
    model.layer.register_forward_hook(helper)
    model.register_full_backward_hook(first)  # type: ignore[arg-type]
    model.register_forward_pre_hook(Own())
    assert functions_within(model) == [layer, own, first, helper]
    assert hooks_of([model]) == [first]
    assert hooks_of([model.layer, model, 3]) == [helper, first]


def digest(source: str) -> str:
    return code_digest(compiled(source)).partition(" of ")[0]


def test_code_is_told_apart_by_what_it_does() -> None:
    sources = [
        "def f(x):\n    return x + 1", "def f(x):\n    return x - 1", "def f(x):\n    return x + 2",
        "def f(x):\n    return x.a", "def f(x):\n    return x.b", "def f(x):\n    return x in {1, 2}",
        "def f(x):\n    return x in {1, 3}", "def f(x):\n    return lambda: x + 1",
        "def f(x):\n    return lambda: x + 2", "def f(x):\n    return 'a'",
    ]  # fmt: skip
    assert len({digest(source) for source in sources}) == len(sources)
    told = digest("def f(x):\n    'Says.'\n    return x + 1")
    assert told == digest("def f(x):\n    'Says otherwise.'\n    return x + 1")
    assert len(told) == 16
    release = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert code_digest(first, second).endswith(f" of Python {release}")  # type: ignore[arg-type]
    assert code_digest(first, second) != code_digest(second, first)  # type: ignore[arg-type]
    assert code_digest(first) != code_digest(first, second)  # type: ignore[arg-type]


def test_sets_in_code_have_the_order_of_what_they_print() -> None:
    # By hash seed, strings in a set come in any order: so do these, in one process.
    one, other = ({8, 0}, {0, 8})
    assert list(one) != list(other) or [*frozenset([8, 0])] != [*frozenset([0, 8])]
    codes = [
        first.__code__.replace(co_consts=(None, frozenset(order)))  # type: ignore[attr-defined]
        for order in ([8, 0], [0, 8])
    ]
    functions = [types.FunctionType(code, {}) for code in codes]
    assert code_digest(functions[0]) == code_digest(functions[1])


def test_a_spawned_scripts_module_is_the_script() -> None:
    one = types.SimpleNamespace
    assert module_of(one(__module__="__mp_main__")) == module_of(one(__module__="__main__")) == "__main__"
    assert module_of(first) == HERE
    assert module_of(Own()) == HERE
    assert module_of(one(__module__=None)) == "None"


@pytest.mark.parametrize(
    ("file", "is_one"),
    [
        ("/home/me/file.py", False),
        ("/venv/lib/site-packages/file.py", True),
        ("/usr/lib/dist-packages/deep/file.py", True),
        ("/home/site-packages-of-mine/file.py", False),
        (str(Path(sysconfig.get_paths()["stdlib"]) / "deep" / "file.py"), True),
        (None, False),
    ],
)
def test_a_library_is_known_by_where_it_lies(monkeypatch: pytest.MonkeyPatch, file: str | None, is_one: bool) -> None:
    is_library.cache_clear()
    module = types.ModuleType("placed_4711")
    module.__file__ = file
    monkeypatch.setitem(sys.modules, "placed_4711", module)
    assert is_library("placed_4711") == is_one
    assert is_library("placed_4711.unknown_within") == is_one
    is_library.cache_clear()


def test_libraries_and_scripts_are_known_by_name() -> None:
    assert [is_library(name) for name in ("torch.nn", "numpy", "cosmati.x", "builtins", "sys", "json")] == [True] * 6
    assert [is_library(name) for name in ("", None, "__main__", "__mp_main__", "__main__.x", "nowhere")] == [False] * 6
    assert not is_library(HERE)


def test_a_part_of_a_package_is_known_by_where_it_lies_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    is_library.cache_clear()
    package, part = types.ModuleType("parted_4711"), types.ModuleType("parted_4711.part")
    package.__file__, part.__file__ = "/venv/site-packages/p/__init__.py", "/home/me/part.py"
    monkeypatch.setitem(sys.modules, "parted_4711", package)
    monkeypatch.setitem(sys.modules, "parted_4711.part", part)
    assert (is_library("parted_4711"), is_library("parted_4711.part")) == (True, False)
    is_library.cache_clear()


def test_how_many_functions_are_read_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {"__name__": HERE}
    for index in range(40):
        exec(f"def f{index}(x):\n    x.a{index} = f{index + 1}\n    x.b[0] = 1", held)
    written = names_written([held["f0"]])
    assert written == {f"a{index}" for index in range(user_code._MAX_FUNCTIONS)}
    assert "f32" in names_said([held["f0"]])
    assert "f33" not in names_said([held["f0"]])
