"""Lines of finished work: what is damaged is named, what can't be written leaves what there is."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cosmati.errors import RunError
from cosmati.study import lines
from cosmati.study.costs import profile_costs
from cosmati.study.definition import Arm, Study
from cosmati.study.lines import LineFile, made_folder, only_one
from cosmati.study.registration import REGISTRATION_FILE, registered_in
from cosmati.study.runner import LINES_FILE, STARTED_FILE, finished_runs, run_study
from cosmati.study.search import TRIALS_FILE, Dimension, SearchedArm, SearchPlan, search_arms
from tests.study.fake_runs import FakeRun

QUIET = Console(file=io.StringIO())


@dataclass(frozen=True)
class Word:
    version: int
    word: str


def small_study(**changes: Any) -> Study:
    arms = {"baseline": Arm(start=lambda b, s: FakeRun(b, 1.0), recipe_text="b")}
    options = {"name": "s", "task": "t", "arms": arms, "budgets": (0.5, 1.0), "seeds": (0, 1), "quality": "loss"}
    return Study(**{**options, "higher_is_better": False, **changes})  # type: ignore[arg-type]


def run(folder: Path, **changes: Any) -> object:
    return run_study(small_study(**changes), folder, hardware="h", console=QUIET)


def search(folder: Path) -> object:
    arm = SearchedArm(
        start=lambda s, b, d: FakeRun(b, float(s["lr"])),
        dimensions=[Dimension(name="lr", low=0.1, high=1.0)],
        recipe_text="a",
    )
    plan = SearchPlan(rungs=((0.5, 4), (1.0, 2)), max_rounds=0)
    return search_arms({"a": arm}, plan, folder, quality="loss", higher_is_better=False, hardware="h", console=QUIET)


@pytest.mark.parametrize("damage", [b'{"version": 1, "word": "\xff"}', b'{"version": 1, "wo', b"", b"[]"])
def test_a_damaged_line_is_named_with_its_file(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "words.jsonl"
    words = LineFile(path, Word)
    words.append(Word(1, "one"))
    words.append(Word(1, "two"))
    whole = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([whole[0], damage, *whole[1:]]))
    with pytest.raises(RunError, match=rf"^Line 2 of {path} is damaged.*take the line out"):
        words.read()
    path.write_bytes(b"\n".join(whole))
    assert [one.word for one in words.read()] == ["one", "two"]


@pytest.mark.parametrize(("work", "name"), [(run, LINES_FILE), (search, TRIALS_FILE)])
def test_damage_inside_the_lines_of_a_study_or_a_search_is_named(tmp_path: Path, work: Any, name: str) -> None:
    work(tmp_path)
    path = tmp_path / name
    rows = path.read_bytes().split(b"\n")
    for damaged in (rows[1][: len(rows[1]) // 2], rows[1].replace(b"version", b"v\xe9")):
        path.write_bytes(b"\n".join([rows[0], damaged, *rows[2:]]))
        with pytest.raises(RunError, match=rf"^Line 2 of {path} is damaged"):
            work(tmp_path)
        if name == LINES_FILE:
            with pytest.raises(RunError, match=rf"^Line 2 of {path} is damaged"):
                finished_runs(tmp_path)


@pytest.mark.parametrize("work", [run, search])
def test_a_full_disk_leaves_what_is_written_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any
) -> None:
    """The disk takes two lines and a half of the third."""
    left, write = [2], lines.write_all

    def full(descriptor: int, data: bytes) -> None:
        if not left[0]:
            os.write(descriptor, data[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        write(descriptor, data)

    monkeypatch.setattr(lines, "write_all", full)
    name = LINES_FILE if work is run else TRIALS_FILE
    with pytest.raises(RunError, match=rf"{tmp_path / name} can't be written: No space left.*begin again"):
        work(tmp_path)
    kept = (tmp_path / name).read_bytes()
    assert (kept.count(b"\n"), kept[-1:]) == (2, b"\n")
    monkeypatch.undo()
    work(tmp_path)
    assert (tmp_path / name).read_bytes().startswith(kept)


def test_a_full_disk_is_told_by_whoever_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("cosmati.study.runner.replace_files", full)
    with pytest.raises(RunError, match=rf"{tmp_path / STARTED_FILE} can't be written: No space left"):
        run(tmp_path)


@pytest.mark.parametrize(
    "work",
    [run, search, lambda folder: profile_costs(small_study(cost_turns=2), folder, hardware="h", console=QUIET)],
)
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, work: Any, below: str) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(RunError, match=r"can't be the folder of finished runs.*is a file\. Name a folder"):
        work(path / below)
    assert path.read_text() == "mine"
    assert finished_runs(path / below) == ()


def test_a_folder_where_its_lines_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / LINES_FILE).mkdir()
    with pytest.raises(RunError, match=rf"{tmp_path / LINES_FILE} can't be read: Is a directory"):
        run(tmp_path)


def test_a_lock_that_cannot_be_written_is_no_other_process(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(RunError, match=r"lock can't be written: Is a directory"), only_one(tmp_path):
        pass


def test_a_registration_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / REGISTRATION_FILE
    for damage in (b"\xff\xfe", b"{", b"[]"):
        path.write_bytes(damage)
        with pytest.raises(RunError, match=rf"{path} (can't be read|isn't what was registered)"):
            registered_in(tmp_path)


def test_a_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    assert made_folder(tmp_path / "a" / "b").is_dir()
