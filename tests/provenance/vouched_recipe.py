"""A recipe over signed data, as a user's own file has it; WORLD says where these lie."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from cosmati.data.source import StreamingSource
from cosmati.optim.optimizers import SGD
from cosmati.recipes.recipe import Recipe
from cosmati.routing.policy_file import load_policy
from cosmati.train.config import RunConfig
from tests.train.vouched_world import POLICY, TAXONOMY, World, loss

EVERY = ("details_every", "update_norm_every", "direction_every", "update_direction_every", "entropy_every")


def model() -> nn.Module:
    """Return it."""
    return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))


def data() -> StreamingSource:
    """Return the rows."""
    return World.found_in(Path(os.environ["WORLD"])).sources()


def recipe() -> Recipe:
    """Return it."""
    settings = dict.fromkeys(EVERY, 1)
    return Recipe(
        name="vouched",
        model=model,
        loss=loss,
        data=data,
        optimizers=(SGD(lr=1e-3, momentum=0.9),),
        policy=load_policy(POLICY),
        taxonomy=TAXONOMY,
        config=RunConfig(budget="6ba", num_threads=1, num_microbatches=4, checkpoint_every="3ba", **settings),
    )
