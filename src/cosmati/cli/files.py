"""Recipes and studies in the user's own Python files. Reading such a file runs it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cosmati.errors import RunError
from cosmati.recipes.recipe import Recipe, parse_setting


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module.

    Raises:
        RunError: there is no such file, or it raises an error.
    """
    if not path.is_file() or path.suffix != ".py":
        msg = f"{path} is no Python file. Give the path of a .py file."
        raise RunError(msg)
    # A name of its own: a file called json.py mustn't stand in for the standard library's.
    spec = importlib.util.spec_from_file_location(f"file_{path.stem}", path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        msg = f"{path} can't be read: {type(error).__name__}: {error}"
        raise RunError(msg) from error
    finally:
        sys.path.pop(0)
    return module


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
