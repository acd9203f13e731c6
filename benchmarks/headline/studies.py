"""The search and the study that are made of a headline's task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from benchmarks.headline.task import COMPOSITION, DOUBLE, OPPONENT, PLAIN, HeadlineTask, Rows, Settings, TaskName
from benchmarks.headline.tasks import TASKS
from cosmati.recipes.recipe import Recipe
from cosmati.records.study import NUM_HEADLINES, Prediction, SearchRecord, StudyRecord
from cosmati.study.definition import Arm, RegistrationPlan, Study
from cosmati.study.search import SearchedArm, chosen_settings
from cosmati.train.trainer import Trainer

AA_OFFSET = 1000
COST_TURNS, COST_BUDGET = 6, 0.25
FAMILY = "headlines: text and images, over a tuned and over a plain opponent, by training time"


def start(name: TaskName, arm: str, rows: Rows, settings: Settings, budget: float, seed: int) -> Trainer:
    """Make a run; another process can do it too."""
    torch.set_num_threads(1)
    return recipe_of(TASKS[name], arm, rows, settings, budget, seed).trainer()


def recipe_of(task: HeadlineTask, arm: str, rows: Rows, settings: Settings, budget: float, seed: int) -> Recipe:
    """Return an arm's recipe."""
    made = task.plain(budget, seed) if arm == PLAIN else task.recipe(arm, settings, budget, seed, rows=rows)
    # One thread, whatever else the machine does; and measured once, at the end.
    return replace(made, config=replace(made.config, num_threads=1, evaluate_every=None))


def text_of(task: HeadlineTask, recipe: Recipe) -> str:
    """Return a recipe's text with the digest of what is learnt from: other data are other runs."""
    return json.dumps({**json.loads(recipe.text), "corpus": task.corpus()}, indent=1)


def searched_arms(task: HeadlineTask) -> dict[str, SearchedArm]:
    """Return what is searched: the opponent, and the composition over the same dimensions and its own."""
    dimensions = {OPPONENT: tuple(task.shared), COMPOSITION: (*task.shared, *task.own)}
    return {
        arm: SearchedArm(
            start=partial(start, task.name, arm, "selection"),
            dimensions=dimensions[arm],
            recipe_text=text_of(task, recipe_of(task, arm, "selection", task.known[arm][0], 1.0, 0)),
            known=task.known[arm],
        )
        for arm in (OPPONENT, COMPOSITION)
    }


def study_of(task: HeadlineTask, searches: Mapping[str, SearchRecord]) -> Study:
    """Return the study of the arms that the searches chose, the opponent's double, and the plain opponent."""
    tuned = {arm: chosen_settings(searches[arm]) for arm in (OPPONENT, COMPOSITION)}
    arms = {
        OPPONENT: _arm(task, OPPONENT, tuned[OPPONENT], "Its settings are searched", "tuned", searches),
        COMPOSITION: replace(
            _arm(task, COMPOSITION, tuned[COMPOSITION], f"With {', '.join(task.parts)}", None, searches),
            methods=task.parts,
        ),
        PLAIN: _arm(task, PLAIN, {}, "A public recipe", "plain", searches),
        DOUBLE: replace(
            _arm(task, OPPONENT, tuned[OPPONENT], "The opponent with other seeds", None, {}), seed_offset=AA_OFFSET
        ),
    }
    return Study(
        name=f"headline-{task.name}",
        task=task.words,
        arms=arms,
        budgets=task.budgets,
        seeds=task.seeds,
        quality=task.metric,
        quality_name=task.metric_name,
        higher_is_better=task.higher_is_better,
        baseline=OPPONENT,
        registration=RegistrationPlan(
            family=FAMILY,
            num_tests=NUM_HEADLINES,
            predictions=tuple(
                Prediction(COMPOSITION, arm, "seconds", task.predicted[arm]) for arm in (OPPONENT, PLAIN)
            ),
        ),
        cost_turns=COST_TURNS,
        cost_budget=COST_BUDGET,
        notes=f"SHA-256 of what is learnt from: {task.corpus()}.",
    )


def with_trials_by_hand(study: StudyRecord, by_hand: Mapping[str, int]) -> StudyRecord:
    """Give a study of an older release the trials by hand before its searches."""
    arms = tuple(
        replace(arm, search=replace(arm.search, by_hand=arm.search.by_hand or by_hand.get(arm.name, 0)))
        if arm.search
        else arm
        for arm in study.arms
    )
    return replace(study, arms=arms)


def _arm(
    task: HeadlineTask,
    arm: str,
    settings: Settings,
    description: str,
    opponent: Literal["tuned", "plain"] | None,
    searches: Mapping[str, SearchRecord],
) -> Arm:
    return Arm(
        start=partial(start, task.name, arm, "reported", settings),
        description=description,
        recipe_text=text_of(task, recipe_of(task, arm, "reported", settings, 1.0, 0)),
        opponent=opponent,
        source=task.plain_source if opponent == "plain" else "",
        search=searches.get(arm),
    )
