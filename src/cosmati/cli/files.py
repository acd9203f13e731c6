"""Recipes and studies in the user's own Python files. Reading such a file runs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cosmati.errors import RunError
from cosmati.recipes.recipe import Recipe, parse_setting
from cosmati.study.python_file import load_module


def call_of(file: str, kind: type, default: str) -> object:
    """Call the function that `FILE[:name]` names, without arguments, and check what it returns.

    Raises:
        RunError: no such file or function, or it returns something else.
    """
    path, _, name = file.partition(":")
    name = name or default
    module = load_module(Path(path))
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        msg = f"{path} has no function {name!r}. It has {', '.join(own) or 'none'}: name one as {path}:NAME."
        raise RunError(msg)
    made = function()
    if not isinstance(made, kind):
        msg = f"{name} in {path} returns a {type(made).__name__}, and a {kind.__name__} is needed."
        raise RunError(msg)
    return made


def load_recipe(file: str, settings: Sequence[str]) -> Recipe:
    """Return the recipe of `FILE[:function]` with settings `a.b=c` changed."""
    recipe = call_of(file, Recipe, "recipe")
    assert isinstance(recipe, Recipe), "checked"
    return recipe.with_settings(dict(parse_setting(text) for text in settings))
