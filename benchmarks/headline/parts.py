"""The parts of the headline's compositions, each alone over the tuned opponent; a screening, not a headline.

    python -m benchmarks.headline text_parts        about 12 minutes on two cores, after text
    python -m benchmarks.headline image_parts       about 25 minutes, after images

Only opponent and composition were searched. A part runs at the opponent's settings; what the opponent hasn't, such as
Muon's rate, is as the composition's search chose it beside all other parts. So a part that gains little here may gain
more at settings of its own. On images the methodology whitepaper's composition is an arm too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from benchmarks.headline import images
from benchmarks.headline.interactions import say_interactions
from benchmarks.headline.studies import AA_OFFSET, recipe_of, start, text_of, with_trials_by_hand
from benchmarks.headline.task import COMPOSITION, DOUBLE, OPPONENT, HeadlineTask, Settings, TaskName
from benchmarks.headline.tasks import TASKS
from benchmarks.measure import RESULTS
from cosmati.errors import RunError
from cosmati.recipes.compositions import image_whitepaper
from cosmati.records.study import Prediction, SearchRecord, StudyRecord
from cosmati.study.definition import Arm, RegistrationPlan, Study
from cosmati.study.points import chosen_settings
from cosmati.study.runner import STUDY_FILE, run_study
from cosmati.train.facts import describe_hardware

PartsName = Literal["text_parts", "image_parts"]
TASK_OF: Mapping[PartsName, TaskName] = {"text_parts": "text", "image_parts": "images"}
BUDGETS, SEEDS = (0.25, 0.5, 1.0), (6000, 6001, 6002)
COST_TURNS, COST_BUDGET = 5, 0.0625
FAMILY = "parts of the headlines: gains over the tuned opponents by training time, a screening"


@dataclass(frozen=True, kw_only=True)
class Part:
    """An arm beside the opponent.

    Args:
        arm: of the task's recipe.
        methods: what it adds to the opponent.
        own: settings that are the composition's: the opponent hasn't them, or they mean another thing there.
        predicted: least speed-up by time; None where no gain is predicted.
    """

    arm: str
    methods: tuple[str, ...]
    own: tuple[str, ...] = ()
    predicted: float | None = None


_MUON = ("lr", "momentum", "weight_decay", "rest_lr", "num_iterations")
_WHITEPAPER = tuple(
    type(one).__name__
    for one in image_whitepaper().methods
    if type(one).__name__ not in ("ChannelsLast", "ScaleSchedule")
)
PARTS: Mapping[TaskName, Mapping[str, Part]] = {
    "text": {
        "Muon": Part(arm="muon", methods=("Muon",), own=("matrix_lr",), predicted=1.2),
        "n-gram embeddings": Part(arm="ngrams", methods=("n-gram embeddings",), own=("ngram_lr",), predicted=1.5),
    },
    "images": {
        "Muon": Part(arm="muon", methods=("Muon",), own=_MUON, predicted=1.2),
        "strided stem": Part(arm="stem", methods=("strided stem",)),
        "wider early stages": Part(arm="widths", methods=("wider early stages",)),
        "whitening stem": Part(arm="whitening", methods=("whitening stem",), predicted=1.05),
        images.WHITEPAPER: Part(arm=images.WHITEPAPER, methods=_WHITEPAPER),
    },
}
PREDICTED_WHOLE = 2.5
"""Of either composition over its tuned opponent; the headline's own runs read 3.2 and 3.35."""
NUM_TESTS = sum(1 + sum(part.predicted is not None for part in parts.values()) for parts in PARTS.values())
"""Of the family, both studies together."""


