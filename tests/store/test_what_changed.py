"""What a look at a store notices, and what it must not miss."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from cosmati.storage.lock import FileLock
from cosmati.store import scan
from cosmati.store.index import RunIndex
from cosmati.store.jobs import job_state
from cosmati.store.live import FilePlace
from cosmati.store.series import new_points
from tests.store.samples import begin_study, indexed, run_record, small_study, write_run, write_study

AGO = time.time() - 1000


def set_back(folder: Path, to: float = AGO) -> None:
    for path in folder.iterdir():
        os.utime(path, (to, to))


def test_a_process_that_died_is_noticed_though_no_file_is_new(tmp_path: Path) -> None:
    write_run(tmp_path / "a", run_record(outcome="running", ended=None, metrics={}))
    with FileLock(tmp_path / "a" / "lock"):
        set_back(tmp_path / "a")
        index = indexed(tmp_path)
        assert index.refresh().num_changed == 0
        assert [one.status for one in index.runs()] == ["running"]
    index.refresh()
    assert [one.status for one in index.runs()] == ["broken off"]


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "evaluations.jsonl"])
def test_each_file_of_a_run_is_watched(tmp_path: Path, name: str) -> None:
    lines = [{"step": 1, "seconds": 1.0, "accuracy": 0.25}]
    write_run(tmp_path / "a", run_record(outcome="failed", metrics={}, num_steps=1), lines, lines)
    set_back(tmp_path / "a")
    index = indexed(tmp_path)
    assert index.refresh().num_changed == 0
    (before,) = index.runs()
    with (tmp_path / "a" / name).open("r+") as file:
        if name == "run.json":
            text = file.read().replace('"num_steps": 1', '"num_steps": 7')
            file.seek(0)
            file.write(text)
        else:
            file.seek(0, 2)
            file.write('{"step": 7, "accuracy": 0.75}\n')
    os.utime(tmp_path / "a" / name, (AGO + 1, AGO + 1))
    index.refresh()
    (after,) = index.runs()
    assert (before.steps, after.steps) == (1, 7)
    assert (after.quality == 0.75) == (name == "evaluations.jsonl")


def test_a_file_of_just_now_is_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second writing may leave size, number and time as they were: a clock of files ticks."""
    write_run(tmp_path / "a", run_record(num_steps=100))
    path, now = tmp_path / "a" / "run.json", time.time_ns()
    os.utime(path, ns=(now, now))
    monkeypatch.setattr(scan.time, "time_ns", lambda: now + 1_000_000)
    index = RunIndex(tmp_path)
    index.refresh()
    with path.open("r+") as file:
        text = file.read().replace('"num_steps": 100', '"num_steps": 999')
        file.seek(0)
        file.write(text)
    os.utime(path, ns=(now, now))
    monkeypatch.setattr(scan.time, "time_ns", lambda: now + 2_000_000_000)
    index.refresh()
    assert [one.steps for one in index.runs()] == [999]
    assert index.refresh().num_changed == 0


def test_a_run_lies_six_folders_down_at_most(tmp_path: Path) -> None:
    write_run(tmp_path / "1/2/3/4/5/6", run_record("six"))
    write_run(tmp_path / "a/b/c/d/e/f/g", run_record("seven"))
    assert [one.name for one in indexed(tmp_path).runs()] == ["six"]


def test_a_run_in_a_run_is_a_problem_with_a_mend(tmp_path: Path) -> None:
    write_run(tmp_path / "outer", run_record("outer"))
    write_run(tmp_path / "outer" / "inner", run_record("inner"))
    write_run(tmp_path / "outer" / "checkpoints", run_record("no run's name"))
    index = indexed(tmp_path)
    assert [one.name for one in index.runs()] == ["outer"]
    (problem,) = index.problems()
    assert problem.path == "outer/inner"
    assert "another run's folder" in problem.text
    (tmp_path / "outer" / "inner").rename(tmp_path / "inner")
    index.refresh()
    assert (sorted(one.name for one in index.runs()), index.problems()) == (["inner", "outer"], [])


def test_a_step_that_comes_twice_counts_as_it_came_last(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    points = ((4, 1.0), (5, 2.0), (5, 3.0))
    path.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in points))
    assert new_points(path, FilePlace()).measures == {"loss": ([4, 5], [1.0, 3.0])}


def test_steps_that_go_back_within_one_answer_say_from_where(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4)))
    first = new_points(path, FilePlace())
    with path.open("a") as file:  # it went on from step 2, and nobody cut the file
        file.writelines(json.dumps({"step": step, "loss": 2.0}) + "\n" for step in (5, 3, 4))
    told = new_points(path, first.place)
    assert told.since == 3
    assert told.measures == {"loss": ([3, 4], [2.0, 2.0])}


def test_the_record_says_the_steps_that_no_line_has(tmp_path: Path) -> None:
    recipe = json.dumps({"num_steps": 100, "budget": "100ba"})
    write_run(tmp_path, run_record(num_steps=57, recipe_text=recipe), [{"step": 50, "loss": 1.0}])
    state = job_state(tmp_path)
    assert (state.step, state.share) == (57, pytest.approx(0.57))


@pytest.mark.parametrize("name", ["runs.jsonl", "planned.json", "started.json"])
@pytest.mark.parametrize("odd", ["pipe", "link"])
def test_a_studys_file_that_is_none_keeps_nobody_waiting(tmp_path: Path, name: str, odd: str) -> None:
    store, secret = tmp_path / "store", tmp_path / "secret"
    write_study(store / "s", small_study())
    begin_study(store / "s", small_study(), num_done=2)
    secret.write_bytes((store / "s" / name).read_bytes())
    (store / "s" / name).unlink()
    if odd == "pipe":
        os.mkfifo(store / "s" / name)
    else:
        (store / "s" / name).symlink_to(secret)
    index = indexed(store)
    if name == "planned.json":  # runs that are done are shown all the same
        assert (index.count(), index.problems()) == (2, [])
    else:
        (problem,) = index.problems()
        assert f"{name} is a link or no plain file" in problem.text
