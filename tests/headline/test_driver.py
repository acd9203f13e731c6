"""The headline's driver: when its facts are written, of which source, and what is refused before a search."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.headline import __main__ as driver
from benchmarks.headline.studies import with_trials_by_hand
from benchmarks.headline.task import COMPOSITION, OPPONENT, PLAIN
from benchmarks.headline.tasks import TASKS
from cosmati.errors import RunError
from cosmati.records.study import Prediction, SearchRecord, StudyRecord
from cosmati.study.definition import Arm, RegistrationPlan, Study
from cosmati.study.runner import run_study
from cosmati.study.search import Dimension, SearchedArm, SearchPlan, search_arms
from tests.study.fake_runs import FakeRun

QUIET = Console(file=io.StringIO())


class Driven:
    """The driver on made-up runs, which are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
        self.searched = self.ran = 0
        self.text = "recipe"
        self.folder = results / "headline" / "images"
        monkeypatch.setattr(driver, "RESULTS", results)
        plan = SearchPlan(rungs=((1.0, 2),), extra_rungs=((1.0, 2),), max_rounds=0)
        task = replace(driver.TASKS["images"], plan=plan, by_hand={OPPONENT: 10, COMPOSITION: 50})
        monkeypatch.setattr(driver, "TASKS", {**driver.TASKS, "images": task})
        monkeypatch.setattr(driver, "searched_arms", self.arms)
        monkeypatch.setattr(driver, "study_of", self.study)
        monkeypatch.setattr(driver, "search_arms", partial(search_arms, console=QUIET))
        monkeypatch.setattr(driver, "run_study", partial(run_study, console=QUIET))
        monkeypatch.setattr(driver, "_commit", lambda: "first")

    def arms(self, _: object) -> dict[str, SearchedArm]:
        def start(settings: Mapping[str, Any], budget: float, seed: int) -> FakeRun:
            self.searched += 1
            return FakeRun(budget, settings["lr"])

        rate = Dimension(name="lr", low=0.01, high=1.0)
        known = [{"lr": 0.1}]
        one = SearchedArm(start=start, dimensions=[rate], recipe_text=self.text, known=known)
        return {OPPONENT: one, COMPOSITION: one}

    def study(self, _: object, searches: Mapping[str, SearchRecord]) -> Study:
        def start(budget: float, seed: int) -> FakeRun:
            self.ran += 1
            return FakeRun(budget, 1.0 + seed / 100)

        arms = {
            OPPONENT: Arm(start=start, search=searches[OPPONENT], opponent="tuned"),
            COMPOSITION: Arm(start=start, search=searches[COMPOSITION]),
        }
        predictions = (Prediction(COMPOSITION, OPPONENT, "step", 1.2),)
        return Study(
            name="s",
            task="t",
            arms=arms,
            budgets=(0.5, 1.0),
            seeds=(0, 1),
            quality="loss",
            higher_is_better=False,
            baseline=OPPONENT,
            registration=RegistrationPlan(family="f", predictions=predictions, num_tests=4),
        )

    def run(self) -> StudyRecord:
        return driver.run_task("images", 1)

    @property
    def facts(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.folder / driver.FACTS_FILE).read_text())
        return found


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driven:
    made = replace(TASKS["images"], metric="loss", higher_is_better=False)
    monkeypatch.setattr(driver, "TASKS", {"images": made})
    return Driven(monkeypatch, tmp_path)


def test_facts_are_those_of_the_runs(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    record = driven.run()
    first = driven.facts
    assert first["commit"] == "first"
    assert [arm.search and arm.search.by_hand for arm in record.arms] == [10, 50]
    monkeypatch.setattr(driver, "_commit", lambda: "second")
    driven.run()
    assert (driven.searched, driven.ran) == (4, 8)
    assert driven.facts == first, "nothing was run"
    lines = driven.folder / driver.LINES_FILE
    lines.write_bytes(b"".join(lines.read_bytes().splitlines(keepends=True)[:-1]))
    driven.run()
    assert driven.ran == 9
    assert driven.facts["commit"] == "second"


def test_where_there_are_runs_another_search_is_refused_before_it_starts(driven: Driven) -> None:
    driven.run()
    driven.text = "another recipe"
    with pytest.raises(RunError, match=r"isn't the one that is asked for now.*new folder"):
        driven.run()
    assert (driven.searched, driven.ran) == (4, 8)
    driven.text = "recipe"
    path = driven.folder / "registration.json"
    path.write_text(path.read_text().replace("1.2", "1.1"))
    driven.text = "another recipe"
    with pytest.raises(RunError, match="isn't what was registered"):
        driven.run()
    assert driven.searched == 4


def test_a_changed_source_is_marked_and_results_are_none_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    places = ("src/a.py", "benchmarks/headline/b.py", "benchmarks/results/headline/c.json", "docs/d.md")
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("1")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "all")
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    is_changed = []
    for place in places:
        (tmp_path / place).write_text("2")
        is_changed.append(driver._commit().endswith(" with changes"))
        (tmp_path / place).write_text("1")
    assert is_changed == [True, True, False, False]
    (tmp_path / "benchmarks" / "new.py").write_text("1")
    assert driver._commit().endswith(" with changes")


def test_a_study_of_an_older_release_is_told_the_trials_by_hand(driven: Driven) -> None:
    record = driven.run()
    older = replace(
        record,
        arms=tuple(replace(arm, search=replace(arm.search, by_hand=0)) for arm in record.arms if arm.search),
    )
    assert with_trials_by_hand(older, {OPPONENT: 10, COMPOSITION: 50}) == record
    assert with_trials_by_hand(record, {OPPONENT: 1, PLAIN: 2}) == record
