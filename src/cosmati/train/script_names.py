"""One file under its several names: a script is `__main__`, imported it's `port`, and as a recipe `file_port`.

Facts keep the name that a module had. A run that began as `python port.py` may go on in a program that imports `port`,
so checkpoints say which file each such name stood for: another file's class of the same name is another one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cosmati.train.user_code import SPAWNED, is_library

_Facts = Mapping[str, Any]
_Files = Mapping[str, str]
"""Folder and file, as a dotted name, of each module that has another name than it's imported by."""

NOTED = "files."
_BEFORE = r"(?<![\w./\\-])"
"""Neither a part of a path nor of another name."""
_OTHER_NAME = re.compile(_BEFORE + r"(?:__main__|file_[^.\s'\"(<>]+)(?=\.)")
"""Scripts; and how `load_module` begins the name of a file that holds recipes."""
_SPAWNED = re.compile(rf"\b{SPAWNED}\b")


def note_files(facts: _Facts) -> dict[str, str]:
    """Return facts to put beside these: which files the scripts and recipes are that they name."""
    texts = [fact for fact in facts.values() if isinstance(fact, str)]
    modules = sorted({found[0] for text in texts for found in _OTHER_NAME.finditer(text)})
    return {f"{NOTED}{module}": name for module in modules if (name := _file_of(module))}


def by_file(was: _Facts, now: _Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two sets of facts in which the user's files have the names by which they'd be imported.

    The names stay as they are where that leaves fewer differences: a script may be renamed.
    """
    then, today = (_as_one_script(facts) for facts in (was, now))
    mine = _renamed(then, _as_told(then, _noted(was), _renamed(today, _noted(now))))
    other = _renamed(today, _as_told(today, _noted(now), mine))
    return min(((then, today), (mine, other)), key=lambda pair: _num_differences(*pair))


def is_same(was: object, now: object) -> bool:
    """Say whether a fact is what it was: NaN too, which equals nothing."""
    return was == now or (was != was and now != now)  # noqa: PLR0124


def _file_of(module: str) -> str:
    """Return the dotted name of a script's or a recipe's file; empty where it's neither, or a session's."""
    found = sys.modules.get(module)
    spec, file = getattr(found, "__spec__", None), getattr(found, "__file__", None)
    if module == "__main__" and spec is not None:
        return "" if is_library(spec.name) else str(spec.name)  # python -m package.port
    path = Path(file).resolve() if isinstance(file, str) else None
    if path is None or module not in ("__main__", f"file_{path.stem}"):
        return ""
    return f"{path.parent.name}.{path.stem}"


def _noted(facts: _Facts) -> dict[str, str]:
    return {name.removeprefix(NOTED): str(file) for name, file in facts.items() if name.startswith(NOTED)}


def _as_one_script(facts: _Facts) -> dict[str, Any]:
    """Leave the notes out, and name the script as where it was started: earlier releases kept its name when spawned."""
    return {
        name: _SPAWNED.sub("__main__", fact) if isinstance(fact, str) else fact
        for name, fact in facts.items()
        if not name.startswith(NOTED)
    }


def _renamed(facts: _Facts, names: _Files) -> dict[str, Any]:
    def name_of(found: re.Match[str]) -> str:
        return names.get(found[0], found[0])

    return {
        name: _OTHER_NAME.sub(name_of, fact) if names and isinstance(fact, str) else fact
        for name, fact in facts.items()
    }


def _as_told(facts: _Facts, names: _Files, others: _Facts) -> dict[str, str]:
    """Return the names as the other facts have them, where these may be of the same file: `port`, or `package.port`."""
    return {
        module: next((name for name in _called(facts, module, others) if _may_be(name, file)), file)
        for module, file in names.items()
    }


def _called(facts: _Facts, module: str, others: _Facts) -> Iterator[str]:
    """Yield what the other facts call a module."""
    for name, fact in facts.items():
        there = others.get(name)
        if isinstance(fact, str) and isinstance(there, str) and fact.startswith(f"{module}."):
            yield there.removesuffix(fact.removeprefix(module))


def _may_be(name: str, file: str) -> bool:
    return f".{file}".endswith(f".{name}") or f".{name}".endswith(f".{file}")


def _num_differences(was: _Facts, now: _Facts) -> int:
    return sum(not is_same(was.get(name), now.get(name)) for name in {**was, **now})
