"""Recipes of runs that were changed at stops, each as the user's own file had it then."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cosmati.cli.forget import maker
from cosmati.forget.ablation import Wrap
from cosmati.optim import WSD, AdamW, Cosine, Muon, Schedule
from cosmati.recipes.recipe import Recipe
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.train.observers import Observer, StepReport
from cosmati.train.observers.observer import WatchedRun
from cosmati.train.trainer import Trainer
from tests.forget.recipe import recipe as sample
from tests.forget.samples import PLAIN, unwrapped


def _policy(rule: str) -> PolicyFile:
    regions = "regions: {all: {params: '*'}}"
    return load_policy(f"version: 1\ntaxonomy: t\n{regions}\nrules: [{{class: '**', weight: 1}}, {rule}]\n")


HALF, REJECTED = _policy("{class: personal, weight: 0.5}"), _policy("{class: personal, decision: reject}")
NO_SCHEDULE = sample().optimizers[0].schedule


def recipe_of(policy: PolicyFile = PLAIN, budget: str = "6ba", schedule: Schedule = NO_SCHEDULE) -> Recipe:
    """Return a recipe of BatchNorm, Muon with AdamW, and an average."""
    optimizers = (Muon(lr=0.02, schedule=schedule), AdamW(lr=0.01, schedule=schedule))
    return replace(sample(), policy=policy, optimizers=optimizers, config=replace(sample().config, budget=budget))


Stops = Sequence[tuple[Recipe, int]]
"""Recipes, and at which step the run was stopped under each; the last one goes to its end."""

THREE = ((recipe_of(), 2), (recipe_of(HALF, "5ba"), 5), (recipe_of(HALF, "8ba", Cosine(final=0.1)), 8))
RUNS: dict[str, Stops] = {
    "policy": ((recipe_of(), 3), (recipe_of(HALF), 6)),
    "policy, and another order": ((recipe_of(REJECTED), 3), (recipe_of(), 6)),
    "longer budget": ((recipe_of(budget="4ba"), 4), (recipe_of(budget="7ba"), 7)),
    "schedule": ((recipe_of(schedule=WSD(decay="2ba")), 3), (recipe_of(schedule=Cosine()), 6)),
    "policy, then budget and schedule": THREE,
}


@dataclass
class StopAt(Observer):
    """Stops a run after a step, as Ctrl-C does."""

    step: int
    run: WatchedRun | None = None

    def on_open(self, run: WatchedRun) -> None:
        self.run = run

    def on_step(self, report: StepReport) -> None:
        if report.clock.step == self.step and self.run is not None:
            self.run.stop("")


def trained(stops: Stops, folder: Path, wrap: Wrap = unwrapped) -> Path:
    """Train a run that was stopped, changed, and resumed, and return its folder."""
    for recipe, end in stops:
        changes = {"change": ("policy", "budget", "schedule")} if folder.exists() else {}
        trainer = maker(recipe)(wrap, folder, **changes)
        trainer.observers.append(StopAt(end))
        trainer.fit()
    return folder


def recipe() -> Recipe:
    """Return the recipe that the run of three legs ended with, as it lies in a user's file."""
    return THREE[-1][0]


class KilledAt(Recipe):
    """The same, in a process that ends at once in the middle of a step; or where the last of the legs would begin."""

    def trainer(self, **options: Any) -> Trainer:
        """Return a trainer of which one step is never committed."""
        made, at = super().trainer(**options), os.environ["KILLED_AT"]
        folder = made.assembly.config.run_folder
        if at == "between" and folder is not None and folder.name == "out" and self.config.budget == "8ba":
            assert (folder / "checkpoints" / "step-00000005").exists()
            os.kill(os.getpid(), signal.SIGKILL)

        def tell(event: str) -> None:
            if str(made.clock.step) == at and event.startswith("commit"):
                os.kill(os.getpid(), signal.SIGKILL)

        made.trace = tell
        return made


def killed() -> Recipe:
    """Return the one that kills its process."""
    return KilledAt(**{name: getattr(recipe(), name) for name in Recipe.__dataclass_fields__})
