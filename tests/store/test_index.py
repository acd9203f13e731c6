"""The index: equal to a fresh one whatever has happened to the store, and to itself; it mends itself."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmati.errors import RunError
from cosmati.storage.lock import FileLock
from cosmati.store.database import VERSION
from cosmati.store.filters import RunFilter
from cosmati.store.index import RunIndex
from tests.processes import PythonProcess
from tests.store.samples import (
    HOSTILE,
    all_runs,
    begin_study,
    indexed,
    run_record,
    small_study,
    study_line,
    write_run,
    write_study,
)

NAMES = ("a", "b", "group/c", "group/d")
WRITER = """
import sys
from pathlib import Path
from tests.store.samples import *
root = Path(sys.argv[1])
number = 0
while True:
    write_run(root / f"run-{number % 40}", run_record(f"run-{number % 40}", seed=number // 40, num_steps=number))
    begin_study(root / "study", small_study(seeds=range(20)), num_done=number % 80)
    print(number, flush=True)
    number += 1
"""
REFRESHER = """
import sys
from cosmati.store.index import RunIndex
with RunIndex(sys.argv[1]) as index:
    for _ in range(30):
        index.refresh()
"""


def child(code: str, *arguments: str | Path) -> PythonProcess:
    path = os.pathsep.join(one for one in sys.path if one)
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{path}"}
    return PythonProcess(["-c", code, *arguments], env=environment)


def test_an_empty_store_has_no_runs(tmp_path: Path) -> None:
    index = indexed(tmp_path)
    assert (index.count(), index.runs(), index.problems(), index.studies(), index.going()) == (0, [], [], [], [])
    assert index.choices("arm") == []
    with pytest.raises(RunError, match="no folder"):
        RunIndex(tmp_path / "not-there")


def test_a_refresh_reads_what_is_new_and_the_next_one_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "one", run_record("one"))
    write_study(tmp_path / "studies" / "s", small_study())
    time.sleep(0.1)  # files that were written just now are read once more
    index = RunIndex(tmp_path)
    told: list[tuple[int, int]] = []
    first = index.refresh(lambda done, total: told.append((done, total)))
    mark = index.mark
    assert (first.num_changed, first.num_gone, told) == (2, 0, [(2, 2)])
    again = index.refresh()
    assert (again.num_changed, again.num_gone, index.mark) == (0, 0, mark)
    assert index.count() == 9
    shutil.rmtree(tmp_path / "studies")
    gone = index.refresh()
    assert (gone.num_changed, gone.num_gone, index.count()) == (0, 1, 1)
    assert index.mark != mark
    assert index.query("SELECT count(*) FROM recipes") == [(1,)]


CHANGES: dict[str, Callable[[Path, int], None]] = {
    "run": lambda folder, n: write_run(folder, run_record(folder.name, num_steps=n)),
    "running": lambda folder, n: write_run(folder, run_record(outcome="running", ended=None), [{"step": n, "rows": n}]),
    "study": lambda folder, n: write_study(folder, small_study(f"study {n}", seeds=range(n % 3))),
    "begun": lambda folder, n: begin_study(folder, small_study(), num_done=n % 8),
    "damage": lambda folder, n: (folder.mkdir(parents=True, exist_ok=True), (folder / "run.json").write_text("{")),
    "remove": lambda folder, n: shutil.rmtree(folder, ignore_errors=True),
}  # type: ignore[dict-item]


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(sorted(CHANGES)), st.integers(0, 9)), max_size=8))
def test_after_any_changes_it_equals_a_fresh_index(changes: list[tuple[str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        index = indexed(root)
        for folder, change, number in changes:
            CHANGES[change](root / folder, number)
            index.refresh()
        index.refresh()
        found, problems, choices = all_runs(index), index.problems(), index.choices("method")
        shutil.rmtree(root / ".cosmati")
        fresh = indexed(root)
        assert (found, problems, choices) == (all_runs(fresh), fresh.problems(), fresh.choices("method"))


def test_a_store_that_grows_under_a_killed_writer_is_never_read_wrong(tmp_path: Path) -> None:
    expected = {(run.arm, run.budget, run.seed): run.final.quality for run in small_study(seeds=range(20)).runs}
    index = indexed(tmp_path)
    for _ in range(3):
        writer = child(WRITER, tmp_path)
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(15):
            index.refresh()
            assert index.problems() == []
            for run in index.runs(limit=1000):
                if run.kind == "run":
                    # Each record is of one moment: name, seed and steps were written together.
                    assert (run.name, run.seed) == (f"run-{run.steps % 40}", run.steps // 40)
                else:
                    assert run.budget is not None
                    assert run.quality == expected[run.arm, run.budget, run.seed]
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        index.refresh()
        found = all_runs(index)
        shutil.rmtree(tmp_path / ".cosmati")
        index = indexed(tmp_path)
        assert found == all_runs(index)
        assert {one.name for one in found.values() if one.kind == "run"} == {
            folder.parent.name for folder in tmp_path.glob("*/run.json")
        }


def test_two_processes_refresh_one_store(tmp_path: Path) -> None:
    write_study(tmp_path / "s", small_study())
    index = indexed(tmp_path)
    others = [child(REFRESHER, tmp_path) for _ in range(2)]
    number = 0
    while any(other.poll() is None for other in others):
        write_run(tmp_path / f"run-{number}", run_record(f"run-{number}"))
        number += 1
        index.refresh()
        assert index.count() >= 8 + number  # what this process has read stays
    for other in others:
        other.communicate()
    assert [other.returncode for other in others] == [0, 0]
    assert len(all_runs(index)) == 8 + number


@pytest.mark.long
def test_a_refresh_that_is_killed_leaves_a_sound_index(tmp_path: Path) -> None:
    for number in range(60):
        write_study(tmp_path / f"s{number}", small_study(f"s{number}", seeds=range(10)))
    for wait in (0.0, 0.05, 0.1):
        shutil.rmtree(tmp_path / ".cosmati", ignore_errors=True)
        code = REFRESHER.replace("    for _", "    print(1, flush=True)\n    for _")
        process = child(code, tmp_path)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(wait)
        process.kill()
        process.communicate()
        index = RunIndex(tmp_path)
        counts = dict(index.query("SELECT path, count(*) FROM runs GROUP BY path"))
        assert set(counts.values()) <= {40}  # a study's runs stand all or not at all
        index.refresh()
        assert index.count() == 2400


@pytest.mark.parametrize("damage", ["deleted", "junk", "cut", "other release", "emptied", "overwritten pages"])
def test_an_index_that_is_lost_or_damaged_is_made_anew(tmp_path: Path, damage: str) -> None:
    for number in range(30):
        write_study(tmp_path / f"s{number}", small_study(f"s{number}"))
    index = indexed(tmp_path)
    expected, file = all_runs(index), index.path
    index.close()
    if damage == "deleted":
        shutil.rmtree(tmp_path / ".cosmati")
        (tmp_path / ".cosmati").mkdir()
    elif damage == "junk":
        file.write_bytes(b"no database " * 1000)
    elif damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "emptied":
        file.write_bytes(b"")
    elif damage == "overwritten pages":
        with file.open("r+b") as handle:
            handle.seek(4096 * 3)
            handle.write(b"\xff" * 4096 * 6)
    else:
        with sqlite3.connect(file) as database:
            database.execute(f"PRAGMA user_version = {VERSION + 1}")
            database.execute("DROP TABLE runs")
        database.close()
    fresh = indexed(tmp_path)
    assert all_runs(fresh) == expected
    index.refresh()
    assert all_runs(index) == expected  # who had it open goes on too


def test_an_index_that_goes_while_it_is_read_comes_back(tmp_path: Path) -> None:
    write_study(tmp_path / "s", small_study())
    index = indexed(tmp_path)
    assert index.count() == 8
    for suffix in ("", "-wal", "-shm"):
        index.path.with_name(index.path.name + suffix).unlink(missing_ok=True)
    assert index.count() == 0
    index.refresh()
    assert index.count() == 8


def test_a_store_that_cannot_be_written_has_its_index_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    write_study(store / "s", small_study())
    (store / ".cosmati").write_text("a file, so that no folder can be made, by the superuser neither")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index = indexed(store)
    assert index.count() == 8
    assert index.path.is_relative_to(tmp_path / "cache")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RunError, match="Make one writable"):
        RunIndex(store)


def test_a_query_cannot_write(tmp_path: Path) -> None:
    index = indexed(tmp_path)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        index.query("DELETE FROM runs")


def test_a_run_has_the_task_that_its_recipe_says_or_the_recipes_name(tmp_path: Path) -> None:
    said = {"said": "Digits", "empty": "", "odd": ["a"], "hostile": "<script>alert(1)</script>"}
    for name, task in said.items():
        write_run(tmp_path / name, run_record(name, recipe_text=json.dumps({"task": task})))
    write_run(tmp_path / "silent", run_record("silent"))
    with indexed(tmp_path) as index:
        found = {run.name: run.task for run in all_runs(index).values()}
    names = dict.fromkeys(("empty", "odd", "silent"), "digits")
    assert found == names | {"said": "Digits", "hostile": said["hostile"]}


def test_hostile_names_are_found_and_kept_as_they_are(tmp_path: Path) -> None:
    for number, name in enumerate(HOSTILE):
        record = small_study(name, seeds=[0])
        arms = tuple(replace(arm, description=name, recipe_text=f'{{"k{number}": 1}}') for arm in record.arms)
        write_study(tmp_path / f"s{number}", replace(record, arms=arms, task=name))
        metrics = {"accuracy": 0.5, name: number / 10}
        write_run(tmp_path / f"r{number}", run_record(name, metrics=metrics, recipe_name=name))
    for name in ("it's", "100 %", "two\nlines", "<script>", "*?[a]"):
        write_run(tmp_path / name, run_record("folder"))
    index = indexed(tmp_path)
    assert index.problems() == []
    assert len(index.runs(RunFilter(exact={"name": ("folder",)}))) == 5
    for name in HOSTILE:
        assert index.count(RunFilter(exact={"study": (name,)})) == 4
        assert index.count(RunFilter(exact={"name": (name,)})) == 1
        found = index.runs(sort=f"metric:{name}", limit=1)
        assert found[0].name == name
        assert name in found[0].metrics


def test_what_cannot_be_read_is_a_problem_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path / "sound", run_record())
    write_run(tmp_path / "future", run_record(version=99))
    write_study(tmp_path / "future-study", small_study(version=99))
    write_run(tmp_path / "large", run_record(seed=2**70))
    write_run(tmp_path / "deep", run_record(recipe_text="[" * 100_000))
    for name, content in {
        "torn/run.json": b'{"version": 1, "run',
        "junk/study.json": b"\xff\xfe",
        "list/run.json": b"[]",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
    write_run(tmp_path / os.fsdecode(b"caf\xe9"), run_record())
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "run.json")
    os.mkfifo(tmp_path / "sound" / "steps.jsonl")
    index = indexed(tmp_path)
    assert [one.name for one in index.runs()] == ["run"]
    problems = {one.path: one.text for one in index.problems()}
    assert set(problems) == {"future", "future-study", "large", "deep", "torn", "junk", "list", "caf\\xe9"}
    assert "version 99" in problems["future"]
    assert "version 99" in problems["future-study"]
    assert "UTF-8" in problems["caf\\xe9"]


def test_a_run_is_running_as_long_as_it_is_locked(tmp_path: Path) -> None:
    write_run(tmp_path / "a", run_record(outcome="running", ended=None, metrics={}))
    with FileLock(tmp_path / "a" / "lock"):
        index = indexed(tmp_path)
        assert [one.status for one in index.runs()] == ["running"]
    index.refresh()  # no file has changed
    assert [one.status for one in index.runs()] == ["broken off"]


def test_a_study_that_goes_on_is_read_from_its_lines(tmp_path: Path) -> None:
    record = small_study()
    begin_study(tmp_path / "s", record, num_done=0)
    index = indexed(tmp_path)
    assert index.studies() == []
    with FileLock(tmp_path / "s" / "lock"):
        for num_done in range(4):
            found = index.going()
            assert [(one.name, one.num_done, one.num_planned, one.is_running) for one in found] == [
                ("small", num_done, 8, True)
            ]
            with (tmp_path / "s" / "runs.jsonl").open("a") as file:
                file.write(study_line(record.runs[num_done]))
                file.write(study_line(record.runs[-1], recipe="another recipe's"))
                file.write('{"version": 1, "recipe": "dig')
                file.flush()
                index.refresh()
                file.truncate(file.tell() - len('{"version": 1, "recipe": "dig'))
    assert [one.is_running for one in index.going()] == [False]
    open_runs = all_runs(index)
    assert {one.status for one in open_runs.values()} == {"completed"}
    write_study(tmp_path / "s", record)
    (tmp_path / "s" / "started.json").unlink()
    index.refresh()
    assert index.going() == []
    done = all_runs(index)
    assert len(done) == 8
    assert open_runs.items() <= done.items()


def test_facts_differ_in_kind_value_and_presence(tmp_path: Path) -> None:
    recipes = [
        {"same": 1, "none": None, "kind": 1, "text": "1", "number": 1, "list": [1], "empty": None},
        {"same": 1, "none": 1.0, "kind": True, "text": 1, "number": 1.0, "extra": "yes", "list": [2], "empty": None},
    ]
    for n, recipe in enumerate(recipes):
        write_run(tmp_path / f"r{n}", run_record(f"r{n}", recipe_text=json.dumps(recipe)))
    index = indexed(tmp_path)
    flat = [
        {name: value for run in index.runs() if run.name == f"r{n}" for name, value in run.facts.items()}
        for n in (0, 1)
    ]
    missing = object()

    def differs(name: str) -> bool:
        one, other = (found.get(name, missing) for found in flat)
        return one != other or isinstance(one, bool) != isinstance(other, bool)

    expected = [(name, differs(name)) for name in sorted(flat[0].keys() | flat[1].keys())]
    assert index.column_names(RunFilter())[1] == expected
    assert dict(expected) == {
        "empty": False,
        "extra": True,
        "kind": True,
        "list.0": True,
        "none": True,
        "number": False,
        "same": False,
        "text": True,
    }
    for chosen in (RunFilter(exact={"name": ("r0",)}), RunFilter(exact={"path": ("r0",)})):
        metrics, facts = index.column_names(chosen)
        assert metrics == ["accuracy"]
        assert not any(differs for _, differs in facts)


@pytest.mark.parametrize(("sort", "descending"), [("started", True), ("arm", False), ("seed", True), ("path", False)])
def test_runs_are_read_once_each_while_the_store_grows(tmp_path: Path, sort: str, descending: bool) -> None:
    write_study(tmp_path / "m", small_study("m", seeds=range(10)))
    index = indexed(tmp_path)
    before = all_runs(index)
    wanted = [run.key for run in index.runs(sort=sort, descending=descending, limit=1000)]
    found = []
    for num, run in enumerate(index.each_run(RunFilter(), sort=sort, descending=descending, page=7)):
        found.append(run.key)
        if num == 0:
            write_study(tmp_path / "a", small_study("a", seeds=range(5)))
            write_study(tmp_path / "m", small_study("m", seeds=range(12)))  # its lines are written anew
            index.refresh()
    assert found == wanted
    assert set(found) == set(before)
    gone = index.each_run(RunFilter(), sort=sort, descending=descending, page=7)
    next(gone)
    shutil.rmtree(tmp_path / "m")
    index.refresh()
    assert {run.path for run in list(gone)[7:]} <= {"a"}, "what is gone isn't made up"


def test_a_failed_run_of_a_study_is_no_diverged_one(tmp_path: Path) -> None:
    record = small_study()
    first, second, *rest = record.runs
    failed = replace(first, final=replace(first.final, quality=math.nan), error="RuntimeError: out of memory")
    diverged = replace(second, final=replace(second.final, quality=math.inf))
    write_study(tmp_path / "whole", replace(record, runs=(failed, diverged, *rest)))
    begin_study(tmp_path / "begun", replace(record, runs=(failed, diverged, *rest)), num_done=3)
    index = indexed(tmp_path)
    for path, num in (("whole", len(rest)), ("begun", 1)):
        statuses = [run.status for run in index.runs(RunFilter(exact={"path": (path,)}))]
        assert sorted(statuses) == sorted(["failed", "diverged", *["completed"] * num])


def test_a_study_is_chosen_by_name_and_folder(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_study(tmp_path / folder, small_study("same"))
    write_study(tmp_path / "third", small_study("third (3)"))
    index = indexed(tmp_path)
    for value, paths in (
        ("same", {"one", "two"}),
        ("same (two)", {"two"}),
        ("third (3)", {"third"}),
        ("same (third)", set()),
    ):
        found = index.runs(RunFilter(exact={"study": (value,)}), limit=100)
        assert {run.path for run in found} == paths
        assert index.count(RunFilter(exact={"study": (value,)})) == len(found)
    both = index.runs(RunFilter(exact={"study": ("same (one)", "third (3)")}), limit=100)
    assert {run.path for run in both} == {"one", "third"}
