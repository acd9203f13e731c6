"""A recorded recipe as Python that makes the run again: what the record says as it says it, and what it doesn't named.

A record holds the calls of a recipe's parts as text. Names of this library get their import; of any other name the
code says that it is the project's own. Nothing of a record is run here: it's read as syntax, and no more.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

_ROOMS = ("methods", "optim", "")
"""The last one is the library itself: a name that it has too is imported from there."""
ABOUT_THE_FOLDER = frozenset({"name", "run_folder", "progress", "change", "load_weights", "resume_from"})
_SETTINGS_OF_A_RUN = (
    "budget",
    "seed",
    "num_microbatches",
    "precision",
    "gather_precision",
    "compile_blocks",
    "num_threads",
    "deterministic",
    "device",
    "ledger",
)
_MAX_TEXT = 200_000
_WIDTH = 100
_NAMELESS = re.compile(r"<[a-z][^<>]*>")
"""In what Python calls a lambda, or an object that says of itself only that it is there."""


def recipe_code(recipe_text: str, *, seed: int | None = None, budget: float | None = None) -> str | None:
    """Return the code, None where the text isn't a recipe that this library wrote.

    Args:
        recipe_text: of the record.
        seed: of the run, where the recipe has none.
        budget: the share of the recipe's length that the run had.
    """
    try:
        recipe = json.loads(recipe_text) if len(recipe_text) <= _MAX_TEXT else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(recipe, dict) or not isinstance(recipe.get("optimizers"), list):
        return None
    try:
        if isinstance(recipe.get("config"), dict):
            return _of_recipe(recipe, seed, budget)
        return _of_run(recipe) if "budget" in recipe else None
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None  # text of somebody else's in the place of ours


def _of_recipe(recipe: Mapping[str, Any], seed: int | None, budget: float | None) -> str:
    config = {name: value for name, value in recipe["config"].items() if name not in ABOUT_THE_FOLDER}
    if seed is not None:
        config["seed"] = seed
    # What makes model, data and evaluation is written as the object that it is, or as the name of a function.
    parts = {name: _expression(recipe[name]) for name in ("model", "loss", "data", "evaluation") if recipe.get(name)}
    lines = [
        "recipe = Recipe(",
        f"    name={recipe.get('name', 'again')!r},",
        *(f"    {name}={code}," for name, code in parts.items()),
        *_sequence("optimizers", [_expression(one) for one in recipe["optimizers"]]),
        *_sequence("methods", [_expression(one) for one in recipe.get("methods", [])]),
        *_config(config),
        ")",
        "recipe.trainer().fit()",
    ]
    code = "\n".join(lines) + "\n"
    notes = []
    if budget is not None and budget != 1:
        notes.append(f"# The budget is the whole one. This run had {budget:g} of it, and its schedule with it.")
    if recipe.get("policy"):
        notes.append(
            f"# It had a policy too, of digest {str(recipe['policy'])[:64]}: Recipe(policy=..., taxonomy=...)."
        )
    return _with_imports(code, notes, {"Recipe": "cosmati.recipes.recipe"})


def _of_run(recipe: Mapping[str, Any]) -> str:
    config = {name: recipe[name] for name in _SETTINGS_OF_A_RUN if recipe.get(name) is not None}
    lines = [
        "trainer = Trainer(",
        "    model,",
        "    loss,",
        "    data,",
        *_sequence("optimizers", [_optimizer(one) for one in recipe["optimizers"]]),
        *_sequence("methods", [_expression(one) for one in recipe.get("methods", [])]),
        *_config(config),
        ")",
        "trainer.fit()",
    ]
    notes = ["# Model, loss and data are those of your own program: a run folder keeps their digests, not their code."]
    if recipe.get("policy"):
        notes.append(
            f"# It had a policy too, of digest {str(recipe['policy'])[:64]}: Trainer(policy=..., taxonomy=...)."
        )
    return _with_imports("\n".join(lines) + "\n", notes, {})


def _config(config: Mapping[str, Any]) -> list[str]:
    shown = [f"        {_name(name)}={value!r}," for name, value in config.items() if value is not None]
    return ["    config=RunConfig(", *shown, "    ),"]


def _sequence(name: str, parts: Iterable[str]) -> list[str]:
    parts = list(parts)
    return [f"    {name}=(", *(f"        {part}," for part in parts), "    ),"] if parts else []


def _name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError(text)
    return text


def _expression(text: object) -> str:
    """Return a part as the expression that its text is; it's one line of syntax, or nothing of ours."""
    if not isinstance(text, str):
        raise TypeError(text)
    return ast.unparse(ast.parse(text, mode="eval"))


