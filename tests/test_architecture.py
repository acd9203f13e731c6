"""The plan of the house holds: layers, siblings, no torch low down, sizes. Each check is seen to fail too."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_size import Size, SizeException, complaints, main, measure, read_exceptions

ROOT = Path(__file__).resolve().parent.parent
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"


def python(code: str, *, folder: Path, source: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that finds `cosmati` in `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def house_with(folder: Path, wrong: dict[str, str]) -> Path:
    """Make an empty house with this project's contracts and rooms, and some wrong modules in it."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    rooms = [
        "cli",
        "core",
        "corpora",
        "data",
        "explorer",
        "export",
        "forget",
        "integrations",
        "ledger",
        "methods",
        "provenance",
        "records",
        "routing",
        "storage",
        "store",
        "study",
        "train",
    ]
    modules = {**{f"{room}/__init__.py": "" for room in rooms}, "__init__.py": "", "errors.py": "", **wrong}
    for name, text in modules.items():
        path = folder / "cosmati" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_the_contracts_hold() -> None:
    pytest.importorskip("importlinter", reason="the extra `check` isn't installed")
    result = python(LINT, folder=ROOT, source=ROOT / "src")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


CONTROLS = {
    "nothing wrong": ({}, None),
    "up": ({"core/up.py": "import cosmati.train\n"}, "Imports go down"),
    "up to the command line": ({"errors.py": "import cosmati.cli\n"}, "Imports go down"),
    "the way out above the loop": ({"export/up.py": "import cosmati.train\n"}, "Imports go down"),
    "deletion below the loop": ({"corpora/up.py": "import cosmati.forget\n"}, "Imports go down"),
    "sideways": ({"methods/side.py": "import cosmati.routing\n"}, "Imports go down"),
    "inside a function": ({"core/up.py": "def f():\n    import cosmati.train\n"}, "Imports go down"),
    "for types only": (
        {"core/up.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cosmati.train\n"},
        "Imports go down",
    ),
    "corpora in the engine of data": ({"data/leak.py": "import cosmati.corpora\n"}, "Imports go down"),
    "a room without a place": ({"misc/__init__.py": ""}, "Imports go down"),
    "siblings": (
        {"methods/one.py": "", "methods/two.py": "import cosmati.methods.one\n"},
        "A method never imports another method",
    ),
    "siblings by way of the room": (
        {
            "methods/__init__.py": "import cosmati.methods.one\n",
            "methods/one.py": "",
            "methods/two.py": "from cosmati.methods import __doc__\n",
        },
        "the list of all methods",
    ),
    "a building block": (
        {
            "methods/building_blocks/__init__.py": "",
            "methods/building_blocks/block.py": "import cosmati.core\n",
            "methods/one.py": "from cosmati.methods.building_blocks import block\n",
            "methods/two.py": "import cosmati.methods.building_blocks.block\n",
        },
        None,
    ),
    "a building block that needs a method": (
        {
            "methods/building_blocks/__init__.py": "",
            "methods/building_blocks/block.py": "from cosmati.methods.one import __doc__\n",
            "methods/one.py": "",
        },
        "A method never imports another method",
    ),
    "a building block that needs the list of methods": (
        {
            "methods/building_blocks/__init__.py": "",
            "methods/building_blocks/block.py": "from cosmati.methods import __doc__\n",
        },
        "the list of all methods",
    ),
    "torch below core": ({"ledger/leak.py": "import torch\n"}, "need no torch"),
    "the ledger in data": ({"data/leak.py": "import cosmati.ledger\n"}, "Data know no ledger"),
    "the ledger in data, by way of core": (
        {"data/leak.py": "import cosmati.core.up\n", "core/up.py": "import cosmati.ledger\n"},
        "Data know no ledger",
    ),
    "the loop below itself": (
        {
            "train/trainer.py": "",
            "train/facts.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cosmati.train.trainer\n",
        },
        "nobody knows the loop",
    ),
    "a file without a place in train": ({"train/step.py": ""}, "nobody knows the loop"),
    "trackers below recipes": ({"study/leak.py": "import cosmati.integrations\n"}, "Imports go down"),
    "trackers in the explorer": ({"explorer/leak.py": "import cosmati.integrations\n"}, "never the loop"),
    "the loop in the explorer": ({"explorer/leak.py": "import cosmati.train\n"}, "never the loop"),
}


