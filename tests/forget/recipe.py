"""A recipe of BatchNorm, Muon with AdamW, and an average, over rows of three classes, as a user's own file has it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

from cosmati.core.source import Source
from cosmati.methods import EMA
from cosmati.optim import AdamW, Muon
from cosmati.recipes.recipe import Recipe
from cosmati.train.config import RunConfig
from cosmati.train.trainer import Trainer
from tests.forget.samples import ISOLATED, PLAIN
from tests.train.isolated.samples import CASES, TAXONOMY, cnn, source

CASE = CASES["CNN with BatchNorm"]


def data() -> Source:
    """Return the rows."""
    return source(CASE)


def recipe() -> Recipe:
    """Return it."""
    return Recipe(
        name="sample",
        model=cnn,
        loss=CASE.loss,
        data=data,
        optimizers=(Muon(lr=0.02), AdamW(lr=0.01)),
        methods=(EMA(half_life="2ba"),),
        config=RunConfig(budget="6ba", num_microbatches=4, num_threads=1, checkpoint_every="2ba", num_checkpoints=9),
        policy=PLAIN,
        taxonomy=TAXONOMY,
    )


class Kills(Recipe):
    """The same, in a process that ends at once in the middle of a step."""

    def trainer(self, **options: Any) -> Trainer:
        """Return a trainer whose fifth step is never committed."""
        made = super().trainer(**options)

        def tell(event: str) -> None:
            if made.clock.step == 4 and event.startswith("commit"):
                os.kill(os.getpid(), signal.SIGKILL)

        made.trace = tell
        return made


def killed() -> Recipe:
    """Return the one that kills its process."""
    return Kills(**{name: getattr(recipe(), name) for name in Recipe.__dataclass_fields__})


def isolated() -> Recipe:
    """Return one under which the rows of a class have modules of their own."""
    case = CASES["MLP, low rank"]
    made = replace(recipe(), model=case.build, loss=case.loss, data=lambda: source(case), policy=ISOLATED)
    return replace(made, methods=(case.adapters,))


def other_seed() -> Recipe:
    """Return another run's."""
    return replace(recipe(), config=replace(recipe().config, seed=1))
