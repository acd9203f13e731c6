"""The headline: a composition against a tuned and a plain opponent, on text and on images.

    python -m benchmarks.headline text        search both arms, run the study, profile the costs
    python -m benchmarks.headline images      the same on Fashion-MNIST
    python -m benchmarks.headline governed    what a policy costs, and what each licence class is worth; after text
    python -m benchmarks.headline text_parts        each part of text's composition alone, a screening; after text
    python -m benchmarks.headline image_parts       the same on images, and the whitepaper's composition; after images
    python -m benchmarks.headline segmentation      parts and their pairs on a third task, for the interactions
    python -m benchmarks.headline summary     headline.json from what is finished, README and docs from that

Two runs at a time, one thread each. A search or a study that was stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.headline.governed import governed_study
from benchmarks.headline.parts import TASK_OF, run_parts
from benchmarks.headline.segmentation import NAME as SEGMENTATION
from benchmarks.headline.segmentation import run_segmentation
from benchmarks.headline.studies import searched_arms, study_of, with_trials_by_hand
from benchmarks.headline.task import COMPOSITION, OPPONENT, PLAIN, HeadlineTask, TaskName
from benchmarks.headline.tasks import TASKS
from benchmarks.measure import RESULTS
from cosmati.errors import RunError
from cosmati.explorer.evidence import FOLDER, HEADLINE_FILE
from cosmati.explorer.wording import estimate_text
from cosmati.records.headline import HeadlineClaim, headline_to_json
from cosmati.records.study import SearchRecord, StudyRecord
from cosmati.study.comparison import area_between, difference_at_equal
from cosmati.study.costs import COSTS_FILE
from cosmati.study.curves import Axis
from cosmati.study.headline import Contest, headline_claims
from cosmati.study.registration import registered_in
from cosmati.study.runner import LINES_FILE, STUDY_FILE, run_study
from cosmati.study.search import chosen_settings, search_arms
from cosmati.train.facts import describe_hardware
from tools.write_headline import main as write_pages

ROOT = Path(__file__).parents[2]
FACTS_FILE = "facts.json"
AXES: tuple[Axis, ...] = ("seconds", "rows", "step")
COPIES = ROOT / "src" / "cosmati" / "explorer" / FOLDER


def folder_of(name: TaskName) -> Path:
    """Return where a task's lines and study lie."""
    return RESULTS / "headline" / name


def run_task(name: TaskName, jobs: int) -> StudyRecord:
    """Search, run and profile one task; what is finished isn't done again."""
    task, folder, hardware = TASKS[name], folder_of(name), describe_hardware(torch.device("cpu"))
    # Of the source that runs, whatever is committed in the meantime.
    commit, before = _commit(), _measured(folder)
    searches = search_task(task, folder, hardware, jobs)
    command = f"python -m benchmarks.headline {name}"
    record = run_study(study_of(task, searches), folder, hardware=hardware, command=command, jobs=jobs)
    if _measured(folder) != before or not (folder / FACTS_FILE).exists():
        facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit}
        (folder / FACTS_FILE).write_text(json.dumps(facts) + "\n")
    return record


def search_task(task: HeadlineTask, folder: Path, hardware: str, jobs: int) -> dict[str, SearchRecord]:
    """Search both arms. Where a study has runs nothing is left to search, or it was registered with another search.

    Raises:
        RunError: the registration was changed, or there are runs and a search that isn't finished.
    """
    arms = {name: replace(arm, by_hand=task.by_hand.get(name, 0)) for name, arm in searched_arms(task).items()}
    runs = folder / LINES_FILE
    if registered_in(folder) and runs.exists() and runs.stat().st_size:
        arms = {name: replace(arm, start=partial(_refuse_search, folder, name)) for name, arm in arms.items()}
        jobs = 1
    return search_arms(
        arms,
        task.plan,
        folder / "search",
        quality=task.metric,
        higher_is_better=task.higher_is_better,
        hardware=hardware,
        jobs=jobs,
    )