@pytest.mark.parametrize("case", CONTROLS)
def test_a_wrong_house_breaks_the_contract(case: str, tmp_path: Path) -> None:
    pytest.importorskip("importlinter", reason="the extra `check` isn't installed")
    wrong, contract = CONTROLS[case]
    house = house_with(tmp_path, wrong)
    result = python(LINT, folder=house, source=house)
    broken = [line for line in result.stdout.splitlines() if " BROKEN" in line]
    if contract is None:
        assert result.returncode == 0, result.stdout + result.stderr
        assert not broken
    else:
        assert result.returncode == 1, result.stdout + result.stderr
        assert [contract in line for line in broken] == [True]


def imported_packages(source: str) -> set[str]:
    """Top-level packages that a file imports, inside functions too."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add("cosmati" if node.level else (node.module or "").split(".")[0])
    return packages


def foreign(source: str) -> set[str]:
    return imported_packages(source) - sys.stdlib_module_names - {"cosmati"}


@pytest.mark.parametrize(("room", "others"), [("records", {}), ("storage", {"duck.py": {"duckdb"}})])
def test_records_and_storage_need_only_the_standard_library(room: str, others: dict[str, set[str]]) -> None:
    files = list((ROOT / "src" / "cosmati" / room).glob("*.py"))
    assert len(files) > 1
    assert {file.name: found for file in files if (found := foreign(file.read_text("utf-8")))} == others
    assert foreign("import json\ndef f():\n    from numpy.linalg import norm\n") == {"numpy"}


TRAINS = {"fit", "step", "step_microbatches"}
WRITES = {"mkdir", "open", "touch", "write_bytes", "write_text"}
STUDIES = {"run_study"}


def deeds(source: str) -> set[str]:
    """Calls of a module that train, write files or start studies, by the last part of their names."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, ast.Attribute | ast.Name)}
    return names & (TRAINS | WRITES | STUDIES)


def test_recipes_configure_and_do_nothing_else() -> None:
    found = {path.name: deeds(path.read_text("utf-8")) for path in (ROOT / "src/cosmati/recipes").rglob("*.py")}
    assert len(found) > 4
    assert not {name: names for name, names in found.items() if names}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("recipe.trainer().fit()", "fit"),
        ("def f():\n    with t as u:\n        u.step(batch)", "step"),
        ("Path('a').write_text('b')", "write_text"),
        ("open('a', 'w')", "open"),
        ("from cosmati.study.runner import run_study\nrun_study(s, f)", "run_study"),
    ],
)
def test_a_recipe_that_does_something_is_seen(source: str, found: str) -> None:
    assert deeds(source) == {found}


def test_records_storage_provenance_and_ledger_load_without_torch() -> None:
    rooms = ["records", "storage", "store", "provenance", "ledger"]
    source = ROOT / "src"
    modules = [
        ".".join(path.relative_to(source).with_suffix("").parts)
        for room in rooms
        for path in sorted((source / "cosmati" / room).glob("[a-z]*.py"))
    ]
    assert len(modules) > len(rooms)
    code = f"import sys, {', '.join(modules)}\nprint('torch' in sys.modules)"
    result = python(code, folder=ROOT, source=source)
    assert (result.stdout.strip(), result.stderr) == ("False", "")


