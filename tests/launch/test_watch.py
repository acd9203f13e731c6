"""How a run gets on, read off its files, and when its silence is a halt; the clock is the test's."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from cosmati.launch.watch import RunWatch
from cosmati.records.launched import LaunchedRun


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def begun(folder: Path, attempt: int = 0, first_step: int = 0) -> None:
    """Write what a run writes as it starts."""
    run = LaunchedRun(folder=str(folder), attempt=attempt, num_microbatches=4, num_steps=100)
    (folder / "note").write_text(run.to_json())
    with (folder / "attempts.jsonl").open("a") as file:
        line = {"attempt": attempt, "first_step": first_step, "started": 1e9, "first_seconds": 0.0}
        file.write(json.dumps(line) + "\n")


def said(folder: Path, *lines: tuple[int, float]) -> None:
    with (folder / "steps.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "seconds": seconds}) + "\n" for step, seconds in lines)


def test_a_run_that_has_said_nothing_is_silent_since_the_attempt_began(tmp_path: Path) -> None:
    clock = Clock()
    watch = RunWatch(tmp_path / "note", clock)
    clock.now += 7.0
    progress = watch.look()
    assert (progress.run, progress.step, progress.silent_seconds) == (None, None, 7.0)


def test_progress_is_the_last_step_and_the_median_pace(tmp_path: Path) -> None:
    clock = Clock()
    watch = RunWatch(tmp_path / "note", clock)
    begun(tmp_path)
    said(tmp_path, (1, 9.0), (10, 18.0), (20, 38.0), (30, 44.0))  # 1, 2 and 0.6 s a step
    clock.now += 5.0
    progress = watch.look()
    assert progress.run is not None
    assert (progress.run.num_microbatches, progress.run.num_steps) == (4, 100)
    assert (progress.first_step, progress.step, progress.step_seconds, progress.silent_seconds) == (0, 30, 1.0, 0.0)
    clock.now += 3.0
    assert watch.look().silent_seconds == 3.0


def test_lines_of_an_earlier_attempt_are_no_progress(tmp_path: Path) -> None:
    begun(tmp_path)
    said(tmp_path, (1, 1.0), (10, 10.0), (20, 20.0))
    clock = Clock()
    watch = RunWatch(tmp_path / "other", clock)
    (tmp_path / "other").write_text(
        LaunchedRun(folder=str(tmp_path), attempt=1, num_microbatches=4, num_steps=None).to_json()
    )
    assert watch.look().step is None  # this attempt hasn't begun: the lines are another's
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 1, "first_step": 10, "started": 1e9, "first_seconds": 10.0}) + "\n")
    (tmp_path / "steps.jsonl").write_text("")
    said(tmp_path, (1, 1.0), (10, 10.0))
    progress = watch.look()
    assert (progress.first_step, progress.step) == (10, None)
    said(tmp_path, (11, 12.0))
    assert watch.look().step == 11


def test_a_torn_line_and_others_that_are_none_are_left_for_later(tmp_path: Path) -> None:
    begun(tmp_path)
    said(tmp_path, (1, 1.0))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('what\n{"step": null}\n{"step": 10, "seco')
    watch = RunWatch(tmp_path / "note", Clock())
    assert watch.look().step == 1


def test_of_a_long_file_the_end_is_read(tmp_path: Path) -> None:
    begun(tmp_path)
    said(tmp_path, *((10 * step, 10.0 * step) for step in range(1, 10_000)))
    progress = RunWatch(tmp_path / "note", Clock()).look()
    assert (progress.step, progress.step_seconds) == (99_990, 1.0)


@pytest.mark.parametrize(
    ("pace", "patience", "minimum", "allowed"),
    [
        (None, 30.0, 5.0, 600.0),  # before there's a median: as for a start
        (0.01, 30.0, 5.0, 5.0),  # the minimum
        (1.0, 30.0, 5.0, 10.0 + 30.0),  # a line is due after ten steps
        (100.0, 2.0, 5.0, 130.0 + 200.0),  # or after 30 s and a step
    ],
)
def test_silence_is_allowed_by_the_median_step(
    tmp_path: Path, pace: float | None, patience: float, minimum: float, allowed: float
) -> None:
    watch = RunWatch(tmp_path / "note", Clock())
    begun(tmp_path)
    said(tmp_path, *(() if pace is None else ((step, pace * step) for step in (1, 2, 3))))
    watch.look()
    assert watch.silence_allowed(patience, minimum, 600.0) == pytest.approx(allowed)


def test_what_it_has_once_taken_it_may_take_again(tmp_path: Path) -> None:
    clock = Clock()
    watch = RunWatch(tmp_path / "note", clock)
    begun(tmp_path)
    said(tmp_path, (1, 0.1), (2, 0.2))
    watch.look()
    clock.now += 50.0  # an evaluation
    said(tmp_path, (10, 1.0))
    watch.look()
    assert watch.silence_allowed(30.0, 5.0, 600.0) == 150.0


def test_a_program_that_trains_a_second_run_is_watched_in_that_one(tmp_path: Path) -> None:
    first, second, clock = tmp_path / "first", tmp_path / "second", Clock()
    first.mkdir()
    second.mkdir()
    watch = RunWatch(tmp_path / "note", clock)
    begun(first)
    said(first, (1, 1.0), (90, 90.0), (100, 100.0))
    (first / "note").rename(tmp_path / "note")
    assert watch.look().step == 100
    clock.now += 100.0
    begun(second)
    (second / "note").rename(tmp_path / "note")
    progress = watch.look()
    assert (progress.first_step, progress.step, progress.silent_seconds) == (0, None, 0.0)
    assert watch.silence_allowed(30.0, 5.0, 600.0) == 600.0  # it may compile anew
    clock.now += 7.0
    said(second, (1, 20.0))
    progress = watch.look()
    assert progress.run is not None
    assert (progress.run.folder, progress.step, progress.silent_seconds) == (str(second), 1, 0.0)


@pytest.mark.parametrize("lost", ["note", "attempts.jsonl", "steps.jsonl"])
def test_a_disk_that_is_lost_is_silence_and_no_error(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watch = RunWatch(tmp_path / "note", clock)
    begun(tmp_path)
    said(tmp_path, (1, 1.0))
    plain = Path.stat

    def stale(path: Path, **options: bool) -> object:
        if path.name == lost:
            raise OSError(errno.ESTALE, "Stale file handle")
        return plain(path, **options)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", stale)
        clock.now += 9.0
        silent = watch.look().silent_seconds
        assert silent == (9.0 if lost == "note" else 0.0)  # since it said where it is
        clock.now += 9.0
        assert watch.look().silent_seconds == silent + 9.0
    assert watch.look().step == 1


def test_what_goes_between_a_look_and_a_read_is_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RunWatch(tmp_path / "note", Clock())
    begun(tmp_path)
    said(tmp_path, (1, 1.0))
    with monkeypatch.context() as broken:
        broken.setattr("cosmati.launch.watch._last_lines", lambda path: path.with_name("gone").read_bytes())
        assert watch.look().step is None
    assert watch.look().step == 1