def _refuse_search(folder: Path, arm: str, *_: object) -> NoReturn:
    msg = (
        f"{folder} has runs, and the search of {arm!r} that they were registered with isn't the one that is asked for "
        "now: it has trials to run. Restore its recipe, dimensions and plan, or take a new folder."
    )
    raise RunError(msg)


def _measured(folder: Path) -> tuple[bytes, ...]:
    """Return all lines that the study has measured."""
    return tuple(path.read_bytes() if path.exists() else b"" for path in (folder / LINES_FILE, folder / COSTS_FILE))


def run_governed(jobs: int) -> StudyRecord:
    """Run the text composition under policies, at the settings that its search chose."""
    text = StudyRecord.from_json((folder_of("text") / STUDY_FILE).read_text())
    search = next(arm.search for arm in text.arms if arm.name == COMPOSITION)
    assert search is not None, "the text study searched it"
    folder = folder_of("text").with_name("governed")
    return run_study(
        governed_study(TASKS["text"], chosen_settings(search)),
        folder,
        hardware=describe_hardware(torch.device("cpu")),
        command="python -m benchmarks.headline governed",
        jobs=jobs,
    )


def say_governed(record: StudyRecord) -> None:
    """Print what each arm differs in from the ungoverned one, in quality at equal rows and in the cost of a step."""
    for arm in record.arms:
        if arm.name != record.baseline_arm:
            rows, area = difference_at_equal(record, arm.name, axis="rows"), area_between(record, arm.name)
            print(f"{arm.name:40} at equal rows {estimate_text(rows)}; over time {estimate_text(area)}")


def _commit() -> str:
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    # The recipes lie in benchmarks, and so does what this very run writes.
    where = ["--", "src", "benchmarks", ":(exclude)benchmarks/results"]
    status = [*git, "status", "--porcelain", *where]
    changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    return f"{commit}{' with changes' if changed else ''}"


def claims_of_finished() -> tuple[tuple[HeadlineClaim, ...], dict[TaskName, StudyRecord]]:
    """Read all finished tasks, and make their claims along all axes."""
    contests, studies = [], {}
    for name in TASKS:
        folder = folder_of(name)
        if not (folder / FACTS_FILE).exists():
            continue
        study = studies[name] = with_trials_by_hand(
            StudyRecord.from_json((folder / STUDY_FILE).read_text()), TASKS[name].by_hand
        )
        facts = json.loads((folder / FACTS_FILE).read_text())
        contests += [
            Contest(task=name, study=study, arm=COMPOSITION, opponent=opponent, **facts)
            for opponent in (OPPONENT, PLAIN)
        ]
    return headline_claims(contests, axes=AXES), studies


def write_summary() -> None:
    """Write headline.json, its copy and the studies' in the package, README and docs."""
    claims, studies = claims_of_finished()
    (RESULTS / HEADLINE_FILE).write_text(headline_to_json(claims))
    COPIES.mkdir(exist_ok=True)
    shutil.copy(RESULTS / HEADLINE_FILE, COPIES / HEADLINE_FILE)
    for name, study in studies.items():
        # A page needs no learning curves of them, and no recipes.
        runs = tuple(replace(run, points=(), seconds_by_part={}) for run in study.runs)
        arms = tuple(replace(arm, recipe_text="", search=arm.search) for arm in study.arms)
        (COPIES / f"{name}.json").write_text(replace(study, runs=runs, arms=arms).to_json())
    write_pages([])
    for claim in claims:
        label = "registered" if claim.is_registered else "not registered, a screening"
        print(claim.task, claim.opponent, claim.axis, claim.speed_up, claim.low, claim.high, claim.p, label)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.headline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*TASKS, "governed", *TASK_OF, SEGMENTATION, "summary"])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    arguments = parser.parse_args()
    if arguments.what == "summary":
        write_summary()
    elif arguments.what == "governed":
        say_governed(run_governed(arguments.jobs))
    elif arguments.what in TASK_OF:
        run_parts(arguments.what, arguments.jobs)
    elif arguments.what == SEGMENTATION:
        run_segmentation(arguments.jobs)
    else:
        run_task(arguments.what, arguments.jobs)


if __name__ == "__main__":
    main()
