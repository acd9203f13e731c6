"""Makes a run's trainer once more from its recipe, for a replay."""

from __future__ import annotations

import dataclasses

from cosmati.recipes.recipe import Recipe
from cosmati.train.replay import MakeTrainer, ReplayRequest
from cosmati.train.trainer import Trainer


def trainers_of(recipe: Recipe) -> MakeTrainer:
    """Return what makes trainers of a recipe as a replay asks for them: without evaluations, in its folder."""

    def make(asked: ReplayRequest) -> Trainer:
        # The recipe's own, where it's the same one: it knows who has signed it.
        is_own = asked.policy is None or (recipe.policy is not None and recipe.policy.digest == asked.policy.digest)
        config = dataclasses.replace(recipe.config, **asked.settings)
        again = dataclasses.replace(
            recipe, policy=recipe.policy if is_own else asked.policy, evaluation=None, config=config
        )
        return again.trainer(run_folder=asked.run_folder, observers=asked.observers)

    return make
