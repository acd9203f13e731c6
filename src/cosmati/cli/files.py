"""Recipes in the user's own Python files. Reading such a file runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from cosmati.errors import PolicyError
from cosmati.recipes.recipe import Recipe, parse_setting
from cosmati.routing.signed_policy import signed_policy
from cosmati.study.python_file import call_of


def under_policy(recipe: Recipe, url: str | None, name: str, root: str, run_folder: Path | None = None) -> Recipe:
    """Return a recipe under a policy that an authority has signed; as it is without `url`.

    A run that is resumed goes on with the version that it was started with, unless it's asked for another one.

    Args:
        recipe: whose taxonomy has the classes.
        url: of the authority's repository.
        name: of the policy, with `/NUMBER` for another version than the newest.
        root: digest of the authority's first root.
        run_folder: of the run that it's for; None is the recipe's.

    Raises:
        PolicyError: a part is missing, or the number is none.
        ProvenanceError: the signatures don't hold.
    """
    if url is None:
        if root:
            raise PolicyError("--policy-root is the root of an authority: give its repository too, --policy URL.")
        return recipe
    if not root:
        msg = "--policy asks an authority, which is trusted by its root: --policy-root, as `keys init` has said it."
        raise PolicyError(msg)
    name, slash, number = name.partition("/")
    if slash and not number.isdecimal():
        raise PolicyError(f"--policy-name {name}/{number}: the part after '/' is a version's number.")
    run = None if "policy" in recipe.config.change else run_folder or recipe.config.run_folder
    policy = signed_policy(url, name, root=root, number=int(number) if slash else None, run=run)
    return dataclasses.replace(recipe, policy=policy)


def load_recipe(file: str, settings: Sequence[str]) -> Recipe:
    """Return the recipe of `FILE[:function]` with settings `a.b=c` changed."""
    recipe = call_of(file, Recipe, "recipe")
    assert isinstance(recipe, Recipe), "checked"
    return recipe.with_settings(dict(parse_setting(text) for text in settings))
