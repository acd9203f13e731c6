"""The study commands where a study isn't finished, was begun again, or is profiled elsewhere than it was searched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cosmati.cli.main import app
from cosmati.records.study import ProfileRecord, StudyRecord
from cosmati.study.runner import LINES_FILE, PLANNED_FILE, STARTED_FILE, STUDY_FILE
from cosmati.study.search import TRIALS_FILE

STUDY = '''
"""A study of fake runs whose recipe's text can be changed, and of which one can be made to fail or to stop."""

from functools import partial
from pathlib import Path

from cosmati.study.runner import Arm, Study
from cosmati.study.search import Dimension, SearchedArm, SearchPlan, chosen_settings, search_arms
from tests.study.fake_runs import FakeRun, loss_at

HERE = Path(__file__).parent


def said(name):
    path = HERE / name
    return path.read_text() if path.exists() else ""


def trial(arm, settings, budget, seed):
    with (HERE / "trials.txt").open("a") as file:
        file.write(f"{arm}\\n")
    return FakeRun(budget, loss_at(settings, budget, seed))


def start(arm, settings, budget, seed):
    if arm == "fast" and said("stop.txt"):
        raise KeyboardInterrupt
    if arm == "fast" and seed == 1 and said("fail.txt"):
        raise ValueError("no room")
    return FakeRun(budget, loss_at(settings, budget, seed))


def study():
    rate = Dimension(name="lr", low=0.01, high=1.0)
    searched = {
        name: SearchedArm(start=partial(trial, name), dimensions=[rate], recipe_text=name) for name in ("base", "quick")
    }
    plan = SearchPlan(rungs=((0.5, 4), (1.0, 2)), max_rounds=0)
    found = search_arms(
        searched, plan, HERE / "search", quality="loss", higher_is_better=False, hardware=said("machine.txt") or None
    )

    def arm(name, of):
        best = chosen_settings(found[of])
        text = f"{name} {best}{said('version.txt')}"
        return Arm(start=partial(start, name, best), recipe_text=text, search=found[of])

    return Study(name="tiny", task="none", arms={"baseline": arm("baseline", "base"), "fast": arm("fast", "quick")},
                 budgets=(0.5, 1.0), seeds=(0, 1), quality="loss", higher_is_better=False)
