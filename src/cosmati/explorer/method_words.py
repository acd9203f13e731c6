"""What this release's own source says of a method: read from its text, as importing it would import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from cosmati.study.composition import kind_of

_ROOMS = (("methods", "Method"), ("optim", "Optimizer"))


@dataclass(frozen=True)
class MethodWords:
    """What a method's source says.

    Attributes:
        name: Of its class.
        paper: First line of its file: what it is, and who published it.
        does: Paragraphs of its docstring before the arguments.
        owns: What only one part of a plan may hold, and it may ask for.
        file: That it stands in, below the package.
    """

    name: str
    paper: str
    does: tuple[str, ...]
    owns: tuple[str, ...]
    file: str


def method_key(name: str) -> str:
    """Return what names of one method have in common: its kind in one case and without spaces.

    `LabelSmoothing(smoothing=0.1)` and `label smoothing` are one method; `Adam` and `Adam++` are two.
    """
    return re.sub(r"\s+", "", kind_of(name).casefold())


def words_of(name: str) -> MethodWords | None:
    """Return what is said of a method by any spelling of its name, None where this release has none of that name."""
    return known_methods().get(method_key(name))


def exclusive_with(words: MethodWords) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each thing that a method may hold alone, and which others ask for the same."""
    return tuple(
        (thing, tuple(one.name for one in known_methods().values() if thing in one.owns and one.name != words.name))
        for thing in words.owns
    )


@lru_cache(maxsize=1)
def known_methods() -> dict[str, MethodWords]:
    """Return all methods and optimizers of this release by their key."""
    return {method_key(one.name): one for room, base in _ROOMS for one in _read(room, base)}


def _read(room: str, base: str) -> Iterator[MethodWords]:
    folder = files("cosmati").joinpath(room)
    trees = {
        file.name: ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(folder.iterdir(), key=lambda one: one.name)
        if file.name.endswith(".py")
    }
    for name, tree in trees.items():
        for node in tree.body:
            is_one = isinstance(node, ast.ClassDef) and any(
                isinstance(one, ast.Name) and one.id == base for one in node.bases
            )
            if is_one and isinstance(node, ast.ClassDef):
                # An optimizer's configuration may stand apart from what it configures.
                source = f"{node.name.lower()}.py" if f"{node.name.lower()}.py" in trees else name
                paper = (ast.get_docstring(trees[source]) or "").partition("\n")[0]
                yield MethodWords(node.name, paper, _paragraphs(node), _owned(node), f"{room}/{source}")


def _paragraphs(node: ast.ClassDef) -> tuple[str, ...]:
    text = re.split(r"^(?:Args|Attributes|Raises):$", ast.get_docstring(node) or "", flags=re.MULTILINE)[0]
    return tuple(" ".join(part.split()) for part in text.split("\n\n") if part.strip())


def _owned(node: ast.ClassDef) -> tuple[str, ...]:
    """Return the texts in the class's `owns` and in what its `claims` returns."""
    found = list[str]()
    for one in node.body:
        is_owns = isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id == "owns"
        is_claims = isinstance(one, ast.FunctionDef) and one.name == "claims"
        parts = [one] if is_owns else [part for part in ast.walk(one) if isinstance(part, ast.Return)]
        if is_owns or is_claims:
            found += [
                leaf.value
                for part in parts
                for leaf in ast.walk(part)
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
            ]
    return tuple(dict.fromkeys(found))
