"""Check that files, functions and constructors stay small. Run from anywhere: `python tools/check_size.py`.

Limits: 400 lines a file, 50 lines a function (its docstring aside), 12 parameters a constructor. Dataclasses
write no constructor and so aren't counted. What may be larger stands in `tools/size_exceptions.toml` with its
reason; an exception that nothing needs any more is an error too.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = {"file": 400, "function": 50, "constructor": 12}
UNITS = {"file": "lines", "function": "lines", "constructor": "parameters"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Size:
    """One thing that was measured. `where` is `path` or `path:qualified.name`."""

    kind: str
    where: str
    size: int


@dataclass(frozen=True, kw_only=True)
class SizeException:
    """A size over the limit that is right as it is."""

    kind: str
    where: str
    limit: int
    reason: str


def function_lines(function: Function) -> int:
    """Lines from `def` to the end, the docstring aside."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def num_parameters(constructor: Function) -> int:
    """Parameters that a caller may give, so without `self`."""
    a = constructor.args
    named = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) - 1
    return named + (a.vararg is not None) + (a.kwarg is not None)


def measure(node: ast.AST, where: str, separator: str = ":") -> Iterator[Size]:
    """Measure every function and constructor below a node, nested ones included."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef):
            yield from measure(child, where, separator)
            continue
        name = f"{where}{separator}{child.name}"
        if isinstance(child, Function):
            yield Size(kind="function", where=name, size=function_lines(child))
            if child.name == "__init__" and isinstance(node, ast.ClassDef):
                yield Size(kind="constructor", where=name, size=num_parameters(child))
        yield from measure(child, name, ".")


def measure_tree(root: Path) -> Iterator[Size]:
    """Measure every Python file below `root/src`."""
    for path in sorted((root / "src").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        yield Size(kind="file", where=where, size=len(text.splitlines()))
        yield from measure(ast.parse(text, filename=where), where)


def read_exceptions(path: Path) -> list[SizeException]:
    """Read the list of exceptions. A missing field, an unknown one or an empty reason raises."""
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("exception", [])
    exceptions = [SizeException(**table) for table in tables]
    for exception in exceptions:
        if exception.kind not in LIMITS or not exception.reason.strip():
            msg = f"{path}: {exception} needs a kind out of {', '.join(LIMITS)} and a reason."
            raise ValueError(msg)
    return exceptions


def complaints(sizes: list[Size], exceptions: list[SizeException]) -> Iterator[str]:
    """Say what is too large, and which exceptions nothing needs."""
    allowed = {(e.kind, e.where): e.limit for e in exceptions}
    needed = set()
    for found in sizes:
        house_limit, key = LIMITS[found.kind], (found.kind, found.where)
        if found.size <= house_limit:
            continue
        needed.add(key)
        limit = allowed.get(key, house_limit)
        if found.size > limit:
            yield (
                f"{found.where}: this {found.kind} has {found.size} {UNITS[found.kind]}, "
                f"the limit is {limit}. Split it, or say why not in tools/size_exceptions.toml."
            )
    for kind, where in sorted(allowed.keys() - needed):
        yield f"{where}: the exception for this {kind} is no longer needed. Remove it."


def main(root: Path) -> int:
    """Print every complaint about the tree at `root`; 1 if there is one."""
    sizes = list(measure_tree(root))
    found = list(complaints(sizes, read_exceptions(root / "tools" / "size_exceptions.toml")))
    print("\n".join(found) or f"Sizes are within their limits: {len(sizes)} measured.")
    return 1 if found or not sizes else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
