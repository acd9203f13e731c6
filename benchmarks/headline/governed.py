"""What governance costs, and which licence class bought which gain: the text composition with classes left out.

Every arm trains on as many rows. Where a class is left out, others' rows take its place, so a difference says what the
class is worth beside the others, and nothing of its absolute use.
"""

from __future__ import annotations

import tempfile
import weakref
from dataclasses import replace
from functools import partial

import torch

from benchmarks.headline.studies import recipe_of, text_of
from benchmarks.headline.task import COMPOSITION, HeadlineTask, Settings
from benchmarks.headline.tasks import TASKS
from cosmati.provenance.taxonomy import software_licences
from cosmati.recipes.quickstart import quickstart_policy
from cosmati.recipes.recipe import Recipe
from cosmati.routing.policy_file import PolicyFile, load_policy
from cosmati.study.definition import Arm, Study
from cosmati.train.trainer import Trainer

UNGOVERNED, WATCHED, ROUTED = "ungoverned", "all admitted, with a ledger", "the quickstart's policy"
CLASSES = ("open/copyleft", "open/permissive", "open/psf", "open/weak-copyleft", "public-domain")
BUDGETS, SEEDS = (0.25, 0.5), tuple(range(3000, 3005))
NUM_MICROBATCHES = 4
ROWS_PER_STEP = 4
"""At least: a step of several microbatches needs rows for each."""
COST_TURNS = 5
_HEAD = """version: 1
taxonomy: software-licences
regions:
  embedding:   {tag: embedding}
  blocks:      {blocks: {container: blocks, from: 0}, params: ["norm.*"]}
  head:        {tag: head}
rules:
  - {class: "**", weight: 1}
"""


def policy_of(arm: str) -> PolicyFile | None:
    """Return an arm's policy."""
    if arm == ROUTED:
        return quickstart_policy()
    if arm in (UNGOVERNED, "aa"):
        return None
    left_out = arm.removeprefix("without ") if arm.startswith("without ") else None
    return load_policy(_HEAD + (f"  - {{class: {left_out}, decision: reject}}\n" if left_out else ""))


def governed_recipe(settings: Settings, arm: str, budget: float, seed: int) -> Recipe:
    """Return the text composition's recipe, under an arm's policy."""
    enough = {**settings, "batch_size": max(ROWS_PER_STEP, int(settings["batch_size"]))}
    made = recipe_of(TASKS["text"], COMPOSITION, "reported", enough, budget, seed)
    policy = policy_of(arm)
    config = replace(made.config, num_microbatches=NUM_MICROBATCHES)
    return replace(made, policy=policy, taxonomy=software_licences() if policy else None, config=config, name=arm)


def start(settings: Settings, arm: str, budget: float, seed: int) -> Trainer:
    """Make a run; one with a policy keeps its ledger in a folder that goes with the run."""
    torch.set_num_threads(1)
    recipe = governed_recipe(settings, arm, budget, seed)
    if not recipe.policy:
        return recipe.trainer()
    folder = tempfile.TemporaryDirectory(prefix="governed-", ignore_cleanup_errors=True)
    trainer = recipe.trainer(run_folder=folder.name)
    weakref.finalize(trainer, folder.cleanup)
    return trainer


def governed_study(task: HeadlineTask, settings: Settings) -> Study:
    """Return the study: ungoverned, watched, routed, and each class left out."""
    names = (UNGOVERNED, "aa", WATCHED, ROUTED, *(f"without {one}" for one in CLASSES))
    arms = {
        name: Arm(
            start=partial(start, settings, name),
            description="the ungoverned one with other seeds" if name == "aa" else name,
            recipe_text=text_of(task, governed_recipe(settings, name, 1.0, 0)),
            methods=() if name in (UNGOVERNED, "aa") else (name,),
            seed_offset=1000 if name == "aa" else 0,
        )
        for name in names
    }
    return Study(
        name="headline-governed",
        task=f"{task.words}. The composition, {NUM_MICROBATCHES} microbatches a step, under policies",
        arms=arms,
        budgets=BUDGETS,
        seeds=SEEDS,
        quality=task.metric,
        quality_name=task.metric_name,
        higher_is_better=task.higher_is_better,
        baseline=UNGOVERNED,
        cost_turns=COST_TURNS,
    )
