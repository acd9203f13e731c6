"""A user's file is one program, whether it's started, imported or read as a recipe; another file is another one."""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmati.errors import CheckpointError
from cosmati.study.python_file import load_module
from cosmati.train.exporting import other_model
from cosmati.train.identity import check_resume

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
    file.write_text(PORT.replace("return 2 * x", "return 3 * x"))
    with pytest.raises(CheckpointError, match="of another run"):
        then(file, tmp_path / "run", "6ba")


@pytest.mark.parametrize("first", [imported, as_recipe])
@pytest.mark.parametrize("then", [as_script, imported, as_recipe])
def test_another_file_of_the_same_names_is_another_program(first: Start, then: Start, tmp_path: Path) -> None:
    files = [tmp_path / "one_of_two.py", tmp_path / "two_of_two.py"]
    for file in files:
        file.write_text(PORT)
    first(files[0], tmp_path / "run", "2ba")
    with pytest.raises(CheckpointError, match=r"is .*\bloss, was (file_)?one_of_two\.loss"):
        then(files[1], tmp_path / "run", "4ba")


def test_a_run_of_an_imported_file_is_exported_by_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "file_port", types.ModuleType("file_port"))
    name = "model.options.(model).act.is"
    for was, now, is_other in (
        ("port.double", "file_port.double", False),
        ("file_port.double", "port.double", False),
        ("__main__.double", "file_port.double", False),
        ("port.double", "file_port.triple", True),
        ("ship.double", "file_port.double", True),
    ):
        found = other_model({name: was}, {name: now}, is_elsewhere=False)
        assert [change.name for change in found] == [name] * is_other, (was, now)


def test_a_scripts_things_are_all_of_one_file() -> None:
    was = {"loss.0.is": "__main__.loss", "model.options.act.is": "__main__.act", "seed": 1}
    name = Path(__file__).stem
    own = f"tests.train.{name}"
    now = {"loss.0.is": f"{own}.loss", "model.options.act.is": f"{own}.act", "seed": 1}
    assert check_resume(was, now, asked=(), where="It") == check_resume(now, now, asked=(), where="It") == []
    path = {"loss.0.options.path": "file_a.txt"}
    with pytest.raises(CheckpointError, match=r"path file_a\.txt, was a\.txt"):
        check_resume(now | {"loss.0.options.path": "a.txt"}, now | path, asked=(), where="It")
    with pytest.raises(CheckpointError, match=r"is elsewhere\.act, was __main__\.act"):
        check_resume(was, now | {"model.options.act.is": "elsewhere.act"}, asked=(), where="It")
    with pytest.raises(CheckpointError, match=r"was __main__\.loss"):
        check_resume({"loss.0.is": "__main__.loss"}, {"loss.0.is": "torch.loss"}, asked=(), where="It")