def imported_modules(source: str) -> set[str]:
    """Modules that a file imports by their whole names."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        # A lock excludes; a lease, which several may hold, keeps a shared cache from evicting.
        ("fcntl", ["storage/lease.py", "storage/lock.py"]),
        ("rich.progress", ["progress.py"]),
    ],
)
def test_there_is_one_lock_and_one_progress_display(module: str, expected: list[str]) -> None:
    source = ROOT / "src" / "cosmati"
    texts = {path: path.read_text("utf-8") for path in sorted(source.rglob("*.py"))}
    spoken = module.rpartition(".")[2]  # who doesn't speak of it needn't be parsed
    homes = [path for path, text in texts.items() if spoken in text and module in imported_modules(text)]
    assert [str(path.relative_to(source)) for path in homes] == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (r"\bf(data)?sync\(", ["storage/atomic.py"]),
        (r'b"\\x01" \+', ["storage/merkle.py"]),
    ],
)
def test_there_is_one_atomic_write_and_one_merkle_tree(code: str, expected: list[str]) -> None:
    source = ROOT / "src" / "cosmati"
    homes = [path for path in sorted(source.rglob("*.py")) if re.search(code, path.read_text("utf-8"))]
    assert [str(path.relative_to(source)) for path in homes] == expected


def defined_names(source: str) -> set[str]:
    """Public classes and type aliases that a module defines; type variables are each module's own."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign) and not (
            isinstance(node.value, ast.Call) and "Var" in ast.dump(node.value.func)
        ):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name[0].isupper() and not name.isupper()}


def defined_twice(modules: dict[str, str]) -> dict[str, list[str]]:
    """Names that several modules define, with the modules."""
    homes: dict[str, list[str]] = {}
    for module, source in modules.items():
        for name in defined_names(source):
            homes.setdefault(name, []).append(module)
    return {name: found for name, found in homes.items() if len(found) > 1}


@pytest.mark.long
def test_a_name_means_one_thing() -> None:
    source = ROOT / "src" / "cosmati"
    modules = {str(path.relative_to(source)): path.read_text("utf-8") for path in sorted(source.rglob("*.py"))}
    assert len(modules) > 100
    assert defined_twice(modules) == {}
    wrong = {
        "a.py": "class Row: ...\nKind = int\nT = TypeVar('T')\nSIZE = 1",
        "b.py": "Row = dict\nKind: TypeAlias = str\nT = TypeVar('T')\nSIZE = 2",
        "c.py": "def f():\n    class Row: ...\nclass _Row: ...",
    }
    assert defined_twice(wrong) == {"Row": ["a.py", "b.py"], "Kind": ["a.py", "b.py"]}


@pytest.mark.long
def test_sizes_are_within_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(ROOT)
    assert code == 0, capsys.readouterr().out


def test_sizes_are_measured() -> None:
    source = (
        "class A:\n"
        "    def __init__(self, a, /, b, *c, d=1, **e):\n"
        '        """Two\n        lines."""\n'
        "        def inner():\n"
        "            return a\n"
        "        self.f = inner\n"
    )
    assert list(measure(ast.parse(source), "page.py")) == [
        Size(kind="function", where="page.py:A.__init__", size=4),
        Size(kind="constructor", where="page.py:A.__init__", size=5),
        Size(kind="function", where="page.py:A.__init__.inner", size=2),
    ]


def test_what_is_too_large_needs_an_exception_and_a_needless_one_is_refused() -> None:
    sizes = [
        Size(kind="file", where="long.py", size=401),
        Size(kind="file", where="right.py", size=400),
        Size(kind="function", where="long.py:f", size=60),
    ]
    allowed = SizeException(kind="function", where="long.py:f", limit=60, reason="one table")
    needless = SizeException(kind="file", where="right.py", limit=500, reason="was long once")
    found = list(complaints(sizes, [allowed, needless]))
    assert [line.split(":")[0] for line in found] == ["long.py", "right.py"]
    assert "401 lines, the limit is 400" in found[0]
    assert "no longer needed" in found[1]
    outgrown = SizeException(kind="function", where="long.py:f", limit=59, reason="one table")
    assert "60 lines, the limit is 59" in list(complaints(sizes, [outgrown]))[1]


def test_an_exception_needs_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "exceptions.toml"
    path.write_text('[[exception]]\nkind = "file"\nwhere = "a.py"\nlimit = 500\nreason = " "\n', "utf-8")
    with pytest.raises(ValueError, match="a reason"):
        read_exceptions(path)
