"""The page of public names has all of them, and those that it names in rooms are there; type checkers see them too."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cosmati

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
ROWS = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]


def test_the_tables_have_every_public_name_once() -> None:
    named = [name for row in ROWS for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(name for name in dir(cosmati) if not name.startswith("__"))


def test_the_rooms_that_it_names_are_there() -> None:
    rooms = PAGE.split("The rest is in rooms:")[1].split("\n\n")[0]
    modules = re.findall(r"`(cosmati[\w.]+)`", rooms)
    assert len(modules) > 8
    for name in modules:
        importlib.import_module(name)
    for module, names in re.findall(r"`(cosmati[\w.]+)` \(((?:`\w+`(?:, )?)+)\)", rooms):
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(importlib.import_module(module), name)


@pytest.mark.slow
def test_type_checkers_see_lazily_loaded_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    names = "\n".join(f"reveal_type(cosmati.{name})" for name in cosmati.__all__)
    (tmp_path / "script.py").write_text(f"import cosmati\n{names}\ncosmati.RunConfig(bugdet='2ep')\ncosmati.Trainr\n")
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    revealed = re.findall(r'script\.py:\d+: note: Revealed type is "(.*)"', done.stdout)
    assert len(revealed) == len(cosmati.__all__), done.stdout
    assert not [text for text in revealed if text == "Any"]
    assert 'Unexpected keyword argument "bugdet"' in done.stdout
    assert 'Module has no attribute "Trainr"' in done.stdout