def _wrapped(code: str) -> str:
    """Return code whose long calls have an argument a line, one level after the other as far as they're too long."""
    found = []
    for line in code.split("\n"):
        indent = len(line) - len(line.lstrip())
        text = line.strip().removesuffix(",")
        head, equals, rest = text.partition("=")
        prefix, call = (head + equals, rest) if equals and head.isidentifier() else ("", text)
        tree = _call_of(call) if len(line) > _WIDTH else None
        if tree is None:
            found.append(line)
            continue
        parts = [*map(ast.unparse, tree.args), *(f"{one.arg}={ast.unparse(one.value)}" for one in tree.keywords)]
        lines = [f"{prefix}{ast.unparse(tree.func)}(", *(f"    {part}," for part in parts), "),"]
        found += _wrapped("\n".join(" " * indent + one for one in lines)).split("\n")
    return "\n".join(found)


def _call_of(text: str) -> ast.Call | None:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    has_names = isinstance(tree, ast.Call) and all(one.arg for one in tree.keywords)
    return tree if isinstance(tree, ast.Call) and has_names and (tree.args or tree.keywords) else None


def _optimizer(text: str) -> str:
    """Return the call of an optimizer that a run's record describes as a dictionary's text."""
    fields = ast.literal_eval(text)
    if not isinstance(fields, dict) or not isinstance(fields.get("is"), str):
        raise TypeError(text)
    arguments = [f"{_name(name)}={_setting(name, value)}" for name, value in fields.items() if name != "is"]
    return f"{_name(fields['is'])}({', '.join(arguments)})"


def _setting(name: str, value: object) -> str:
    """Return a setting as code; a function without a name of its own is called after the setting."""
    code = _value(value)
    return f"own_{name}" if isinstance(value, str) and code == repr(value) and _NAMELESS.search(value) else code


def _value(value: object) -> str:
    """Return a setting as code; schedules, tuples and functions stand in a record as their text."""
    if isinstance(value, str):
        try:
            tree = ast.parse(value, mode="eval").body
        except SyntaxError:
            return repr(value)
        is_ours = isinstance(tree, ast.Name) and tree.id in _homes()
        if is_ours or isinstance(tree, ast.Call | ast.Tuple):
            return ast.unparse(tree)
    return repr(value)


def _with_imports(code: str, notes: list[str], homes: Mapping[str, str]) -> str:
    known = {**_homes(), **homes}
    tree = ast.parse(code)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    by_home: dict[str, list[str]] = {}
    for name in sorted(names & set(known)):
        by_home.setdefault(known[name], []).append(name)
    lines = [f"from {home} import {', '.join(found)}" for home, found in sorted(by_home.items())]
    strangers = sorted(names - set(known) - defined - {"model", "loss", "data"})
    if strangers:
        notes = [f"# Of the program that made this run: {', '.join(strangers)}.", *notes]
    return "\n".join([*lines, *notes, "", _wrapped(code)])


@lru_cache(maxsize=1)
def _homes() -> dict[str, str]:
    """Return where each public name of the library is imported from, without importing any of them."""
    found = {}
    for room in _ROOMS:
        home = f"cosmati.{room}" if room else "cosmati"
        text = files("cosmati").joinpath(room, "__init__.py").read_text(encoding="utf-8")
        imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        for node in imported:
            if str(node.module).startswith(f"{home}."):
                found.update({alias.asname or alias.name: home for alias in node.names})
    return found
