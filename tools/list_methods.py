"""Write the lists of all methods, functions and layers: `python tools/list_methods.py`, or `make methods`.

Each file of `src/cosmati/methods` says with `__all__` what it has for others. Its methods are listed in `__init__.py`
there, its functions in `functional.py`, its other classes in `layers.py`. With `--check` nothing is written, and a list
that the files don't bear out is an error.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

Kind = Literal["method", "function", "layer"]
Module = str
Name = str
Exports = Mapping[Module, Mapping[Name, Kind]]

LISTS: dict[str, tuple[Kind, str]] = {
    "__init__.py": ("method", '"""Training methods. This list is all there is: no registry."""'),
    "functional.py": (
        "function",
        '"""The methods\' functions, for a loop of your own: `import cosmati.methods.functional as cf`."""',
    ),
    "layers.py": (
        "layer",
        '"""The methods\' layers, to build models with: `from cosmati.methods.layers import BlurPool2d`."""',
    ),
}
ORIGIN = "# Written by tools/list_methods.py: run `make methods` after a change of a method's `__all__`."
_WIDTH = 120


def exports_of(source: str, where: str) -> dict[Name, Kind]:
    """Return what a method's file exports, by name.

    Raises:
        ValueError: it exports no method, not all of its public methods, or something that it doesn't define.
    """
    body = ast.parse(source).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    bases = {node.name: {ast.unparse(b) for b in node.bases} for node in body if isinstance(node, ast.ClassDef)}
    methods = {"Method"}
    while more := {name for name, own in bases.items() if own & methods} - methods:
        methods |= more
    kinds: dict[Name, Kind] = dict.fromkeys(functions, "function")
    kinds |= {name: "method" if name in methods else "layer" for name in bases}
    exported = {name: kinds.get(name) for name in _all_of(body)}
    found = {name: kind for name, kind in exported.items() if kind is not None}
    if unknown := sorted(exported.keys() - found.keys()):
        msg = f"{where} exports {', '.join(unknown)} and defines no such function or class. Mend its __all__."
        raise ValueError(msg)
    public = {name for name, kind in kinds.items() if kind == "method" and not name.startswith("_")}
    if not public or public - exported.keys():
        what = ", ".join(sorted(public - exported.keys())) or "a method"
        msg = f"{where} doesn't export {what}. Name it in __all__, with the functions and layers that others may use."
        raise ValueError(msg)
    return found


def list_of(exports: Exports, kind: Kind, docstring: str) -> str:
    """Return the text of the file that lists one kind of exports."""
    imports = {module: _sorted(n for n in names if names[n] == kind) for module, names in exports.items()}
    lines = [docstring, "", ORIGIN, "", "from __future__ import annotations", ""]
    lines += ["from cosmati.core.method import Method"] * (kind == "method")
    for module, names in sorted(imports.items()):
        line = f"from cosmati.methods.{module} import {', '.join(names)}"
        wrapped = [f"from cosmati.methods.{module} import (", *(f"    {name}," for name in names), ")"]
        lines += [] if not names else [line] if len(line) <= _WIDTH else wrapped
    listed = [name for names in imports.values() for name in names]
    if kind == "method":
        ordered = sorted(listed, key=str.casefold)
        lines += ["", "ALL: tuple[type[Method], ...] = (", *(f"    {name}," for name in ordered), ")"]
        listed.append("ALL")
    lines += ["", "__all__ = [", *(f'    "{name}",' for name in _sorted(listed)), "]", ""]
    return "\n".join(lines)


def lists_of(folder: Path) -> dict[Path, str]:
    """Return the texts of the three lists for a folder of methods.

    Raises:
        ValueError: a file's exports are wrong, or two files export one name.
    """
    sources = {path.stem: path for path in sorted(folder.glob("*.py")) if path.name not in LISTS}
    exports = {module: exports_of(path.read_text("utf-8"), path.name) for module, path in sources.items()}
    owner: dict[Name, Module] = {}
    for module, names in exports.items():
        for name in names:
            if name in owner:
                msg = f"{owner[name]}.py and {module}.py both export {name}. Rename one of them."
                raise ValueError(msg)
            owner[name] = module
    return {folder / file: list_of(exports, kind, docstring) for file, (kind, docstring) in LISTS.items()}


def main(root: Path, *, check: bool) -> int:
    """Write the lists, or check them; return the exit code."""
    try:
        texts = lists_of(root / "src" / "cosmati" / "methods")
    except ValueError as error:
        print(error)
        return 1
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(root)} isn't what the methods' files export. Run `make methods`.")
        else:
            path.write_text(texts[path], "utf-8")
    return int(check and bool(stale))


def _all_of(body: list[ast.stmt]) -> list[Name]:
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _sorted(names: Iterable[Name]) -> list[Name]:
    """Sort as ruff sorts imports: constants, classes, functions."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent, check="--check" in sys.argv[1:]))
