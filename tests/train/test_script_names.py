"""A user's file is one program, whether it's started, imported or read as a recipe; another file is another one."""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import CheckpointError
from cosmati.study.python_file import load_module
from cosmati.train.exporting import other_model
from cosmati.train.identity import check_resume
from cosmati.train.script_names import note_files

PORT = """
import sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from cosmati import InMemory, RunConfig, Trainer
from cosmati.optim import SGD

SCALE = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.act = double

    def forward(self, x):
        return self.act(self.layer(x))


def double(x):
    return 2 * x


def loss(model, data):
    return SCALE * cross_entropy(model(data[0]), data[1])


def run(folder, budget):
    torch.manual_seed(0)
    data = InMemory((torch.arange(32.0).view(8, 4), torch.arange(8) % 3), 4)
    config = RunConfig(budget=budget, run_folder=folder, change=("budget",))
    return Trainer(Net(), loss, data, optimizers=SGD(lr=0.1), config=config).fit().clock.step


if __name__ == "__main__":
    print(run(sys.argv[1], sys.argv[2]))
"""

Start = Callable[[Path, Path, str], Any]


def as_script(file: Path, folder: Path, budget: str) -> None:
    arguments = sys.argv
    sys.argv = [str(file), str(folder), budget]
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv = arguments


def imported(file: Path, folder: Path, budget: str) -> None:
    sys.path.insert(0, str(file.parent))
    importlib.invalidate_caches()
    try:
        importlib.import_module(file.stem).run(folder, budget)
    finally:
        sys.path.remove(str(file.parent))
        sys.modules.pop(file.stem, None)


def as_recipe(file: Path, folder: Path, budget: str) -> None:
    module = load_module(file)
    try:
        module.run(folder, budget)
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("first", [as_script, imported, as_recipe])
@pytest.mark.parametrize("then", [as_script, imported, as_recipe])
def test_a_run_goes_on_however_its_file_is_come_by(first: Start, then: Start, tmp_path: Path) -> None:
    file = tmp_path / "port_of_names.py"
    file.write_text(PORT)
    first(file, tmp_path / "run", "2ba")
    then(file, tmp_path / "run", "4ba")
    # Of another length, since Python takes a compiled file for one as long that was written in the same second.
    file.write_text(PORT.replace("return 2 * x", "return 30 * x"))
    with pytest.raises(CheckpointError, match="of another run"):
        then(file, tmp_path / "run", "6ba")


@pytest.mark.parametrize("first", [as_script, imported, as_recipe])
@pytest.mark.parametrize("then", [as_script, imported, as_recipe])
def test_another_file_of_the_same_names_is_another_program(first: Start, then: Start, tmp_path: Path) -> None:
    files = [tmp_path / "one_of_two.py", tmp_path / "two_of_two.py"]
    for file in files:
        file.write_text(PORT)
    first(files[0], tmp_path / "run", "2ba")
    if first == then == as_script:  # A script may be renamed.
        then(files[1], tmp_path / "run", "4ba")
        return
    with pytest.raises(CheckpointError, match=r"is .*\bloss, was (file_one_of_two|__main__|one_of_two)\.loss"):
        then(files[1], tmp_path / "run", "4ba")


