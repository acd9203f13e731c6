"""How far a job is, as its folder says it: against folders made by hand, and locks that are held and let go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cosmati.storage.lock import FileLock
from cosmati.store.jobs import job_state, newest_lines, steps_per_second
from tests.store.samples import run_record, write_run


def lines(*steps: int, pace: float = 2.0) -> list[dict[str, Any]]:
    return [{"step": step, "rows": 8 * step, "seconds": step / pace, "loss": 1 / step} for step in steps]


def recipe(**settings: Any) -> str:
    return json.dumps({"budget": "100ba", "num_steps": 100, "methods": [], **settings})


def test_progress_and_time_left_of_a_running_job(tmp_path: Path) -> None:
    write_run(
        tmp_path, run_record(outcome="running", num_steps=0, recipe_text=recipe(), metrics={}), lines(10, 20, 30, 40)
    )
    with FileLock(tmp_path / "lock"):
        state = job_state(tmp_path)
        assert state.is_going
        assert (state.status, state.step, state.num_steps) == ("running", 40, 100)
        assert state.share == pytest.approx(0.4)
        assert state.steps_per_second == pytest.approx(2.0)
        assert state.seconds_left == pytest.approx(60 / 2.0)
        assert state.last["loss"] == 1 / 40
    state = job_state(tmp_path)
    assert (state.status, state.is_going, state.seconds_left) == ("broken off", False, None)


def test_a_budget_in_seconds_and_one_that_nobody_can_tell(tmp_path: Path) -> None:
    def state_of(**settings: Any) -> tuple[Any, Any]:
        record = run_record(outcome="running", num_steps=0, recipe_text=recipe(num_steps=None, **settings), metrics={})
        write_run(tmp_path, record, lines(10, 20, 30))
        with FileLock(tmp_path / "lock"):
            found = job_state(tmp_path)
        return found.share, found.seconds_left

    assert state_of(budget="60sec") == (pytest.approx(0.25), pytest.approx(45.0))
    assert state_of(budget="60sec", methods=["ScaleSchedule(ratio=0.5)"]) == (None, None)
    assert state_of(budget="3ep") == (None, None)
    record = run_record(outcome="running", recipe_text="not JSON", metrics={})
    write_run(tmp_path, record, lines(10, 20))
    assert job_state(tmp_path).share is None


def test_age_and_silence_go_by_the_newest_file(tmp_path: Path) -> None:
    write_run(tmp_path, run_record(outcome="running", metrics={}), lines(1), [{"step": 1, "accuracy": 0.5}])
    now = time.time()
    os.utime(tmp_path / "steps.jsonl", (now - 200, now - 200))
    os.utime(tmp_path / "evaluations.jsonl", (now - 50, now - 50))
    state = job_state(tmp_path, now)
    assert state.age == pytest.approx(50, abs=0.1)
    assert not state.is_silent
    assert job_state(tmp_path, now + 11).is_silent


def test_a_half_written_line_a_damaged_one_and_a_long_file(tmp_path: Path) -> None:
    write_run(tmp_path, run_record(metrics={}), lines(*range(1, 2001)))
    path = tmp_path / "steps.jsonl"
    with path.open("ab") as file:
        file.write(b'{"step": 2001, "loss": \n{"step": "x"}\n{"step": 2002, "lo')
    found = newest_lines(path)
    assert [line["step"] for line in found] == list(range(found[0]["step"], 2001))
    assert len(found) > 50
    assert job_state(tmp_path).step == 2000


def test_the_newest_checkpoint_is_named_by_its_step(tmp_path: Path) -> None:
    write_run(tmp_path, run_record())
    assert job_state(tmp_path).checkpoint is None
    for name in ("step-00000009", "step-00000100", "step-draft", "other"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert job_state(tmp_path).checkpoint == 100


def test_a_folder_that_is_gone_and_a_record_that_is_damaged(tmp_path: Path) -> None:
    assert job_state(tmp_path / "nothing").status == "removed"
    (tmp_path / "run.json").write_text('{"outcome": 3}')
    assert job_state(tmp_path).status == "unreadable"


def test_no_pace_is_told_from_what_does_not_tell_it() -> None:
    assert steps_per_second([]) is None
    assert steps_per_second(lines(5)) is None
    assert steps_per_second([{"step": 1}, {"step": 50}]) is None
    assert steps_per_second([{"step": 1, "seconds": 2.0}, {"step": 50, "seconds": 2.0}]) is None
    assert steps_per_second(lines(1, 50)) == pytest.approx(2.0)


def test_a_time_ahead_of_the_clock_is_no_age(tmp_path: Path) -> None:
    write_run(tmp_path, run_record(outcome="running", metrics={}), lines(1))
    now = time.time()
    os.utime(tmp_path / "steps.jsonl", (now + 3600, now + 3600))
    assert job_state(tmp_path, now).age == pytest.approx(-3600, abs=0.1)
    assert job_state(tmp_path, now + 3000).age == pytest.approx(-600, abs=0.1)
    assert not job_state(tmp_path, now).is_silent
    assert job_state(tmp_path, now + 3599).age == 0, "clocks of two machines differ a little"
