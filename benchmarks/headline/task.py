"""What a headline's task gives, and the search and study that are made of it: the same for text and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Literal

import torch

from cosmati.recipes.recipe import Recipe
from cosmati.records.study import Prediction, SearchRecord, Setting
from cosmati.study.runner import Arm, Study
from cosmati.study.search import Dimension, SearchedArm, SearchPlan, chosen_settings
from cosmati.train.trainer import Trainer

TaskName = Literal["text", "images"]
Rows = Literal["selection", "reported"]
Settings = Mapping[str, Setting]

SEEDS = tuple(range(2000, 2008))
"""Of the runs that are reported: no search and no trial on the way to a composition has seen them."""
AA_OFFSET = 1000
PLAN = SearchPlan(rungs=((0.25, 16), (0.5, 8), (1.0, 3)), seeds=(100,))
COST_TURNS, COST_BUDGET = 8, 0.1
FAMILY = "headlines: text and images, over a tuned and over a plain opponent, by training time"
OPPONENT, COMPOSITION, PLAIN, DOUBLE = "opponent", "composition", "plain", "aa"


@dataclass(frozen=True, kw_only=True)
class HeadlineTask:
    """A task.

    Args:
        name: of the task and of the module that has it.
        words: what is learnt from what.
        metric: of the evaluation.
        metric_name: in words.
        higher_is_better: whether a higher metric is the better one.
        budgets: shares of the full budget.
        shared: dimensions that opponent and composition are both searched over.
        own: the composition's further ones.
        known: settings that are known to be good, by arm.
        recipe: of an arm at some settings, budget and seed; evaluated on rows for selection, or on those reported.
        plain: the plain opponent's recipe at a budget and a seed.
        plain_source: where its settings were published.
        parts: what the composition adds to the opponent.
        predicted: least speed-up by time over each opponent.
    """

    name: TaskName
    words: str
    metric: str
    metric_name: str
    higher_is_better: bool
    budgets: tuple[float, ...]
    shared: Sequence[Dimension]
    own: Sequence[Dimension]
    known: Mapping[str, Sequence[Settings]]
    recipe: Callable[..., Recipe]
    plain: Callable[[float, int], Recipe]
    plain_source: str
    parts: tuple[str, ...]
    predicted: Mapping[str, float]


def task_of(name: TaskName) -> HeadlineTask:
    """Return a task, from the module of its name."""
    found = import_module(f"benchmarks.headline.{name}").TASK
    assert isinstance(found, HeadlineTask)
    return found


def start(name: TaskName, arm: str, rows: Rows, settings: Settings, budget: float, seed: int) -> Trainer:
    """Make a run; another process can do it too."""
    torch.set_num_threads(1)
    return recipe_of(task_of(name), arm, rows, settings, budget, seed).trainer()


def recipe_of(task: HeadlineTask, arm: str, rows: Rows, settings: Settings, budget: float, seed: int) -> Recipe:
    """Return an arm's recipe."""
    made = task.plain(budget, seed) if arm == PLAIN else task.recipe(arm, settings, budget, seed, rows=rows)
    # One thread, whatever else the machine does; and measured once, at the end.
    return replace(made, config=replace(made.config, num_threads=1, evaluate_every=None))


def searched_arms(task: HeadlineTask) -> dict[str, SearchedArm]:
    """Return what is searched: the opponent, and the composition over the same dimensions and its own."""
    dimensions = {OPPONENT: tuple(task.shared), COMPOSITION: (*task.shared, *task.own)}
    return {
        arm: SearchedArm(
            start=partial(start, task.name, arm, "selection"),
            dimensions=dimensions[arm],
            recipe_text=recipe_of(task, arm, "selection", task.known[arm][0], 1.0, 0).text,
            known=task.known[arm],
        )
        for arm in (OPPONENT, COMPOSITION)
    }


def study_of(task: HeadlineTask, searches: Mapping[str, SearchRecord]) -> Study:
    """Return the study of the arms that the searches chose, the opponent's double, and the plain opponent."""
    tuned = {arm: chosen_settings(searches[arm]) for arm in (OPPONENT, COMPOSITION)}
    arms = {
        OPPONENT: _arm(task, OPPONENT, tuned[OPPONENT], "Searched as hard as the composition", "tuned", searches),
        COMPOSITION: replace(
            _arm(task, COMPOSITION, tuned[COMPOSITION], f"With {', '.join(task.parts)}", None, searches),
            methods=task.parts,
        ),
        PLAIN: replace(_arm(task, PLAIN, {}, "A public recipe", "plain", searches), source=task.plain_source),
        DOUBLE: replace(
            _arm(task, OPPONENT, tuned[OPPONENT], "The opponent with other seeds", None, searches),
            seed_offset=AA_OFFSET,
            search=None,
        ),
    }
    return Study(
        name=f"headline-{task.name}",
        task=task.words,
        arms=arms,
        budgets=task.budgets,
        seeds=SEEDS,
        quality=task.metric,
        quality_name=task.metric_name,
        higher_is_better=task.higher_is_better,
        baseline=OPPONENT,
        family=FAMILY,
        predictions=tuple(Prediction(COMPOSITION, arm, "seconds", task.predicted[arm]) for arm in (OPPONENT, PLAIN)),
        cost_turns=COST_TURNS,
        cost_budget=COST_BUDGET,
    )


def _arm(
    task: HeadlineTask,
    arm: str,
    settings: Settings,
    description: str,
    opponent: str | None,
    searches: Mapping[str, SearchRecord],
) -> Arm:
    return Arm(
        start=partial(start, task.name, arm, "reported", settings),
        description=description,
        recipe_text=recipe_of(task, arm, "reported", settings, 1.0, 0).text,
        opponent=opponent,
        search=searches.get(arm),
    )