def test_a_recipe_in_another_folder_is_another_program(tmp_path: Path) -> None:
    files = [tmp_path / name / "port_of_folders.py" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(PORT)
    as_script(files[0], tmp_path / "run", "2ba")
    with pytest.raises(CheckpointError, match=r"was __main__\.loss"):
        as_recipe(files[1], tmp_path / "run", "4ba")
    as_recipe(files[0], tmp_path / "run", "4ba")


def test_a_run_of_an_imported_file_is_exported_by_its_recipe() -> None:
    name, note = "model.options.(model).act.is", {"files.file_port": "work.port"}
    recipe = {name: "file_port.double"} | note
    for was, now, is_other in (
        ({name: "port.double"}, recipe, False),
        (recipe, {name: "port.double"}, False),
        ({name: "__main__.double"}, recipe, False),
        ({name: "port.double"}, {name: "file_port.triple"} | note, True),
        ({name: "ship.double"}, recipe, True),
    ):
        found = other_model(was, now, is_elsewhere=False)
        assert [change.name for change in found] == [name] * is_other, (was, now)


def _is_taken(was: dict[str, Any], now: dict[str, Any]) -> bool:
    try:
        return check_resume(was, now, asked=(), where="It") == []
    except CheckpointError:
        return False


LOSS, ACT = "loss.0.is", "model.options.act.is"
SCRIPT = {LOSS: "__main__.loss", ACT: "__main__.act"}
PORTED, SHIPPED = {"files.__main__": "work.port"}, {"files.__main__": "work.ship"}


@pytest.mark.parametrize(
    ("was", "now", "is_taken"),
    [
        (SCRIPT | PORTED, {LOSS: "port.loss", ACT: "port.act"}, True),
        (SCRIPT | PORTED, {LOSS: "pkg.work.port.loss", ACT: "pkg.work.port.act"}, True),
        (SCRIPT | {"files.__main__": "pkg.port"}, {LOSS: "port.loss", ACT: "port.act"}, True),
        (SCRIPT | PORTED, {LOSS: "other.port.loss", ACT: "other.port.act"}, False),
        (SCRIPT | PORTED, {LOSS: "port.loss", ACT: "elsewhere.act"}, False),
        (SCRIPT | PORTED, {LOSS: "report.loss", ACT: "report.act"}, False),
        (SCRIPT | PORTED, {LOSS: "ort.loss", ACT: "ort.act"}, False),
        (SCRIPT | PORTED, {LOSS: "models.loss", ACT: "models.act"}, False),
        # A new script that imports one thing of the earlier one, and has the other itself.
        (SCRIPT | PORTED, {LOSS: "__main__.loss", ACT: "port.act"} | SHIPPED, False),
        (SCRIPT | PORTED, {LOSS: "__main__.loss", ACT: "ship.act"} | SHIPPED, False),
        (SCRIPT | PORTED, SCRIPT | SHIPPED, True),
        # A session, or an earlier release: nobody knows which file it was.
        (SCRIPT, {LOSS: "port.loss", ACT: "port.act"}, False),
        (SCRIPT, SCRIPT | PORTED, True),
        ({LOSS: "__mp_main__.loss", ACT: "__mp_main__.act"}, SCRIPT, True),
        # A module of the user's own may be called as recipes are.
        ({LOSS: "file_utils.loss"}, {LOSS: "utils.loss"}, False),
        ({LOSS: "file_utils.loss", "files.file_utils": "work.utils"}, {LOSS: "utils.loss"}, True),
        # Paths are no names.
        (SCRIPT | PORTED | {"path": "a/__main__.py"}, {LOSS: "port.loss", ACT: "port.act", "path": "a/port.py"}, False),
        ({"path": "file_a.txt"}, {"path": "a.txt"}, False),
    ],
)
def test_a_scripts_things_are_all_of_one_file(was: dict[str, Any], now: dict[str, Any], *, is_taken: bool) -> None:
    assert _is_taken(was, now) == is_taken
    assert _is_taken(now, was) == is_taken


def test_only_scripts_and_recipes_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def note(module: str, file: Path | None, spec: str | None = None) -> dict[str, str]:
        own = types.ModuleType(module)
        own.__file__ = None if file is None else str(file)
        own.__spec__ = None if spec is None else ModuleSpec(spec, None)
        monkeypatch.setitem(sys.modules, module, own)
        return note_files({"a": f"{module}.loss", "b": 1, "c": "x/file_a.txt"})

    work = tmp_path / "work"
    assert note("__main__", work / "port.py") == {"files.__main__": "work.port"}
    assert note("__main__", work / "port.py", "pkg.port") == {"files.__main__": "pkg.port"}
    assert note("__main__", work / "cProfile.py", "torch.utils") == {}
    assert note("__main__", None) == {}
    assert note("file_port", work / "port.py", "file_port") == {"files.file_port": "work.port"}
    assert note("file_port", work / "file_port.py", "file_port") == {}
    assert note("file_port", work / "file_port" / "__init__.py", "file_port") == {}
