"""Losses and metrics as lines of JSON: cut where a run goes on, whole but for the last line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from cosmati.core.clock import Budget, Clock, Time
from cosmati.errors import RunError
from cosmati.train.observers import metrics
from cosmati.train.observers.metrics import MetricsFile
from tests.train.hand_made import Ticks, outcome

BUDGET = Budget(Time.parse("20ba"))
NAMES = ("steps.jsonl", "evaluations.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def _written(folder: Path, steps: int) -> MetricsFile:
    """A file with a line for each step, and an evaluation after each."""
    file = MetricsFile(folder, interval=1)
    file.on_start(Clock(), BUDGET)
    for step in range(steps):
        file.on_step(outcome(step, loss=0.5 + step))
        file.on_evaluation(Clock(step=step + 1, rows=6, tokens=60), {"accuracy": 0.25}, 1.5)
    return file


def test_a_line_for_a_step_and_one_for_an_evaluation(tmp_path: Path) -> None:
    file = _written(tmp_path, 2)
    file.on_step(outcome(2, loss=2.5, clock=Clock(step=3, rows=18, tokens=180, seconds=0.75)))
    nothing = {"learning_rate": None, "gradient_norm": None}
    assert _lines(tmp_path / "steps.jsonl") == [
        {"step": 1, "rows": 6, "tokens": 0, "seconds": 0.0, "loss": 0.5, **nothing},
        {"step": 2, "rows": 12, "tokens": 0, "seconds": 0.0, "loss": 1.5, **nothing},
        {"step": 3, "rows": 18, "tokens": 180, "seconds": 0.75, "loss": 2.5, **nothing},
    ]
    evaluation = {"step": 1, "rows": 6, "tokens": 60, "seconds": 1.5, "accuracy": 0.25}
    assert _lines(tmp_path / "evaluations.jsonl") == [evaluation, evaluation | {"step": 2}]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.on_step(outcome(0, loss=math.nan))
    file.on_evaluation(Clock(step=1), {"a": math.inf, "b": 2.0}, 0.0)
    assert _lines(tmp_path / "steps.jsonl")[0]["loss"] is None
    (line,) = _lines(tmp_path / "evaluations.jsonl")
    assert (line["a"], line["b"]) == (None, 2.0)


@pytest.mark.parametrize("step", [0, 1, 3, 5, 9])
def test_a_run_that_goes_on_cuts_what_came_after(tmp_path: Path, step: int) -> None:
    _written(tmp_path, 5)
    before = {name: _lines(tmp_path / name) for name in NAMES}
    MetricsFile(tmp_path).on_start(Clock(step=step), BUDGET)
    assert {name: _lines(tmp_path / name) for name in NAMES} == {name: before[name][:step] for name in NAMES}


@pytest.mark.parametrize("torn", ['{"step": 3, "ro', "\0\0\0\0", "7", "[3]", '{"rows": 1}', '{"step": null}', "null"])
def test_a_torn_last_line_goes_at_the_next_start(tmp_path: Path, torn: str) -> None:
    _written(tmp_path, 2)
    for name in NAMES:
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    again = MetricsFile(tmp_path, interval=1)
    again.on_start(Clock(step=5), BUDGET)
    again.on_step(outcome(5))
    again.on_evaluation(Clock(step=6), {}, 0.0)
    assert [[line["step"] for line in _lines(tmp_path / name)] for name in NAMES] == [[1, 2, 6]] * 2


def test_lines_are_cut_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(tmp_path, 3)
    before = [(tmp_path / name).read_bytes() for name in NAMES]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"steps\.jsonl can't be written: .*No space left.*it goes on"):
        MetricsFile(tmp_path).on_start(Clock(step=1), BUDGET)
    assert [(tmp_path / name).read_bytes() for name in NAMES] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)


def test_a_full_disk_stops_the_run_by_name(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"steps\.jsonl can't be written: .*No space left.*it goes on"):
        MetricsFile(tmp_path).on_step(outcome(0))


def test_a_line_for_the_first_step_every_tenth_and_where_steps_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticks()
    monkeypatch.setattr(metrics, "monotonic", clock)
    file = MetricsFile(tmp_path)
    assert file.every == 1
    file.on_start(Clock(), BUDGET)
    for step in range(23):
        clock.pass_by(16.0 if step >= 20 else 0.1)
        file.on_step(outcome(step))
    assert [line["step"] for line in _lines(tmp_path / "steps.jsonl")] == [1, 10, 20, 22]
