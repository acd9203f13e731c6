"""The screening of the headline's parts: what each arm has, what is predicted, and that it runs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.headline import images, parts, text
from benchmarks.headline.images import OWN
from benchmarks.headline.task import COMPOSITION, DOUBLE, OPPONENT
from benchmarks.headline.tasks import TASKS
from cosmati.corpora import fashion_mnist
from cosmati.errors import PlanError, RunError
from cosmati.recipes import fashion
from cosmati.records.study import SearchRecord, StudyRecord
from cosmati.study.comparison import SCREENING_LEVEL, comparisons
from cosmati.study.composition import joint_effects
from cosmati.study.definition import Study
from cosmati.study.points import chosen_settings
from cosmati.study.runner import run_study
from tests.corpora.fashion_files import write

CACHES = (fashion._fashion, fashion._source, images.corpus_digest)


@pytest.fixture
def few_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fashion-MNIST is a few random rows."""
    (tmp_path / "fashion").mkdir()
    write(tmp_path / "fashion", num_train=180, num_test=20)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "fashion")
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


def recipes(study: Study) -> dict[str, dict[str, Any]]:
    return {name: json.loads(arm.recipe_text) for name, arm in study.arms.items()}


def same_but_for(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Return the names of what differs in two recipes, their names left out."""
    return {key for key in one if key != "name" and one[key] != other[key]}


@pytest.mark.usefixtures("few_images")
def test_a_part_of_images_differs_from_the_opponent_by_itself_alone() -> None:
    searches = parts.searches_of("images")
    study = parts.parts_study("image_parts", searches)
    found = recipes(study)
    differs = {name: same_but_for(text, found[OPPONENT]) for name, text in found.items()}
    assert differs == {
        OPPONENT: set(),
        DOUBLE: set(),
        "Muon": {"optimizers"},
        "strided stem": {"model"},
        "wider early stages": {"model"},
        "whitening stem": {"model"},
        "whitepaper": {"methods"},
        COMPOSITION: differs[COMPOSITION],
    }
    assert differs[COMPOSITION] >= {"optimizers", "model", "config"}
    assert study.arms[DOUBLE].seed_offset
    assert set(TASKS["images"].parts) == set(study.arms) - {OPPONENT, DOUBLE, COMPOSITION, "whitepaper"}
    chosen = chosen_settings(searches[COMPOSITION])
    hidden, rest = found["Muon"]["optimizers"]
    assert f"lr={chosen['lr']}" in hidden
    assert f"lr={chosen['rest_lr']}" in rest
    assert {one.name for one in OWN} <= set(parts.PARTS["images"]["Muon"].own)


def test_a_part_of_text_differs_from_the_opponent_by_itself_alone() -> None:
    searches = parts.searches_of("text")
    study = parts.parts_study("text_parts", searches)
    found = recipes(study)
    # An equal training time is another number of steps.
    assert same_but_for(found["Muon"], found[OPPONENT]) == {"optimizers", "config"}
    assert same_but_for(found["n-gram embeddings"], found[OPPONENT]) == {"optimizers", "config", "model"}
    assert found["Muon"]["optimizers"][-1] == found[OPPONENT]["optimizers"][0]
    assert found["n-gram embeddings"]["optimizers"][-1] == found[OPPONENT]["optimizers"][0]
    chosen = chosen_settings(searches[COMPOSITION])
    assert f"lr={chosen['matrix_lr']}" in found["Muon"]["optimizers"][0]
    assert f"lr={chosen['ngram_lr']}" in found["n-gram embeddings"]["optimizers"][0]
    own = {name for part in parts.PARTS["text"].values() for name in part.own}
    assert own == {one.name for one in text.OWN}


@pytest.mark.parametrize("name", ["text", "images"])
def test_opponent_and_composition_are_the_headlines(name: Any, request: pytest.FixtureRequest) -> None:
    if name == "images":
        request.getfixturevalue("few_images")
    committed = StudyRecord.from_json((parts.RESULTS / "headline" / name / "study.json").read_text())
    study = parts.parts_study({"text": "text_parts", "images": "image_parts"}[name], parts.searches_of(name))  # type: ignore[arg-type, index]
    for arm in committed.arms:
        if arm.name in (OPPONENT, COMPOSITION):
            mine, theirs = json.loads(study.arms[arm.name].recipe_text), json.loads(arm.recipe_text)
            # The corpus is this machine's, and what an older release told is told still.
            assert {key: mine[key] for key in theirs if key != "corpus"} == {
                key: value for key, value in theirs.items() if key != "corpus"
            }


@pytest.mark.usefixtures("few_images")
def test_the_family_is_a_screening_of_both_studies() -> None:
    studies = [parts.parts_study(name, parts.searches_of(task)) for name, task in parts.TASK_OF.items()]
    plans = [study.registration for study in studies if study.registration]
    assert len({plan.family for plan in plans}) == 1
    assert {plan.num_tests for plan in plans} == {sum(len(plan.predictions) for plan in plans)}
    for study in studies:
        seeds = {seed + arm.seed_offset for arm in study.arms.values() for seed in study.seeds}
        seen = {seed + offset for task in TASKS.values() for seed in task.seeds for offset in (0, parts.AA_OFFSET)}
        assert not seeds & seen
        assert study.arms[OPPONENT].opponent == "tuned"
        assert "Settings weren't searched for the parts" in study.notes


def small_run(name: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, budgets: tuple[float, ...]) -> StudyRecord:
    monkeypatch.setattr(parts, "run_study", partial(run_study, console=Console(file=io.StringIO())))
    whole = parts.parts_study(name, parts.searches_of(parts.TASK_OF[name]))
    study = replace(whole, budgets=budgets, seeds=whole.seeds[:2], cost_turns=2, cost_budget=budgets[0])
    record = parts.run_parts(name, 1, study=study, folder=folder)
    assert len(record.runs) == len(whole.arms) * 2 * len(budgets)
    levels = {one.level for one in comparisons(record)}
    assert levels == {SCREENING_LEVEL}
    assert any(one.arm == COMPOSITION and not one.unknown for one in joint_effects(record))
    return record


@pytest.mark.usefixtures("few_images")
@pytest.mark.slow
def test_the_parts_of_images_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "FULL_ROWS", 128)
    small_run("image_parts", tmp_path / "study", monkeypatch, (0.5, 1.0))
    printed = capsys.readouterr().out
    for part in (*TASKS["images"].parts, "together: over the product of what each gives alone\n  composition:"):
        assert part in printed


@pytest.mark.slow
def test_the_parts_of_text_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(text, "NUM_HELD_OUT", 4)
    monkeypatch.setattr(text, "MODEL", replace(text.MODEL, width=16, num_blocks=1))
    record = small_run("text_parts", tmp_path / "study", monkeypatch, (0.005, 0.01))
    assert record.quality_name == "bits per byte"
    assert "by rows, alone: times as fast to the baseline's best bits per byte" in capsys.readouterr().out


def test_unknown_arms_and_an_unfinished_headline_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no arm 'best'.*whitepaper"):
        images.recipe("best", images.KNOWN["opponent"][0], 1.0, 0, rows="reported")
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    with pytest.raises(RunError, match=r"Run: python -m benchmarks.headline text"):
        parts.searches_of("text")


def test_trials_by_hand_are_told() -> None:
    found: dict[str, SearchRecord] = parts.searches_of("images")
    assert {arm: search.by_hand for arm, search in found.items()} == dict(images.BY_HAND)