def parts_study(name: PartsName, searches: Mapping[str, SearchRecord]) -> Study:
    """Return the study: opponent, its double, each part alone, the whole composition.

    Args:
        name: of the study.
        searches: of opponent and composition, as the headline's study keeps them.
    """
    task = TASKS[TASK_OF[name]]
    parts = PARTS[task.name]
    opponent, whole = (chosen_settings(searches[arm]) for arm in (OPPONENT, COMPOSITION))
    arms = {
        OPPONENT: replace(
            _arm(task, OPPONENT, opponent, "At its searched settings", searches[OPPONENT]), opponent="tuned"
        ),
        DOUBLE: replace(_arm(task, OPPONENT, opponent, "The opponent with other seeds"), seed_offset=AA_OFFSET),
        **{part: _part_arm(task, one, opponent, whole) for part, one in parts.items()},
        COMPOSITION: replace(
            _arm(task, COMPOSITION, whole, "All parts, at its searched settings", searches[COMPOSITION]),
            # Together they have other settings than alone, a batch size among them.
            methods=tuple(f"{part} (at the composition's settings)" for part in task.parts),
        ),
    }
    predicted = {arm: one.predicted for arm, one in parts.items() if one.predicted} | {COMPOSITION: PREDICTED_WHOLE}
    return Study(
        name=f"headline-{name}",
        task=f"{task.words}. Parts of the composition, each alone",
        arms=arms,
        budgets=BUDGETS,
        seeds=SEEDS,
        quality=task.metric,
        quality_name=task.metric_name,
        higher_is_better=task.higher_is_better,
        baseline=OPPONENT,
        registration=RegistrationPlan(
            family=FAMILY,
            num_tests=NUM_TESTS,
            predictions=tuple(Prediction(arm, OPPONENT, "seconds", least) for arm, least in predicted.items()),
        ),
        cost_turns=COST_TURNS,
        cost_budget=COST_BUDGET,
        notes=notes_of(task),
    )


def notes_of(task: HeadlineTask) -> str:
    """Return which settings were searched, and for what."""
    own = [f"{', '.join(one.own)} of {name}" for name, one in PARTS[task.name].items() if one.own]
    text = (
        "A screening. Opponent and composition have the settings that the headline's search chose for each. Settings "
        f"weren't searched for the parts: they have the opponent's, and from the composition's search {'; '.join(own)}."
    )
    if task.name == "images":
        text += (
            " The whitepaper's composition has the opponent's settings too, and its methods' own, label smoothing "
            "among them; channels last, which all arms have, and the dilation of the run are left out."
        )
    return f"{text} SHA-256 of what is learnt from: {task.corpus()}."


def _part_arm(task: HeadlineTask, part: Part, opponent: Settings, whole: Settings) -> Arm:
    settings = {**opponent, **{name: whole[name] for name in part.own}}
    own = f"; {', '.join(part.own)} from the composition's search" if part.own else ""
    text = f"With {', '.join(part.methods)} at the opponent's settings{own}"
    return replace(_arm(task, part.arm, settings, text), methods=part.methods)


def _arm(task: HeadlineTask, arm: str, settings: Settings, description: str, search: SearchRecord | None = None) -> Arm:
    return Arm(
        start=partial(start, task.name, arm, "reported", settings),
        description=description,
        recipe_text=text_of(task, recipe_of(task, arm, "reported", settings, 1.0, 0)),
        search=search,
    )


def searches_of(name: TaskName) -> dict[str, SearchRecord]:
    """Return how opponent and composition were searched, from the headline's finished study.

    Raises:
        RunError: it isn't finished.
    """
    path = RESULTS / "headline" / name / STUDY_FILE
    if not path.exists():
        command = f"python -m benchmarks.headline {name}"
        msg = f"{path} isn't there, and the parts run at the settings that were chosen in it. Run: {command}"
        raise RunError(msg)
    study = with_trials_by_hand(StudyRecord.from_json(path.read_text("utf-8")), TASKS[name].by_hand)
    return {arm.name: arm.search for arm in study.arms if arm.search}


def run_parts(name: PartsName, jobs: int, *, study: Study | None = None, folder: Path | None = None) -> StudyRecord:
    """Run a study of parts, and print what each gains; what is finished isn't run again.

    Args:
        name: of the study.
        jobs: runs at a time.
        study: in its place.
        folder: of the study; None is the one of the committed results.

    Raises:
        RunError: the headline's study, whose settings the parts have, isn't finished.
    """
    record = run_study(
        study or parts_study(name, searches_of(TASK_OF[name])),
        folder or RESULTS / "headline" / name,
        hardware=describe_hardware(torch.device("cpu")),
        command=f"python -m benchmarks.headline {name}",
        jobs=jobs,
    )
    say_interactions(record, axes=("seconds", "rows"))
    return record
