"""Runs that raise an error: in a search they're the worst, in a study they're told, written down and run once more."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cosmati.errors import DivergenceError, RunError
from cosmati.explorer.views import study_view
from cosmati.records.study import SearchRecord, StudyRecord
from cosmati.study.comparison import NotReached, speed_up_at_equal_quality
from cosmati.study.measured import MeasuredRun, measure
from cosmati.study.points import PointSettings
from cosmati.study.runner import (
    FAILED_FILE,
    LINES_FILE,
    STARTED_FILE,
    STUDY_FILE,
    Arm,
    Study,
    finished_runs,
    run_study,
    unfinished_record,
)
from cosmati.study.search import TRIALS_FILE, Dimension, SearchedArm, SearchPlan, chosen_settings, search_arms
from tests.study.fake_runs import FakeRun, loss_at

RATE = Dimension(name="lr", low=1e-3, high=1.0)
PLAN = SearchPlan(rungs=((0.25, 8), (1.0, 2)), max_rounds=0)


def search(
    start: Callable[[PointSettings, float, int], FakeRun], folder: Path, console: Console | None = None, **changes: Any
) -> SearchRecord:
    arm = SearchedArm(start=start, dimensions=[RATE], recipe_text="a")
    options = {"quality": "loss", "higher_is_better": False, "hardware": "h", **changes}
    return search_arms({"a": arm}, PLAN, folder, console=console or Console(file=io.StringIO()), **options)["a"]


def picky(log: list[float], chosen: PointSettings, budget: float, seed: int) -> FakeRun:
    """A run for which a rate above 0.05 is too much: the true optimum is beyond it."""
    log.append(float(chosen["lr"]))
    error = ValueError("the rate\nis too high") if float(chosen["lr"]) > 0.05 else None
    return FakeRun(budget, loss_at(chosen, budget, seed), error=error)


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_a_trial_that_fails_is_the_worst_and_the_search_goes_on(tmp_path: Path, higher_is_better: bool) -> None:
    log: list[float] = []
    file = io.StringIO()
    found = search(partial(picky, log), tmp_path, Console(file=file), higher_is_better=higher_is_better)
    assert len(found.trials) == 10
    failed = [one for one in found.trials if one.error]
    assert {one.point for one in failed} == {one.point for one in found.trials if float(one.settings["lr"]) > 0.05}
    worst = -math.inf if higher_is_better else math.inf
    assert {(one.quality, one.steps, one.error) for one in failed} == {(worst, 0, "ValueError: the rate is too high")}
    assert float(chosen_settings(found)["lr"]) <= 0.05
    said = file.getvalue()
    for one in failed:
        words = (
            f"of 'a', point {one.point + 1} (lr {one.settings['lr']!r}), budget 0.25, seed 100: ValueError: the rate"
        )
        assert f"A run failed and counts as the worst: {words} is too high\n" in said
    # Begun again nothing is run, and the record is the same.
    log.clear()
    assert search(partial(picky, log), tmp_path, higher_is_better=higher_is_better) == found
    assert log == []


@pytest.mark.usefixtures("quick_processes")
def test_a_trial_whose_start_raises_or_whose_process_dies_failed_too(tmp_path: Path) -> None:
    found = search(fails_in_its_way, tmp_path, jobs=2)
    errors = [one.error for one in found.trials if one.error]
    assert len(found.trials) == 10
    assert any("died with exit code 7" in text for text in errors)
    assert any("KeyError" in text for text in errors)
    assert all(bool(one.error) == (float(one.settings["lr"]) > 0.01) for one in found.trials)


def fails_in_its_way(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
    if float(chosen["lr"]) > 0.4:
        os._exit(7)
    if float(chosen["lr"]) > 0.01:
        raise KeyError("warmup")
    return FakeRun(budget, loss_at(chosen, budget, seed))


def test_a_search_of_which_all_fails_says_so_with_the_first_and_is_run_again(tmp_path: Path) -> None:
    def wrong(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        error = DivergenceError("nan") if float(chosen["lr"]) < 0.01 else OSError("no data here")
        return FakeRun(budget, 1.0, error=error)

    with pytest.raises(
        RunError, match=r"No run of the search of 'a' at budget 0.25 went well: \d of 8 failed, and \d "
    ):
        search(wrong, tmp_path)
    lines = [json.loads(line)["trial"] for line in (tmp_path / TRIALS_FILE).read_text().splitlines()]
    first = next(one for one in lines if one["error"])
    words = rf"The first that failed, of 'a', point {first['point'] + 1} \(lr {first['settings']['lr']}\), budget 0.25"
    with pytest.raises(RunError, match=rf"{words}, seed 100: OSError: no data here"):
        search(wrong, tmp_path)
    num_failed = sum(bool(one["error"]) for one in lines)
    log: list[str] = []

    def mended(chosen: PointSettings, budget: float, seed: int) -> FakeRun:
        log.append(f"{chosen} {budget}")
        return FakeRun(budget, loss_at(chosen, budget, seed))

    found = search(mended, tmp_path)
    assert not any(one.error for one in found.trials)
    assert len(log) == num_failed + 2  # those that diverged stay as they are


def test_a_metric_that_no_run_has_stops_a_search_at_once_and_names_the_run(tmp_path: Path) -> None:
    log: list[float] = []
    with pytest.raises(RunError, match=r"'a' measure \['loss'\].*'accuracy'") as caught:
        search(partial(picky, log), tmp_path, quality="accuracy")
    (note,) = caught.value.__notes__
    assert note == f"In the run of 'a', point {len(log)} (lr {log[-1]!r}), budget 0.25, seed 100."


def make_study(fails: Callable[[str, float, int], Exception | None], log: list[str] | None = None) -> Study:
    def start(name: str, budget: float, seed: int) -> FakeRun:
        if log is not None:
            log.append(f"{name} {budget:g} {seed}")
        return FakeRun(budget, 1.0 + seed / 100, error=fails(name, budget, seed))

    arms = {name: Arm(start=partial(start, name), recipe_text=name) for name in ("baseline", "fast")}
    options = {"budgets": (0.5, 1.0), "seeds": (0, 1), "quality": "loss", "higher_is_better": False}
    return Study(name="s", task="t", arms=arms, **options)  # type: ignore[arg-type]


def run(study: Study, folder: Path, console: Console | None = None) -> StudyRecord:
    return run_study(study, folder, hardware="h", console=console or Console(file=io.StringIO()))


def one_fails(name: str, budget: float, seed: int) -> Exception | None:
    return ValueError("no\nroom") if (name, budget, seed) == ("fast", 0.5, 0) else None


def never(name: str, budget: float, seed: int) -> Exception | None:
    return None


def test_a_failed_run_of_a_study_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    log: list[str] = []
    file = io.StringIO()
    with pytest.raises(
        RunError, match=r"1 of 8 runs of 's' failed, and the others are finished: fast, budget 0.5, seed"
    ):
        run(make_study(one_fails, log), tmp_path, Console(file=file))
    assert len(set(log)) == len(log) == 8
    assert "A run failed: fast, budget 0.5, seed 0: ValueError: no room\n" in file.getvalue()
    assert (tmp_path / LINES_FILE).read_text().count("\n") == 7
    line = json.loads((tmp_path / FAILED_FILE).read_text())
    assert (line["arm"], line["budget"], line["seed"], line["error"]) == ("fast", 0.5, 0, "ValueError: no room")
    assert "fake_runs.py" in line["trace"]
    assert (tmp_path / STARTED_FILE).exists()
    assert not (tmp_path / STUDY_FILE).exists()
    begun = StudyRecord.from_json((tmp_path / STARTED_FILE).read_text())
    shown = unfinished_record(tmp_path, replace(begun, runs=finished_runs(tmp_path)))
    assert [one.error for one in shown.runs if one.error] == ["ValueError: no room"]
    assert len(shown.runs) == 8
    assert "Not finished: 7 of 8 runs" in shown.notes
    assert "Failed besides: 1." in shown.notes


@pytest.mark.parametrize("arm", ["fast", "baseline"])
def test_an_arm_of_which_every_run_fails_has_no_profile_and_the_study_ends(tmp_path: Path, arm: str) -> None:
    def fails(name: str, budget: float, seed: int) -> Exception | None:
        return ValueError("no room") if name == arm else None

    study = replace(make_study(fails), cost_turns=2)
    with pytest.raises(RunError, match="4 of 8 runs"):
        run(study, tmp_path)
    record = run(study, tmp_path)
    assert {one.arm for one in record.costs} == ({"baseline"} if arm == "fast" else set())
    assert sum(bool(one.error) for one in record.runs) == 4
    assert {one.name for one in record.arms} == {"baseline", "fast"}
    found = speed_up_at_equal_quality(record, "fast")
    assert isinstance(found, NotReached)
    assert arm in found.reason
    assert study_view(record, "s").record == record, "its page is made all the same"


def test_what_failed_is_run_once_more_and_is_a_failed_run_if_it_fails_again(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="run once more"):
        run(make_study(one_fails), tmp_path)
    log: list[str] = []
    record = run(make_study(one_fails, log), tmp_path)
    assert log == ["fast 0.5 0"]
    (failed,) = [one for one in record.runs if one.error]
    assert (failed.arm, failed.budget, failed.seed, failed.error) == ("fast", 0.5, 0, "ValueError: no room")
    assert math.isnan(failed.final.quality)
    assert StudyRecord.from_json((tmp_path / STUDY_FILE).read_text()).to_json() == record.to_json()
    # Mended it counts as any other.
    log.clear()
    mended = run(make_study(never, log), tmp_path)
    assert log == ["fast 0.5 0"]
    assert mended == run(make_study(never), tmp_path / "whole")


def test_a_changed_recipe_has_failed_for_the_first_time(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="1 of 8"):
        run(make_study(one_fails), tmp_path)
    study = make_study(one_fails)
    changed = {name: Arm(start=arm.start, recipe_text=f"{name} 2") for name, arm in study.arms.items()}
    other = Study(
        name="s", task="t", arms=changed, budgets=(0.5, 1.0), seeds=(0, 1), quality="loss", higher_is_better=False
    )
    with pytest.raises(RunError, match="1 of 8"):
        run(other, tmp_path)


def test_a_study_of_which_nothing_goes_well_stops_after_a_run_of_each_arm(tmp_path: Path) -> None:
    log: list[str] = []
    with pytest.raises(RunError, match=r"No run of 's' goes well: baseline, budget 0.5, seed 0: ValueError: x; fast,"):
        run(make_study(lambda *_: ValueError("x"), log), tmp_path)
    assert len(log) == 2
    # Where only one arm fails the other's runs are made, whichever is first.
    log.clear()
    with pytest.raises(RunError, match=r"4 of 8 runs of 's' failed.*; and 1 more\. Mend it"):
        run(make_study(lambda name, *_: ValueError("x") if name == "baseline" else None, log), tmp_path / "2")
    assert len(log) == 8


def fast_fails_at_once(name: str, budget: float, seed: int) -> FakeRun:
    if name == "fast":
        raise ValueError("x")
    return FakeRun(budget, 1.0, seconds=0.5)


@pytest.mark.long
@pytest.mark.usefixtures("quick_processes")
def test_an_arm_that_fails_while_another_still_runs_stops_nothing(tmp_path: Path) -> None:
    arms = {name: Arm(start=partial(fast_fails_at_once, name), recipe_text=name) for name in ("baseline", "fast")}
    options = {"budgets": (0.5, 1.0), "seeds": (0, 1), "quality": "loss", "higher_is_better": False}
    study = Study(name="s", task="t", arms=arms, **options)  # type: ignore[arg-type]
    console = Console(file=io.StringIO())
    with pytest.raises(RunError, match="4 of 8 runs of 's' failed, and the others are finished"):
        run_study(study, tmp_path, hardware="h", jobs=2, console=console)
    record = run_study(study, tmp_path, hardware="h", jobs=2, console=console)
    assert sum(bool(one.error) for one in record.runs) == 4


def test_an_error_with_a_name_that_is_not_utf_8_is_kept(tmp_path: Path) -> None:
    study = make_study(lambda *cell: ValueError("no \udcff.bin") if cell == ("fast", 0.5, 0) else None)
    with pytest.raises(RunError, match="1 of 8"):
        run(study, tmp_path)
    run(study, tmp_path)
    found = StudyRecord.from_json((tmp_path / STUDY_FILE).read_text(encoding="utf-8"))
    assert [one.error for one in found.runs if one.error] == ["ValueError: no \\udcff.bin"]


def measured_on(rows: Callable[[str], tuple[str, ...]]) -> Callable[..., MeasuredRun]:
    return lambda arm, *rest: replace(measure(arm, *rest), evaluated_on=rows(arm))


def test_a_record_has_the_rows_of_the_runs_that_went_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"baseline": ("a", "c"), "fast": ("b",)}
    monkeypatch.setattr("cosmati.study.runner.measure", measured_on(rows.__getitem__))
    with pytest.raises(RunError, match="1 of 8"):
        run(make_study(one_fails), tmp_path)
    assert run(make_study(one_fails), tmp_path).evaluated_on == ("a", "b", "c")
    rows["fast"] = ()  # of one arm they aren't known
    assert run(make_study(never), tmp_path / "2").evaluated_on == ()


def test_a_search_has_the_rows_of_the_trials_that_went_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmati.study.search.measure", measured_on(lambda _: ("a", "b")))
    found = search(partial(picky, []), tmp_path)
    assert any(one.error for one in found.trials)
    assert found.evaluated_on == ("a", "b")


def test_what_stops_everything_still_does(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(make_study(lambda *_: KeyboardInterrupt()), tmp_path)  # type: ignore[arg-type,return-value]
    with pytest.raises(RunError, match="not this") as caught:
        run(make_study(lambda *_: RunError("not this")), tmp_path)
    assert caught.value.__notes__ == ["In the run baseline, budget 0.5, seed 0."]
    assert not (tmp_path / FAILED_FILE).exists()