'''


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["study", *(str(a) for a in arguments)])


def succeed(*arguments: object) -> Result:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.splitlines()[-1].startswith("Error: ") or "Error: " in result.stderr
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_study.py"
    path.write_text(STUDY)
    return path


def page_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_an_unfinished_study_is_reported_as_what_it_is(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    (tmp_path / "stop.txt").write_text("stop")
    assert call("run", file, "--folder", folder).exit_code == 130
    first = succeed("report", folder)
    assert "Not finished: 1 of 8 runs, without profiled costs." in first.stderr
    assert "Not finished: 1 of 8 runs" in page_of(folder)
    assert "tiny (not finished)" in page_of(folder)
    (tmp_path / "stop.txt").unlink()
    succeed("run", file, "--folder", folder)
    assert not succeed("report", folder).stderr
    assert "ot finished" not in page_of(folder)


def test_an_old_result_is_not_shown_under_a_new_recipe(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    succeed("run", file, "--folder", folder)
    (tmp_path / "version.txt").write_text(" the second recipe")
    (tmp_path / "stop.txt").write_text("stop")
    assert call("run", file, "--folder", folder).exit_code == 130
    assert "the second recipe" not in (folder / STUDY_FILE).read_text()
    said = succeed("report", folder).stderr
    assert "Not finished: 1 of 8 runs" in said
    assert "study.json is what an earlier beginning left, and isn't shown." in said
    assert "isn&#39;t shown" in page_of(folder)
    assert "of before" in call("plan", file, "--folder", folder, "--like", folder / STUDY_FILE).stderr
    # Before its first run is finished there is nothing to show but what it isn't.
    (folder / LINES_FILE).write_text("")
    assert "none of its 8 runs is finished. study.json is what an earlier" in refused("report", folder)
    (folder / PLANNED_FILE).unlink()
    assert "none of its as yet unknown runs" in refused("report", folder)
    (tmp_path / "stop.txt").unlink()
    succeed("run", file, "--folder", folder)
    assert not (folder / STARTED_FILE).exists()
    assert not succeed("report", folder).stderr


def test_failed_runs_are_named_and_come_to_the_page(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    (tmp_path / "fail.txt").write_text("fail")
    said = refused("run", file, "--folder", folder)
    assert "2 of 8 runs of 'tiny' failed, and the others are finished: fast, budget 0.5, seed 1: ValueError" in said
    assert "Not finished: 6 of 8 runs" in succeed("report", folder).stderr
    succeed("run", file, "--folder", folder)
    assert not succeed("report", folder).stderr
    assert "2 of 4 runs of fast diverged or failed." in page_of(folder)


def test_elsewhere_the_chosen_arms_are_profiled_and_nothing_is_searched(file: Path, tmp_path: Path) -> None:
    folder, sheet = tmp_path / "tiny", tmp_path / "there.json"
    succeed("run", file, "--folder", folder)
    trials = (tmp_path / "trials.txt").read_text()
    lines = (tmp_path / "search" / TRIALS_FILE).read_bytes()
    (tmp_path / "machine.txt").write_text("another machine")
    succeed("profile", file, "--like", folder / STUDY_FILE, "--output", sheet, "--turns", 2)
    profile = ProfileRecord.from_json(sheet.read_text())
    assert {one.arm for one in profile.costs} == {"baseline", "fast"}
    assert (tmp_path / "trials.txt").read_text() == trials
    assert (tmp_path / "search" / TRIALS_FILE).read_bytes() == lines
    said = refused("profile", file, "--output", sheet, "--turns", 2)
    assert "The search of 'base' isn't finished on this hardware" in said
    assert "--like study.json" in said
    # Where it was searched it's finished, and read.
    (tmp_path / "machine.txt").unlink()
    succeed("profile", file, "--output", tmp_path / "here.json", "--turns", 2)
    assert (tmp_path / "search" / TRIALS_FILE).read_bytes() == lines


def test_a_record_without_the_search_is_refused(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    succeed("run", file, "--folder", folder)
    record = StudyRecord.from_json((folder / STUDY_FILE).read_text())
    assert [arm.search.arm for arm in record.arms if arm.search] == ["base", "quick"]
    other = json.loads(record.to_json())
    other["arms"][1]["search"] = None
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    said = refused("profile", file, "--like", path, "--output", tmp_path / "x.json")
    assert "The record of 'tiny' has no search of 'quick' over lr" in said


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_folder_that_is_a_file_is_no_traceback(file: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("mine")
    folder = tmp_path / "taken" / below
    assert "can't be the folder of finished runs" in refused("run", file, "--folder", folder)
    assert "holds no study.json" in refused("report", folder)


def test_a_page_that_cannot_be_written_is_no_traceback(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    succeed("run", file, "--folder", folder)
    (tmp_path / "taken").write_text("mine")
    target = tmp_path / "taken" / "page.html"
    assert "can't be written" in refused("report", folder, "--output", target)
    (tmp_path / "there.json").mkdir()
    said = refused("profile", file, "--turns", 2, "--output", tmp_path / "there.json")
    assert f"{tmp_path / 'there.json'} can't be written" in said
    (folder / STUDY_FILE).write_bytes(b"\xff")
    assert "can't be read" in refused("report", folder)


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_prediction_along_no_axis_is_refused_in_one_message(tmp_path: Path, command: str) -> None:
    (tmp_path / "study.py").write_text(
        "from cosmati.records.study import Prediction\n"
        "from cosmati.study.runner import Arm, RegistrationPlan, Study\n"
        "def study():\n"
        "    told = RegistrationPlan(family='f', predictions=(Prediction('other', 'baseline', 'steps', 1.5),))\n"
        "    arms = {'baseline': Arm(start=None), 'other': Arm(start=None)}\n"
        "    return Study(name='s', task='', arms=arms, budgets=(1.0,), seeds=(0,), quality='q',\n"
        "                 higher_is_better=True, registration=told)\n"
    )
    result = CliRunner().invoke(app, ["study", command, str(tmp_path / "study.py"), "--folder", str(tmp_path / "s")])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Prediction(arm='other'")
    assert "one of the axes seconds, cpu_seconds, step, rows" in result.stderr
