"""Makes a run's trainer once more from its recipe, for a replay."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from cosmati.core.source import Source
from cosmati.errors import LedgerError
from cosmati.forget.making import RecipeThen
from cosmati.recipes.recipe import Recipe
from cosmati.train.replay import MakeTrainer, ReplayRequest
from cosmati.train.trainer import Trainer

Without = Callable[[str, object], Source]
"""Puts tombstones into a recipe's source, in place of what a deletion took out whose digest is given."""


def trainers_of(recipe: Recipe, without: Without | None = None) -> MakeTrainer:
    """Return what makes trainers of a recipe as a replay asks for them: without evaluations, in its folder.

    Args:
        recipe: of the run.
        without: puts tombstones into its data; None where nobody here knows what was forgotten.
    """

    def make(asked: ReplayRequest) -> Trainer:
        data = recipe.data
        if asked.forgotten and without is None:
            raise LedgerError(
                f"These steps were taken without what the request {asked.forgotten[:16]} had forgotten, and which rows "
                "that was is only in the run's private folder. Replay them there, or others from before that."
            )
        if asked.forgotten and without is not None:
            data = functools.partial(_without, recipe, without, asked.forgotten)
        then, config = RecipeThen(asked.policy, asked.schedules), dataclasses.replace(recipe.config, **asked.settings)
        again = dataclasses.replace(
            recipe,
            policy=recipe.policy if asked.policy is None else then.policy_for(recipe.policy),
            optimizers=then.optimizers_for(recipe.optimizers),
            evaluation=None,
            config=config,
            data=data,
        )
        return again.trainer(run_folder=asked.run_folder, observers=asked.observers)

    return make


def _without(recipe: Recipe, without: Without, forgotten: str) -> Source:
    return without(forgotten, recipe.data())
