"""One file under its several names: a script is `__main__`, imported it's `port`, and as a recipe `file_port`.

Facts keep the name that a module had. A run that began as `python port.py` may go on in a program that imports `port`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmati.train.user_code import SPAWNED, is_library

_SCRIPT = re.compile(rf"\b(?:__main__|{SPAWNED})(?=\.)")
_RECIPE = re.compile(r"\bfile_([^.\s'\"(<>]+)(?=\.)")
"""How `load_module` begins the name of a file that holds recipes."""


def by_file(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two sets of facts in which the user's files have the names by which they'd be imported.

    Which file an earlier script was, nobody has noted: it's taken for the one in which this program has the first thing
    that the script had, so long as that's a file of the user's own. What it holds is compared beside its name.
    """
    now = _renamed(now, script_name() or "__main__")
    return _renamed(was, _earlier_script(was, now)), now


def script_name() -> str:
    """Return the name by which this program's script would be imported; empty where it's none (a session)."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and not spec.name.endswith("__main__"):
        return str(spec.name)  # python -m package.port
    return Path(file).stem if isinstance(file, str) else ""


def _renamed(facts: Mapping[str, Any], script: str) -> dict[str, Any]:
    return {
        name: _RECIPE.sub(_imported, _SCRIPT.sub(script, fact)) if isinstance(fact, str) else fact
        for name, fact in facts.items()
    }


def _imported(recipe: re.Match[str]) -> str:
    """Return the name that a recipe's file has when it's imported; what only looks like one stays (`file_a.txt`)."""
    return recipe[1] if recipe[1] == script_name() or {recipe[0], recipe[1]} & sys.modules.keys() else recipe[0]


def _earlier_script(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name, fact in was.items():
        there = now.get(name)
        if isinstance(fact, str) and isinstance(there, str) and (match := _SCRIPT.match(fact)):
            module, rest = there.removesuffix(fact[match.end() :]), fact[match.end() :]
            if module + rest == there and module.isidentifier() | ("." in module) and not is_library(module):
                return module
    return script_name() or "__main__"
